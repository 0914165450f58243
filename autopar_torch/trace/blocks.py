"""Cut the flat graph into a prologue and a chain of blocks, and find equal blocks.

A block is a run of ops of one numbered submodule (`layers.3`, or `stages.0.blocks.3` where there
are few stages), or what lies between such runs; in a model without numbered submodules, a run of
one direct child (of the module in a wrapper). Everything that depends on no parameter, nor on an
input that requires a gradient, is prologue: every stage computes for itself what it needs of it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx

from ..model import ROWS, TensorInfo
from ..shard import loss_sums
from ..shard.layout import WHOLE, Layout, Strategy
from ..shard.rows import row_flow, rows_dim
from ..shard.rules import flops, has_rule, is_mutable, is_random, op_name, writers
from .capture import InputSource
from .clean import info_of

_NUMBER = re.compile(r"^\d+$")
FEW = 4  # so many names are enough to cut at


@dataclass(frozen=True)
class TracedBlock:
    """A block: its nodes, its own graph, and what the slots of the graph are filled with."""

    name: str
    nodes: list[fx.Node]
    graph: fx.Graph
    inputs: dict[str, str]
    context: dict[str, str]
    params: dict[str, str]
    outputs: dict[str, str]
    infos: dict[str, TensorInfo]
    signature: str
    odd: frozenset[int] = frozenset()  # sizes that depend on the rows, and are no multiples of them


def split_main(graph: fx.Graph, sources: dict[str, InputSource], placed: Collection[str] = (),
               in_order: bool = False) -> set[fx.Node]:
    """Nodes that depend on a parameter, an input that requires a gradient, or a buffer that changes
    or that not every rank has whole: the chain's nodes. A plan may cut what they read, so what else
    reads it is one of them. `in_order`: so is what draws numbers, which are drawn as forward does.
    """
    params, buffers = ({node for node in graph.find_nodes(op="placeholder")
                        if sources[node.name].kind == kind} for kind in ("param", "buffer"))
    cut = {node for node in buffers if sources[node.name].name in placed or writers(node)}
    while True:
        main = params | cut | set(given_nodes(graph, sources))
        for node in graph.nodes:
            if node.op == "call_function" and (
                    (is_random(node) and (in_order or _stays(node)))
                    or any(n in main for n in node.all_input_nodes)
                    ) and node.target is not loss_sums.count_values:  # rows have no gradients
                main.add(node)
        chain = {node for node in main if node.op == "call_function"}
        read = {n for node in chain for n in node.all_input_nodes} & buffers
        if read <= cut:
            return chain
        cut |= read


def _stays(node: fx.Node) -> bool:
    """Whether it draws into what exists, or more than one value, or something is written there."""
    return is_mutable(node) or isinstance(info_of(node), tuple) or bool(writers(node))


def given_nodes(graph: fx.Graph, sources: dict[str, InputSource]) -> list[fx.Node]:
    """Inputs that are used and require gradients."""
    return [node for node in graph.find_nodes(op="placeholder")
            if sources[node.name].kind == "input" and info_of(node).grad and node.users]


def mark_grads(graph: fx.Graph, learning: set[str]) -> None:
    """Note on every value whether a gradient flows back through it."""
    for node in graph.nodes:
        info = info_of(node)
        if node.op == "placeholder":
            grad = node.name in learning
        else:
            before = [info_of(n) for n in node.all_input_nodes]
            infos = [i for own in before for i in (own if isinstance(own, tuple) else (own,))]
            grad = op_name(node) != "detach" and any(i is not None and i.grad for i in infos)
        node.meta["info"] = _with_grad(info, grad)


def _with_grad(info: Any, grad: bool) -> Any:
    if isinstance(info, tuple):
        return tuple(_with_grad(i, grad) for i in info)
    if info is None:
        return None
    floating = info.dtype.startswith(("float", "bfloat", "complex"))
    return TensorInfo(info.shape, info.dtype, grad and floating)


def units(nodes: list[fx.Node]) -> list[tuple[str, list[fx.Node]]]:
    """Runs of nodes that belong together, with a name."""
    paths = [str(node.meta.get("module", "")) for node in nodes]
    parts = [path.split(".") for path in paths]
    levels = zip(*(own for own in parts if own != [""]), strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
    ways = [[_numbered(path) for path in paths], [_numbered(path, 2) for path in paths],
            [".".join(own[: common + 1]) for own in parts]]
    keys = next((keys for keys in ways if len(set(keys)) >= FEW), ways[-1])
    runs: list[tuple[str, list[fx.Node]]] = []
    for key, node in zip(keys, nodes, strict=True):
        if runs and (runs[-1][0] == key or (not key and _numbered(keys[0]) == "" and not any(
            map(_numbered, keys)))):
            runs[-1][1].append(node)
        else:
            runs.append((key, [node]))
    return _unique(runs)


def _numbered(path: str, depth: int = 1) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up`; nothing where there is no number. With a depth
    of 2, `stages.0.blocks.3` of `stages.0.blocks.3.mlp`."""
    parts = path.split(".")
    places = [i + 1 for i, part in enumerate(parts) if _NUMBER.match(part)][:depth]
    return ".".join(parts[: places[-1]]) if places else ""


def _unique(runs: list[tuple[str, list[fx.Node]]]) -> list[tuple[str, list[fx.Node]]]:
    seen: dict[str, int] = {}
    named = []
    for i, (key, nodes) in enumerate(runs):
        name = key or ("embed" if i == 0 else "head" if i == len(runs) - 1 else "between")
        seen[name] = seen.get(name, 0) + 1
        named.append((name if seen[name] == 1 else f"{name}~{seen[name]}", nodes))
    return named


