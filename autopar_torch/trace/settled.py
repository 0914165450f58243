"""Whether two traces compute the same: names, and what nobody reads, do not count."""

from __future__ import annotations

from typing import Any

from torch import fx


def same(one: fx.Graph, two: fx.Graph) -> bool:
    return _text(one) == _text(two)


def _text(graph: fx.Graph) -> str:
    live = _live(graph)
    number = {node: f"%{k}" for k, node in enumerate(n for n in graph.nodes if n in live)}
    return "\n".join(f"{node.op} {node.target if node.op != 'output' else ''} "
                     f"{fx.node.map_arg((node.args, dict(node.kwargs)), number.__getitem__)}"
                     for node in number)


def _live(graph: fx.Graph) -> set[fx.Node]:
    """What is read, and all writes but those into what nobody reads."""
    base: dict[fx.Node, fx.Node] = {}  # what a value may be a view of
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        base[node] = base[first] if isinstance(first, fx.Node) else node
    live, num_before = {n for n in graph.nodes if n.op in ("placeholder", "output")}, 0
    while len(live) > num_before:
        num_before = len(live)
        for node in reversed(graph.nodes):
            if node in live or (_writes(node) and base[node] in live):
                live |= {node, *node.all_input_nodes}
    return live


def _writes(node: fx.Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
