"""What a value is on one tensor axis: whole, cut, or partial sums; and which op does what to it.

`Split(dim, outer)` cuts a dim that stands for (outer, rest) along `rest`: heads behind a batch, or
q, k and v fused in one weight. `outer` is a size of the trace (see model.py), so it may grow with
the batch. `Square` cuts two dims at once. Either is a list of plain cuts for each device (`cuts`),
and that is all that shapes, rectangles and conversions have to know.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, TypeGuard

from ..model import ROWS


class Split(NamedTuple):
    """Cut along `dim`, inside each of `outer` equal parts of it."""

    dim: int
    outer: int = 1


SKEWS = {"o": (0, 0), "p": (0, 0), "i": (0, 1), "w": (1, 0)}


class Square(NamedTuple):
    """Cut n x n on an axis of n * n devices: (r, c) has block (r + u c, c + v r), modulo n.

    The skew names (u, v): `o` as results of spatial.py lie, `i` its operands, `w` its weights.
    Without a row only the columns are cut, and all r have the same (`o`) or partial sums (`p`).
    """

    row: Split | None
    col: Split
    skew: str


Cut = Split | Square
Layout = str | Cut
WHOLE, PARTIAL = "R", "P"
Layouts = tuple[Layout, ...]  # one per tensor axis


class Part(NamedTuple):
    """Part number `place` of `parts` along a dim."""

    split: Split
    parts: int
    place: int


def is_cut(layout: Layout) -> TypeGuard[Cut]:
    return not isinstance(layout, str)


def is_column(layout: Layout) -> TypeGuard[Square]:
    """Whether it leaves the rows of a square alike."""
    return isinstance(layout, Square) and layout.row is None


def side(parts: int) -> int:
    """n of an axis of n * n devices, 0 for any other."""
    n = math.isqrt(parts)
    return n if n > 1 and n * n == parts else 0


def cuts(layout: Layout, parts: int, index: int = 0) -> list[Part]:
    """What a device of an axis has: this part, of that the next part, and so on."""
    if isinstance(layout, Split):
        return [Part(layout, parts, index)]
    if not isinstance(layout, Square):
        return []
    n, (u, v) = side(parts), SKEWS[layout.skew]
    r, c = divmod(index, n)
    row = [] if layout.row is None else [Part(layout.row, n, (r + u * c) % n)]
    return [*row, Part(layout.col, n, (c + v * r) % n)]


def splits(layout: Cut) -> list[Split]:
    """The dims that a layout cuts."""
    if isinstance(layout, Split):
        return [layout]
    return [layout.col] if layout.row is None else [layout.row, layout.col]


def all_cuts(layouts: Layouts, mesh: tuple[int, ...], place: tuple[int, ...] = ()) -> list[Part]:
    """The same on all axes, outermost first."""
    places = place or (0,) * len(mesh)
    return [cut for axis in zip(layouts, mesh, places, strict=True) for cut in cuts(*axis)]


class Strategy(NamedTuple):
    """One way to run an op on one axis: what its inputs must be and get, and what comes out.

    `around`: keys and values of an attention go around the axis (ring_attention.py).
    """

    ins: Layouts
    grads: Layouts
    out: Layout
    around: bool = False

    @property
    def is_split(self) -> bool:
        return any(map(is_cut, (*self.ins, self.out)))

    @property
    def is_square(self) -> bool:
        return any(isinstance(layout, Square) for layout in (*self.ins, self.out))

    @property
    def text(self) -> str:
        return ",".join(map(layout_text, self.ins)) + ">" + layout_text(self.out)


def layout_text(layout: Layout) -> str:
    if isinstance(layout, str):
        return layout
    if isinstance(layout, Split):
        return f"S{_split_text(layout)}"
    row = "" if layout.row is None else _split_text(layout.row)
    return f"S{row}x{_split_text(layout.col)}{layout.skew}"


def _split_text(split: Split) -> str:
    if split.outer == 1:
        return str(split.dim)
    rows = f"{split.outer // ROWS}b" if split.outer % ROWS == 0 else str(split.outer)
    return f"{split.dim}/{rows}"


def parse_layout(text: str) -> Layout:
    """`R`, `P`, `S1`, `S2/3` (within each of 3 parts), `S1x2/3o` (a square of skew o)."""
    if not text.startswith("S"):
        return text
    row, square, col = text[1:].partition("x")
    if not square:
        return _parse_split(row)
    return Square(_parse_split(row) if row else None, _parse_split(col[:-1]), col[-1])


def _parse_split(text: str) -> Split:
    dim, _, outer = text.partition("/")
    if not outer:
        return Split(int(dim))
    return Split(int(dim), int(outer[:-1]) * ROWS if outer.endswith("b") else int(outer))


def layouts_text(layouts: Layouts) -> str:
    return ".".join(map(layout_text, layouts))


def parse_layouts(text: str) -> Layouts:
    return tuple(parse_layout(part) for part in text.split("."))


class Forms(NamedTuple):
    """How a value lies on every axis, forward and (its summed gradient) backward."""

    value: Layouts
    grad: Layouts

    @classmethod
    def whole(cls, num_axes: int) -> Forms:
        return cls((WHOLE,) * num_axes, (WHOLE,) * num_axes)

    @classmethod
    def of(cls, made: Layouts) -> Forms:
        """Of a produced value, whose gradient must arrive as it lies: cut, or whole."""
        return cls(made, tuple(layout if is_cut(layout) else WHOLE for layout in made))

    @property
    def text(self) -> str:
        return f"{layouts_text(self.value)}|{layouts_text(self.grad)}"


@lru_cache(maxsize=4096)  # few are known, each is read for many values
def parse_forms(text: str) -> Forms:
    value, _, grad = text.partition("|")
    return Forms(parse_layouts(value), parse_layouts(grad))


def local_shape(shape: tuple[int, ...], layouts: Layouts, mesh: tuple[int, ...]) -> list[int]:
    """Shape of a device's part."""
    sizes = list(shape)
    for cut in all_cuts(layouts, mesh):
        sizes[cut.split.dim] //= cut.parts
    return sizes


def parts_of(mesh: tuple[int, ...], layouts: Layouts) -> int:
    """In how many pieces a value is cut."""
    count = 1
    for layout, parts in zip(layouts, mesh, strict=True):
        if not isinstance(layout, str):
            count *= side(parts) if is_column(layout) else parts
    return count
