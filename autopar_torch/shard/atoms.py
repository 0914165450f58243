"""All ranks' parts of a tensor, cut into *atoms*: boxes, each with the ranks that hold it.

Atoms are disjoint and cover every part. The first holder of an atom speaks for it, so what
concerns the whole tensor (a norm, a state dict, a checkpoint) counts every element once. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from .holdings import Box


class Atom(NamedTuple):
    """Boxes of a full tensor that the same ranks hold."""

    holders: tuple[int, ...]  # in rank order; the first one speaks
    boxes: tuple[Box, ...]


def atoms(boxes_of: Mapping[int, Sequence[Box]]) -> list[Atom]:
    """The atoms of `boxes` (rank -> the boxes it has), in the same order on every rank."""
    parts: dict[tuple[Box, ...], list[int]] = {}
    for rank in sorted(boxes_of):
        own = tuple(box for box in boxes_of[rank] if all(box[1]))
        if own:
            parts.setdefault(own, []).append(rank)
    if not any(common(a, b) for x, y in combinations(parts, 2) for a in x for b in y):
        return [Atom(tuple(ranks), boxes) for boxes, ranks in parts.items()]
    cells: list[tuple[Box, tuple[int, ...]]] = []
    for boxes, ranks in parts.items():
        for box in boxes:
            cells = list(_with(cells, box, tuple(ranks)))
    grouped: dict[tuple[int, ...], list[Box]] = {}
    for box, holders in sorted(cells, key=lambda cell: cell[0]):
        grouped.setdefault(tuple(sorted(holders)), []).append(box)
    return [Atom(holders, tuple(boxes)) for holders, boxes in grouped.items()]


def _with(cells: Sequence[tuple[Box, tuple[int, ...]]], box: Box,
          ranks: tuple[int, ...]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """The disjoint cells once these ranks have a box too."""
    rest = [box]
    for cell, holders in cells:
        shared = common(cell, box)
        if shared is None:
            yield cell, holders
            continue
        yield shared, holders + ranks
        yield from ((piece, holders) for piece in without(cell, shared))
        rest = [piece for one in rest for piece in without(one, shared)]
    yield from ((piece, ranks) for piece in rest)


def common(a: Box, b: Box) -> Box | None:
    """What two boxes share, if anything."""
    starts = tuple(map(max, a[0], b[0]))
    ends = (min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def within(box: Box, of: Box | None = None) -> tuple[slice, ...]:
    """Where a box lies in a tensor that is the box `of`, or the whole."""
    corner = of[0] if of else (0,) * len(box[0])
    return tuple(slice(start - a, start - a + size)
                 for start, size, a in zip(*box, corner, strict=True))


def without(box: Box, hole: Box) -> list[Box]:
    """The rest of a box, as boxes."""
    shared = common(box, hole)
    if shared is None:
        return [box]
    found, (offsets, sizes) = [], box
    for dim, (start, size) in enumerate(zip(*shared, strict=True)):
        for a, b in ((offsets[dim], start), (start + size, offsets[dim] + sizes[dim])):
            if b > a:
                found.append(((*offsets[:dim], a, *offsets[dim + 1 :]),
                              (*sizes[:dim], b - a, *sizes[dim + 1 :])))
        offsets = (*offsets[:dim], start, *offsets[dim + 1 :])
        sizes = (*sizes[:dim], size, *sizes[dim + 1 :])
    return found
