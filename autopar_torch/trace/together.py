"""Ops that look at all rows of a batch, which replicas can do together (see shard/together.py).

A sum over the rows that such an op reads is added up first. If it still mixes rows, it becomes one
op with all that reads or makes a value with the batch in two dims, as losses that compare each row
with each other have.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

from torch import fx

from ..model import ROWS, TensorInfo
from ..shard.layout import PARTIAL, WHOLE, Layout
from ..shard.rows import rows_dim
from ..shard.rules import is_mutable, is_random, op_name
from ..shard.together import Together
from .blocks import TracedBlock, signature
from .clean import aten, each_info, info_of
from .shares import Flow


def join(piece: TracedBlock, node: fx.Node, flow: Flow, known: Flow) -> list[fx.Node]:
    """Let replicas do together what a coupled op needs: the nodes that do, none if they cannot."""
    sums = [n for n in node.all_input_nodes if flow.get(n, WHOLE) == PARTIAL]
    found = []
    for value in sums:
        with piece.graph.inserting_before(node):
            copy = piece.graph.call_function(aten.clone.default, (value,))
        copy.meta = _meta(value)
        node.replace_input_with(value, copy)
        found.append(_fold(piece, [copy], op_name(node), flow, known))
    if sums:
        return found
    inside = _tangle(piece, node)
    names = ", ".join(dict.fromkeys(op_name(n) for n in inside if op_name(n) != "getitem"))
    return [] if any(map(_is_alone, inside)) else [_fold(piece, inside, names, flow, known)]


def _is_alone(node: fx.Node) -> bool:
    """What may not be done by all: it draws or writes, or takes a matrix of weights."""
    weights = [n for n in node.all_input_nodes if n.op == "placeholder"
               and str(n.target).startswith("w_") and len(info_of(n).shape) > 1]
    return is_mutable(node) or is_random(node) or bool(weights)


def _tangle(piece: TracedBlock, node: fx.Node) -> list[fx.Node]:
    """An op with all that lies around values that have the batch in two dims, or rows and some more
    (`x[1:]`), in order."""
    inside: set[fx.Node] = set()
    more = {node}
    while more - inside:
        inside = between(piece.graph, list(inside | more))
        near = {value for n in inside for value in (n, *n.all_input_nodes) if is_tangled(value)
                or any(piece.odd.intersection(i.shape) for i in each_info(info_of(value)))}
        more = {n for value in near for n in (value, *value.users) if n.op == "call_function"}
    return [n for n in piece.graph.nodes if n in inside]


def tangled(prologue: fx.Graph, mixed: Collection[str], placed: Collection[str],
            blocks: Sequence[tuple[TracedBlock, fx.Graph]],
            outputs: Collection[str]) -> tuple[str, ...]:
    """What cannot be shared out: ops of the prologue that mix rows and make values of which a
    replica cannot have the rows of its own, as nobody knows where they are, or the batch is in two
    dims and more than an op that looks at all rows reads them; and such values between blocks, with
    their graphs."""
    read = {name for piece, graph in blocks for slot, name in piece.context.items()
            for place in graph.find_nodes(op="placeholder", target=slot)
            if not all(isinstance(user.target, Together) for user in place.users)}
    found = [op_name(n) for n in prologue.nodes if n.name in mixed and (
        n.name not in placed or (is_tangled(n) and n.name in read.union(outputs)))]
    found += [f"the batch in two dims of what {piece.name} takes" for piece, graph in blocks
              if any(is_tangled(n) for n in graph.find_nodes(op="placeholder")
                     if str(n.target) in piece.inputs)]
    return tuple(dict.fromkeys(found))


def is_tangled(node: fx.Node) -> bool:
    return any(sum(s % ROWS == 0 for s in i.shape if s) > 1 or any(s and s % ROWS**2 == 0
               for s in i.shape) for i in each_info(info_of(node)))


def _meta(node: fx.Node) -> dict[str, Any]:
    """That of another op that makes the same; what was discovered of the op is not its own."""
    return {key: value for key, value in node.meta.items() if key != "factors"}


def _fold(piece: TracedBlock, nodes: Sequence[fx.Node], names: str, flow: Flow,
          known: Flow) -> fx.Node:
    """One node instead of these, in the order of the graph; its results are known."""
    given = list(dict.fromkeys(n for own in nodes for n in own.all_input_nodes if n not in nodes))
    results = [n for n in nodes if n in leaving(set(nodes))]
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for k, node in enumerate(given):
        made[node] = graph.placeholder(f"g{k}")
        made[node].meta = {"info": info_of(node)}
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].meta = {"info": info_of(node)}
    ends = tuple(made[n] for n in results)
    graph.output(ends if len(ends) > 1 else ends[0])
    outs = [WHOLE if is_tangled(n) else rows_dim(info_of(n).shape) for n in results]
    ins = [flow.get(n, WHOLE) for n in given]
    target = Together(graph, f"together({names})", signature(graph), ins, outs)
    with piece.graph.inserting_after(nodes[-1]):
        new = piece.graph.call_function(target, (ROWS, *given))
    infos = tuple(info_of(n) for n in results)
    new.meta = {**_meta(results[0]), "info": infos if len(infos) > 1 else infos[0]}
    known[new] = outs[0] if len(outs) == 1 else WHOLE
    _replace(piece.graph, new, results, outs, known)
    for node in reversed(nodes):
        piece.graph.erase_node(node)
        known.pop(node, None)
    return new


def _replace(graph: fx.Graph, new: fx.Node, results: Sequence[fx.Node], outs: Sequence[Layout],
             known: Flow) -> None:
    """Who reads the results reads those of the new node, and stands behind it."""
    last = new
    for k, (old, layout) in enumerate(zip(results, outs, strict=True)):
        value = new
        if len(results) > 1:
            with graph.inserting_after(last):
                last = value = graph.call_function(operator.getitem, (new, k))
            value.meta, known[value] = _meta(old), layout
        old.replace_all_uses_with(value)
    behind = {new, *new.users}
    for node in list(takewhile(lambda n: n is not new, graph.nodes)):
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            last.append(node)
            last = node


def copied(graph: fx.Graph) -> fx.Graph:
    """The same graph, with what is known of its nodes."""
    new, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        made[node] = new.node_copy(node, made.__getitem__)
        made[node].name = node.name
    return new


def between(graph: fx.Graph, coupled: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes on a way from one of these to another, and themselves."""
    below, above = set(coupled), set(coupled)
    for node in graph.nodes:
        if node.op == "call_function" and not below.isdisjoint(node.all_input_nodes):
            below.add(node)
    for node in reversed(graph.nodes):
        if node in above:
            above.update(node.all_input_nodes)
    inside = below & above
    return inside | {user for n in inside if isinstance(info_of(n), tuple) for user in n.users
                     if op_name(user) == "getitem"}


def leaving(inside: set[fx.Node]) -> list[fx.Node]:
    """What others read of these nodes."""
    return [n for n in inside if isinstance(info_of(n), TensorInfo)
            and any(user not in inside for user in n.users)]
