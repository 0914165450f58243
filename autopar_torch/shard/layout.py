"""What a value is on one tensor axis: whole, cut, or partial sums; and which op does what to it.

`Split(dim, outer)` cuts a dim that stands for (outer, rest) along `rest`: heads behind a batch, or
q, k and v fused in one weight. `outer` is a size of the trace (see model.py), so it may grow with
the batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..model import ROWS


class Split(NamedTuple):
    """Cut along `dim`, inside each of `outer` equal parts of it."""

    dim: int
    outer: int = 1


Layout = str | Split
WHOLE, PARTIAL = "R", "P"
Layouts = tuple[Layout, ...]  # one per tensor axis


class Strategy(NamedTuple):
    """One way to run an op on one axis: what its inputs must be and get, and what comes out."""

    ins: Layouts
    grads: Layouts
    out: Layout

    @property
    def is_split(self) -> bool:
        return self.out != WHOLE or any(layout != WHOLE for layout in self.ins)

    @property
    def text(self) -> str:
        return ",".join(map(layout_text, self.ins)) + ">" + layout_text(self.out)


def layout_text(layout: Layout) -> str:
    if isinstance(layout, str):
        return layout
    if layout.outer == 1:
        return f"S{layout.dim}"
    rows = f"{layout.outer // ROWS}b" if layout.outer % ROWS == 0 else str(layout.outer)
    return f"S{layout.dim}/{rows}"


def parse_layout(text: str) -> Layout:
    if not text.startswith("S"):
        return text
    dim, _, outer = text[1:].partition("/")
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

    @property
    def text(self) -> str:
        return f"{layouts_text(self.value)}|{layouts_text(self.grad)}"


def parse_forms(text: str) -> Forms:
    value, _, grad = text.partition("|")
    return Forms(parse_layouts(value), parse_layouts(grad))


def grad_layout(layout: Layout) -> Layout:
    """How the gradient of a produced value must arrive: cut as it is cut, else whole."""
    return layout if isinstance(layout, Split) else WHOLE


def local_shape(shape: tuple[int, ...], layouts: Layouts, mesh: tuple[int, ...]) -> list[int]:
    """Shape of a device's part."""
    sizes = list(shape)
    for layout, parts in zip(layouts, mesh, strict=True):
        if isinstance(layout, Split):
            sizes[layout.dim] //= parts
    return sizes


def parts_of(mesh: tuple[int, ...], layouts: Layouts) -> int:
    """In how many pieces a value is cut."""
    return math.prod(p for p, x in zip(mesh, layouts, strict=True) if isinstance(x, Split))
