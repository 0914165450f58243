"""Whether two traces compute the same: names, and what nobody reads, do not count."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

KeptNodes = Mapping[fx.Node, int]  # what forward keeps of itself for later -> which of these values


def same(one: fx.Graph, two: fx.Graph, kept_one: KeptNodes, kept_two: KeptNodes) -> bool:
    return _text(one, kept_one) == _text(two, kept_two)


def constant(module: fx.GraphModule, wanted: Sequence[fx.Node], known: Mapping[str, Tensor],
             state: Collection[str] = ()) -> list[Tensor] | None:
    """The values of these nodes, if they are the same whatever the inputs and parameters are. They
    may depend on placeholders that are `known`, or `state`, which is then read as zeros."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node.op != "output":
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output([made[node] for node in wanted])
    live, given = _live(graph, {}), list[Tensor]()
    for node in reversed(graph.nodes):
        if node not in live or (node.op == "placeholder" and not node.users):
            graph.erase_node(node)
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        if node.op == "placeholder":
            if node.name not in state and node.name not in known:
                return None
            given.append(known[node.name].clone() if node.name in known else
                         torch.zeros_like(node.meta["val"], device="cpu"))
    versions = [value._version for value in given]
    found: list[Tensor] = fx.Interpreter(fx.GraphModule(module, graph)).run(*given)
    return found if versions == [value._version for value in given] else None


def _text(graph: fx.Graph, kept: KeptNodes) -> str:
    live, names = _live(graph, kept), {node: f"kept {k}" for node, k in kept.items()}
    number = dict[fx.Node, str]()
    for node in graph.nodes:
        if node in names or node not in live or (node.op == "placeholder" and not live.intersection(
                node.users) - kept.keys()):
            continue
        if _does_nothing(node):
            names[node] = names[node.all_input_nodes[0]]
        else:
            number[node] = names[node] = f"%{len(number)}"
    return "\n".join(f"{node.op} {node.target if node.op != 'output' else ''} "
                     f"{fx.node.map_arg((node.args, dict(node.kwargs)), names.__getitem__)}"
                     for node in number)


def _does_nothing(node: fx.Node) -> bool:
    """Whether it is a cast to what its tensor is, or a slice that is the whole of it."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if name != "aten::to":
        return bool(name == "aten::alias")
    one, two = (n.meta["val"] for n in (node, node.all_input_nodes[0]))
    return bool(one.dtype == two.dtype and one.device == two.device)


def _live(graph: fx.Graph, kept: KeptNodes) -> set[fx.Node]:
    """What is read, and all writes but those into what nobody reads. What is kept is given."""
    base: dict[fx.Node, fx.Node] = {}  # what a value may be a view of
    for node in graph.nodes:
        first = node.args[0] if node.args and node not in kept and _may_view(node) else None
        base[node] = base[first] if isinstance(first, fx.Node) else node
    live, num_before = {n for n in graph.nodes if n.op in ("placeholder", "output")}, 0
    while len(live) > num_before:
        num_before = len(live)
        for node in reversed(graph.nodes):
            if node not in kept and (node in live or (_writes(node) and base[node] in live)):
                live |= {node, *node.all_input_nodes}
    return live


def _may_view(node: fx.Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return schema is None or any(own.alias_info for own in schema.returns)


def _writes(node: fx.Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
