"""Strategies on an axis: plain ones, attention along the sequence, and on n x n devices linears in
rings, and what may run on their results.

They are made of pairs of plain ones: whatever may be cut by either of two factors may be cut by
both. Operands arrive as `i`, weights lie as `w`, results as `o`; other ops take results as they
lie. A bias is cut with the columns, and its gradient is summed over the rows.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from .layout import PARTIAL, WHOLE, Layout, Layouts, Split, Square, Strategy, side
from .rules import OPERANDS, ShapedOp
from .strategies import along_sequence, strategies

Pairs = dict[fx.Node, dict[tuple[Split, Split], None]]  # value -> rows and columns of its squares


def all_strategies(graph: fx.Graph, mesh: tuple[int, ...]) -> dict[fx.Node, list[Strategy]]:
    """Every way to run every op on one axis of a mesh; squares only where the mesh has one."""
    found: dict[fx.Node, list[Strategy]] = {}
    pairs: Pairs = defaultdict(dict)
    for node, options in strategies(graph).items():
        op, squares = ShapedOp(node), list[Strategy]()
        if any(side(parts) for parts in mesh):
            squares = _spatial(op, options) or list(dict.fromkeys(_through(op, options, pairs)))
        for strategy in squares:
            if isinstance(strategy.out, Square) and strategy.out.row is not None:
                pairs[node][strategy.out.row, strategy.out.col] = None
        found[node] = [*options, *along_sequence(op), *squares]
    return found


def _spatial(op: ShapedOp, options: list[Strategy]) -> list[Strategy]:
    """A linear: one strategy per way to cut its rows and its columns."""
    places = OPERANDS.get(op.name)
    x, w = (None, None) if places is None or op.kwargs else map(op.at, places[:2])
    if x is None or w is None or x == w or len(op.shapes[w]) != 2:
        return []
    rows = [s for s in options if s.ins[x] != WHOLE and s.ins[w] == WHOLE]
    cols = [s for s in options if s.ins[x] == WHOLE and s.ins[w] != WHOLE]
    inner = next((s for s in options if s.out == PARTIAL), None)
    if inner is None:
        return []
    rest = [k for k in range(len(op.inputs)) if k not in (x, w)]
    return [_ring(x, w, *pair, inner) for pair in itertools.product(rows, cols)
            if all(pair[0].ins[k] == WHOLE != pair[1].ins[k] for k in rest)]


def _ring(x: int, w: int, row: Strategy, col: Strategy, inner: Strategy) -> Strategy:
    ins: list[Layout] = [Square(None, cut, "o") if isinstance(cut, Split) else cut
                         for cut in col.ins]
    ins[x] = _square(row.ins[x], inner.ins[x], "i")
    ins[w] = _square(inner.ins[w], col.ins[w], "w")
    grads = tuple(Square(None, cut.col, "p") if isinstance(cut, Square) and cut.row is None else cut
                  for cut in ins)
    return Strategy(tuple(ins), grads, _square(row.out, col.out, "o"))


def _square(row: Layout, col: Layout, skew: str) -> Layout:
    """Both cuts at once; what neither cuts is whole."""
    both = isinstance(row, Split) and isinstance(col, Split)
    return Square(row, col, skew) if both else WHOLE  # type: ignore[arg-type]


def _through(op: ShapedOp, options: list[Strategy], pairs: Pairs) -> Iterable[Strategy]:
    """Any other op on results of linears: every input is cut twice, or not at all."""
    for k, value in enumerate(op.inputs):
        for row, col in pairs.get(value, {}):
            firsts = [s for s in options if s.ins[k] == row]
            seconds = [s for s in options if s.ins[k] == col]
            for a, b in itertools.product(firsts, seconds):
                if all(map(_cut_alike, (*a.ins, a.out), (*b.ins, b.out))):
                    yield _both(a, b)


def _cut_alike(a: Layout, b: Layout) -> bool:
    if isinstance(a, Split) and isinstance(b, Split):
        return a.dim != b.dim
    return a == b == WHOLE


def _both(a: Strategy, b: Strategy) -> Strategy:
    ins: Layouts = tuple(map(lambda x, y: _square(x, y, "o"), a.ins, b.ins))
    grads = tuple(x if isinstance(x, Square) else PARTIAL for x in ins)
    return Strategy(ins, grads, _square(a.out, b.out, "o"))
