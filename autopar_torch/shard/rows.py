"""Follows the rows of the batch through a graph: where they lie, and which ops mix them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ..model import ROWS, at_rows
from .layout import PARTIAL, WHOLE, Layout, Split, Strategy
from .rules import Shape, ShapedOp


def row_flow(graph: fx.Graph, carries: Mapping[fx.Node, Layout],
             known: Mapping[fx.Node, Layout],
             options: Mapping[fx.Node, list[Strategy]]) -> tuple[dict[fx.Node, Layout],
                                                                 list[fx.Node]]:
    """Follow the batch through a graph: the layout it gives every value, and ops that couple rows.

    `carries` says what it is on the placeholders, `known` what tests found on the way, `options`
    how ops may be split. A value that is a sum over rows is `P`; ops that are linear in such sums
    keep it.
    """
    flow, coupled = dict(carries), list[fx.Node]()
    for node, choices in options.items():
        op = ShapedOp(node)
        have = tuple(flow.get(n, WHOLE) for n in op.inputs)
        match = next((s for s in choices if s.ins == have), None)
        if node in known:
            flow[node] = known[node]
        elif all(layout == WHOLE for layout in have):
            flow[node] = rows_dim(op.out)  # a parameter expanded to the batch starts a flow
            coupled += [node] if op.name == "randperm" and flow[node] != WHOLE else []
        elif match is not None and not (op.name == "mean" and match.out == PARTIAL) \
                and _has_rows(op.out, match.out):
            flow[node] = match.out
        elif PARTIAL in have and _is_linear(op, have):
            flow[node] = PARTIAL
        else:  # statistics of the batch leave rows where they are, two batches in one dim, say
            stay = op.name == "batch_norm" and isinstance(have[0], Split)
            flow[node] = have[0] if stay else rows_dim(op.out)
            coupled.append(node)
    return flow, coupled


def give_real_sizes(node: fx.Node, rows: int, device: torch.device) -> None:
    """Sizes and devices among the arguments of a node become those of so many rows there."""

    def real(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        is_size = isinstance(value, int) and not isinstance(value, bool)
        return at_rows(value, rows) if is_size else value

    node.args = fx.node.map_aggregate(node.args, real)  # type: ignore[assignment]
    node.kwargs = fx.node.map_aggregate(node.kwargs, real)  # type: ignore[assignment]


def at_batch(graph: fx.Graph, rows: int, device: torch.device) -> fx.Graph:
    """The same graph for a real number of rows, on a real device."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    for node in graph.nodes:
        env[node] = new.node_copy(node, lambda n: env[n])
        give_real_sizes(env[node], rows, device)
    return new


def rows_dim(shape: Shape) -> Layout:
    return next((Split(d) for d, size in enumerate(shape) if size and size % ROWS == 0), WHOLE)


def _has_rows(shape: Shape, layout: Layout) -> bool:
    """Whether rows can lie so: no dim of a size of its own, as that of two views of a batch, is cut
    where rows are."""
    return not isinstance(layout, Split) or shape[layout.dim] // layout.outer % ROWS == 0


_LINEAR = {"neg", "to", "clone", "detach", "squeeze", "unsqueeze", "view", "reshape", "alias",
           "getitem"}


def _is_linear(op: ShapedOp, have: tuple[Layout, ...]) -> bool:
    if op.name in ("add", "sub"):
        return all(layout == PARTIAL for layout in have) and len(have) == 2
    return op.name in _LINEAR or (op.name in ("mul", "div") and have[0] == PARTIAL
                                and have.count(PARTIAL) == 1)
