"""Every way to split every op of a graph on one axis: what the solver chooses from.

The rules' factors, and with them `outer` parts (see layout.py), which are found by following merged
and fused dims through the graph.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import fx

from ..model import ROWS
from .layout import PARTIAL, WHOLE, Layout, Split, Strategy
from .rules import OWNED, PARTS, VIEWS, DimFactor, Shape, ShapedOp, factors_of, first_input, owned

_ADDING = ("add", "sub")
_LINEAR = (*VIEWS, "transpose", "index", "sum", "mul", "div", "neg")
DimPart = tuple[int, int]  # a dim and its outer part
DimParts = dict[fx.Node, set[DimPart]]


def view_pieces(old: Shape, new: Shape, wanted: Iterable[tuple[bool, DimPart]]) -> list[
    tuple[DimPart, DimPart]
]:
    """Pairs (piece of the old shape, piece of the new) that cut the same elements.

    A piece is known by how many equal parts lie outside of it; `wanted` adds pieces of the old
    (True) or new (False) shape to the starts of all dims.
    """
    outside = {math.prod(shape[:dim]) for shape in (old, new) for dim in range(len(shape))}
    outside |= {outer * math.prod((old if is_old else new)[:dim])
                for is_old, (dim, outer) in wanted}
    pairs = ((_piece_at(old, offset), _piece_at(new, offset)) for offset in sorted(outside))
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _piece_at(shape: Shape, outside: int) -> DimPart | None:
    before = 1
    for dim, size in enumerate(shape):
        if size > 1 and before <= outside < before * size:
            outer = outside // before
            return (dim, outer) if outside % before == 0 and size % outer == 0 else None
        before *= size
    return None


def _strategies_of(op: ShapedOp, pieces: DimParts) -> list[Strategy]:
    if op.name in VIEWS:
        return _view_strategies(op, pieces)
    if op.name in PARTS:
        return _part_strategies(op, pieces)
    if op.name == "repeat":
        return _repeat_strategies(op, pieces)
    found = [s for factor in factors_of(op) for s in _of_factor(op, factor, pieces)]
    found += _batches_in_a_row(op, pieces) if op.name == "cat" else []
    found += _of_batches_in_a_row(op, pieces) if op.name == "slice" else []
    return [*found, *_within_groups(op)] if op.name == "scaled_dot_product_attention" else found


def _within_groups(op: ShapedOp) -> list[Strategy]:
    """Where many queries share a key, each part may have some queries of every key: so attention
    is split in more parts than there are keys."""
    heads, (q, k) = len(op.out) - 3, op.shapes[:2]
    if not op.kwargs.get("enable_gqa") or op.at(3, "attn_mask") is not None:
        return []
    split = Split(heads, k[heads])
    return [_strategy(op, {0: split}, split)] if q[heads] > k[heads] else []


def along_sequence(op: ShapedOp) -> list[Strategy]:
    """An attention of each token to itself and those before it, with every input cut alike. Its
    pieces alone do not make up the whole: keys and values go around (ring_attention.py)."""
    dropped, causal = op.arg(4, "dropout_p", 0.0), op.arg(5, "is_causal", False)
    if op.name != "scaled_dot_product_attention" or not causal or dropped:
        return []
    if [len(shape) for shape in (*op.shapes, op.out)] != [4] * 4:
        return []
    (rows, heads, length, _), key, value = op.shapes
    like = (rows, key[1] if op.kwargs.get("enable_gqa") else heads, length)
    cut = (Split(2),) * 3
    fits = key[:3] == value[:3] == like and length % ROWS
    return [Strategy(cut, cut, cut[0], around=True)] if fits else []


def _of_factor(op: ShapedOp, factor: DimFactor, pieces: DimParts) -> Iterable[Strategy]:
    """The factor itself, and once more for every outer part seen on one of its dims."""
    cut = [(op.inputs[k], dim) for k, dim in factor.ins.items()] + [(op.node, factor.out)]
    outers = {outer for node, dim in cut for d, outer in pieces[node] if d == dim}
    sizes = [op.shapes[k][dim] for k, dim in factor.ins.items()]
    for outer in [1] if owned(op, factor) else sorted({1} | outers):
        if all(size > 1 and size % outer == 0 for size in sizes):
            out: Layout = PARTIAL if factor.out is None else Split(factor.out, outer)
            if factor.out == -1:
                out = WHOLE
            yield _strategy(op, {k: Split(d, outer) for k, d in factor.ins.items()}, out)


def _strategy(op: ShapedOp, ins: dict[int, Split], out: Layout) -> Strategy:
    layouts = tuple(ins.get(k, WHOLE) for k in range(len(op.inputs)))
    return Strategy(layouts, tuple(s if s != WHOLE else PARTIAL for s in layouts), out)


def _view_strategies(op: ShapedOp, pieces: DimParts) -> list[Strategy]:
    wanted = [(True, p) for p in sorted(pieces[op.inputs[0]])]
    wanted += [(False, p) for p in sorted(pieces[op.node])]
    pairs = view_pieces(op.shapes[0], op.out, wanted)
    return [_strategy(op, {0: Split(*a)}, Split(*b)) for a, b in pairs]


def _part_strategies(op: ShapedOp, pieces: DimParts) -> list[Strategy]:
    """split and chunk in equal parts: the parts become an outer part of the dim."""
    rank = len(op.out)
    cut = op.dim(2, rank)
    found = [s for f in first_input(op, {cut}) for s in _of_factor(op, f, pieces)]
    outers = {1} | {outer for d, outer in pieces[op.node] if d == cut}
    parts = op.node.meta["info"]
    for outer in sorted(outers) if {part.shape for part in parts} == {op.out} else []:
        found.append(_strategy(op, {0: Split(cut, len(parts) * outer)}, Split(cut, outer)))
    return found


def _repeat_strategies(op: ShapedOp, pieces: DimParts) -> list[Strategy]:
    """What is cut is cut within each of the copies: they are an outer part of the result."""
    new = len(op.out) - len(op.shapes[0])
    found = []
    for dim, size in enumerate(op.shapes[0]):
        copies = op.out[new + dim] // size if size else 0
        outers = {outer for d, outer in pieces[op.inputs[0]] if d == dim}
        outers |= {outer // copies for d, outer in pieces[op.node]
                   if d == new + dim and copies and outer % copies == 0}
        found += [_strategy(op, {0: Split(dim, outer)}, Split(new + dim, outer * copies))
                  for outer in sorted({1} | outers) if size > 1 and size % outer == 0 and copies]
    return found


def _batches_in_a_row(op: ShapedOp, pieces: DimParts) -> list[Strategy]:
    """The rows of several equal values, one behind the other, are cut within each."""
    dim, count = op.dim(1, len(op.out)), len(op.args[0])
    size = op.out[dim] // count
    if size % ROWS or any(shape[dim] != size for shape in op.shapes):
        return []
    outers = {1} | {outer for node in op.inputs for d, outer in pieces[node] if d == dim}
    return [_strategy(op, dict.fromkeys(range(len(op.inputs)), Split(dim, outer)),
                      Split(dim, outer * count)) for outer in sorted(outers)]


def _of_batches_in_a_row(op: ShapedOp, pieces: DimParts) -> list[Strategy]:
    """Some of several values with all rows, one behind the other (`x[:n]`); or some of what each
    row has there (`x[::2]`)."""
    dim, step = op.dim(1, len(op.out)), op.arg(4, "", 1)
    size = op.shapes[0][dim]
    start, end = (x + size if x < 0 else min(x, size) for x in (
        op.arg(2) or 0, size if op.arg(3) is None else op.arg(3)))
    if size % ROWS or not 0 <= start < end:
        return []
    if step > 1:
        each = end == size and start < step and size // ROWS % step == 0
        return [_strategy(op, {0: Split(dim)}, Split(dim))] if each else []
    outers = {outer for d, outer in pieces[op.inputs[0]] if d == dim}
    return [_strategy(op, {0: Split(dim, outer)}, Split(dim, (end - start) * outer // size))
            for outer in sorted(outers) if start * outer % size == end * outer % size == 0]


def strategies(graph: fx.Graph,
               given: Mapping[fx.Node, Layout] | None = None) -> dict[fx.Node, list[Strategy]]:
    """Every way to split every op of a graph on one axis; the first is always "not at all".
    `given`: how some values are cut before."""
    nodes = [ShapedOp(node) for node in graph.nodes if node.op == "call_function"]
    pieces: DimParts = defaultdict(set)
    for node, layout in (given or {}).items():
        if isinstance(layout, Split) and layout.outer > 1:
            pieces[node].add((layout.dim, layout.outer))
    found: dict[fx.Node, list[Strategy]] = {}
    known: dict[fx.Node, list[int]] = {}  # pieces around an op at the last visit
    todo = nodes
    while todo:
        for op in todo:
            known[op.node] = _num_pieces(op, pieces)
            found[op.node] = _strategies_of(op, pieces)
            for strategy in found[op.node]:
                for node, layout in (
                    *zip(op.inputs, strategy.ins, strict=True), (op.node, strategy.out)
                ):
                    if isinstance(layout, Split) and layout.outer > 1:
                        pieces[node].add((layout.dim, layout.outer))
        todo = [op for op in reversed(nodes) if _num_pieces(op, pieces) != known[op.node]]
    sums = _with_sums(nodes, found)
    return {op.node: [_whole(op), *dict.fromkeys(found[op.node]), *sums.get(op.node, ())]
            for op in nodes}


def _with_sums(nodes: list[ShapedOp],
               found: dict[fx.Node, list[Strategy]]) -> dict[fx.Node, list[Strategy]]:
    """Products of experts may stay partial sums through what is linear in them: rows are many while
    each token has one per expert, so it is better to reduce once they are weighted and summed."""
    sums: dict[fx.Node, list[Strategy]] = {}
    for op in nodes:
        carried = [node in sums for node in op.inputs]
        adds = op.name in _ADDING and all(carried) and len(carried) == 2
        scales = op.name in _LINEAR and carried[:1] == [True] and not any(carried[1:])
        scales |= op.name == "mul" and carried == [False, True]
        squares = op.name == "mul" and op.args[0] is op.args[1]
        if (adds or scales) and not squares and not op.kwargs:
            ins = tuple(PARTIAL if own else WHOLE for own in carried)
            grads = tuple(WHOLE if own else PARTIAL for own in carried)
            sums[op.node] = [Strategy(ins, grads, PARTIAL)]
        elif op.name in OWNED and op.name != "embedding" and any(
                s.out == PARTIAL for s in found[op.node]):
            sums[op.node] = []
    return sums


def _num_pieces(op: ShapedOp, pieces: DimParts) -> list[int]:
    """How many pieces are known around an op; the number only grows."""
    return [len(pieces[node]) for node in (*op.inputs, op.node)]


def _whole(op: ShapedOp) -> Strategy:
    return Strategy((WHOLE,) * len(op.inputs), (WHOLE,) * len(op.inputs), WHOLE)