def cut(graph: fx.Graph, main: set[fx.Node], sources: dict[str, InputSource]) -> list[TracedBlock]:
    """Blocks in order, each with a graph of its own."""
    runs = _joined(units([node for node in graph.nodes if node in main]))
    owner = {node: i for i, (_, nodes) in enumerate(runs) for node in nodes}
    results = set(next(n for n in graph.nodes if n.op == "output").all_input_nodes)
    values = {node: node.name for node in given_nodes(graph, sources)}
    pieces = []
    for index, (name, nodes) in enumerate(runs):
        leaving = [n for n in nodes if n in results or any(
            u in owner and owner[u] != index for u in n.users)]
        for k, node in enumerate(leaving):
            values[node] = f"{name}:{k}"
        pieces.append(_piece(name, nodes, leaving, values, sources))
    return pieces


def _joined(runs: list[tuple[str, list[fx.Node]]]) -> list[tuple[str, list[fx.Node]]]:
    """A buffer that is written is at one place: all between its first and last use is one block."""
    owner = {node: i for i, (_, nodes) in enumerate(runs) for node in nodes}
    spans = []
    for node in {n for user in owner for n in user.all_input_nodes if n not in owner}:
        writing = writers(node)
        values = [node, *(n for user in writing if op_name(user).endswith("_")
                          for n in (user, *user.all_input_nodes[1:]))]
        for value in values:
            values += [user for user in value.users if op_name(user) == "detach"]
        places = [owner[user] for value in values for user in value.users if user in owner]
        spans += [(min(places), max(places))] if writing else []
    found: list[tuple[str, list[fx.Node]]] = []
    for i, (name, nodes) in enumerate(runs):
        if any(first < i <= last for first, last in spans):
            found[-1][1].extend(nodes)
        else:
            found.append((name, nodes))
    return found


def _piece(name: str, nodes: list[fx.Node], leaving: list[fx.Node], values: dict[fx.Node, str],
           sources: dict[str, InputSource]) -> TracedBlock:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inside = set(nodes)
    outside = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    piece = TracedBlock(name, nodes, graph, {}, {}, {}, {}, {}, "")
    for node in outside:
        slot, table, filled = _slot(piece, node, values, sources)
        table[slot] = filled
        piece.infos[slot] = info_of(node)
        env[node] = graph.placeholder(slot)
        env[node].meta = {"info": info_of(node), "origin": node}
    for node in nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].meta = {**node.meta, "origin": node}
        env[node].name = node.name
    graph.output(tuple(env[n] for n in leaving))
    for k, node in enumerate(leaving):
        piece.outputs[f"y{k}"] = values[node]
        piece.infos[f"y{k}"] = info_of(node)
    return replace(piece, signature=signature(graph))


def _slot(piece: TracedBlock, node: fx.Node, values: dict[fx.Node, str],
          sources: dict[str, InputSource]) -> tuple[str, dict[str, str], str]:
    if node in values:
        return f"x{len(piece.inputs)}", piece.inputs, values[node]
    source = sources.get(node.name) if node.op == "placeholder" else None
    if source is not None and source.kind in ("param", "buffer"):
        name = source.name
        prefix = piece.name.split("~")[0] + "."
        local = name[len(prefix) :] if name.startswith(prefix) else name
        slot = "w_" + re.sub(r"\W", "_", local).lower()
        taken = slot in piece.params  # as `bias` is by `fc.bias` in a block called `fc`
        return f"{slot}_{len(piece.params)}" if taken else slot, piece.params, name
    return f"c{len(piece.context)}", piece.context, node.name


def signature(graph: fx.Graph) -> str:
    """Text that is equal for blocks that compute the same, from slots of the same names."""
    index = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: index[n])
        lines.append(f"{node.op} {node.target} {args} {info_of(node)}")
    return "\n".join(lines)


class Traits(NamedTuple):
    """Properties of a block that follow from its ops."""

    coupled: tuple[fx.Node, ...]  # ops that couple rows
    flow: dict[fx.Node, Layout]
    flops_per_row: float
    unruled: tuple[str, ...]  # ops without a rule
    mutates: bool  # buffers change
    rows: tuple[Layout, ...]  # per output: where its rows are; P: it is a sum over them
    tested: tuple[str, ...] = ()  # ops that couple rows inside: outside, a test found none
    local: tuple[str, ...] = ()  # ops that look at the rows of a part, as was allowed
    joined: tuple[str, ...] = ()  # ops that look at all rows, which replicas do together
    why: str = ""  # what the test found


def carried(graph: fx.Graph, given: Collection[tuple[str, Layout]]) -> dict[fx.Node, Layout]:
    """Where the rows of each slot are; `given` says it of some, or P for sums over the rows."""
    carries: dict[fx.Node, Layout] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            is_param = str(node.target).startswith("w_")
            plain = WHOLE if is_param else rows_dim(info_of(node).shape)
            carries[node] = dict(given).get(node.name, plain)
    return carries


def traits(graph: fx.Graph, carries: Mapping[fx.Node, Layout], known: Mapping[fx.Node, Layout],
           options: Mapping[fx.Node, list[Strategy]]) -> Traits:
    """`known`: where rows are inside, by a test; `options`: how ops may be split."""
    flow, coupled = row_flow(graph, carries, known, options)
    body = [n for n in graph.nodes if n.op == "call_function"]
    work = sum(flops(n) for n in body) / ROWS
    unruled = {op_name(n) for n in body if not has_rule(n)} - {"add_"}
    mutates = any(is_mutable(n) for n in body)
    leaving: Any = graph.find_nodes(op="output")[0].args[0]
    rows = tuple(flow.get(node, WHOLE) for node in leaving)
    return Traits(tuple(coupled), flow, work, tuple(sorted(unruled)), mutates, rows)
