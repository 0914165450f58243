"""Follows the rows of the batch through a graph: where they lie, and which ops mix them."""

from __future__ import annotations

from torch import fx

from ..model import ROWS
from .layout import PARTIAL, WHOLE, Layout, Split
from .rules import Shape, ShapedOp
from .strategies import strategies


def row_flow(graph: fx.Graph, carries: dict[fx.Node, Layout]) -> tuple[dict[fx.Node, Layout],
                                                                     list[str]]:
    """Follow the batch through a graph: the layout it gives every value, and ops that couple rows.

    `carries` says what it is on the placeholders. A value that is a sum over rows is `P`; ops that
    are linear in such sums keep it.
    """
    flow, coupled = dict(carries), []
    options = strategies(graph)
    for node, choices in options.items():
        op = ShapedOp(node)
        have = tuple(flow.get(n, WHOLE) for n in op.inputs)
        match = next((s for s in choices if s.ins == have), None)
        if all(layout == WHOLE for layout in have):
            flow[node] = rows_dim(op.out)  # a parameter expanded to the batch starts a flow
        elif match is not None and not (op.name == "mean" and match.out == PARTIAL):
            flow[node] = match.out
        elif PARTIAL in have and _is_linear(op, have):
            flow[node] = PARTIAL
        else:
            flow[node] = rows_dim(op.out)
            coupled.append(op.name)
    return flow, coupled


def rows_dim(shape: Shape) -> Layout:
    return next((Split(d) for d, size in enumerate(shape) if size and size % ROWS == 0), WHOLE)


_LINEAR = {"neg", "to", "clone", "detach", "squeeze", "unsqueeze", "view", "reshape", "alias",
           "getitem"}


def _is_linear(op: ShapedOp, have: tuple[Layout, ...]) -> bool:
    if op.name in ("add", "sub"):
        return all(layout == PARTIAL for layout in have) and len(have) == 2
    return op.name in _LINEAR or (op.name in ("mul", "div") and have[0] == PARTIAL
                                and have.count(PARTIAL) == 1)
