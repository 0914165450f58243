"""Parts of tensors: cut off, put together, and where the parts of two cuts overlap."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from .atoms import within
from .holdings import Box
from .layout import Cut, Part, Split, cuts, splits


def part(x: Tensor, cut: Part) -> Tensor:
    """One of the equal parts of a value along a dim."""
    (dim, outer), parts, place = cut
    if outer == 1:
        return x.chunk(parts, dim)[place].contiguous()
    pieces = x.unflatten(dim, (outer, -1)).chunk(parts, dim + 1)
    return pieces[place].flatten(dim, dim + 1).contiguous()


def piece(x: Tensor, layout: Cut, parts: int, index: int) -> Tensor:
    """What one rank of an axis has of a whole value."""
    for cut in cuts(layout, parts, index):
        x = part(x, cut)
    return x


def rows_of(x: Tensor, layout: Split, start: int, end: int, num_rows: int) -> Tensor:
    """Some rows of a value of all rows, which lie where the layout says."""
    opened = x.unflatten(layout.dim, (layout.outer, -1))
    each = opened.shape[layout.dim + 1] // num_rows
    mine = opened.narrow(layout.dim + 1, start * each, (end - start) * each)
    return mine.flatten(layout.dim, layout.dim + 1)


def join(pieces: Sequence[Tensor], layout: Cut) -> Tensor:
    """The whole value, from the pieces of all ranks."""
    if not isinstance(layout, Split):
        return _assemble(pieces, layout)
    if layout.outer == 1:
        return torch.cat(list(pieces), layout.dim)
    opened = [p.unflatten(layout.dim, (layout.outer, -1)) for p in pieces]
    return torch.cat(opened, layout.dim + 1).flatten(layout.dim, layout.dim + 1)


def _assemble(pieces: Sequence[Tensor], layout: Cut) -> Tensor:
    frame = Frame(pieces[0], layout, len(pieces))
    whole = pieces[0].new_empty(frame.sizes)
    for index, own in enumerate(pieces):
        whole[within(frame.box(layout, index))] = frame.open(own)
    return frame.close(whole)


def fill(whole: Tensor, rows: int, pieces: Sequence[Tensor], sizes: Sequence[int] = ()) -> None:
    """Write pieces of so many rows each into a tensor; autograd does not see it change. `sizes`:
    rows of each that count, if they are not cut equally."""
    total, shape = len(whole), (rows, *whole.shape[1:])
    with torch.no_grad(), _unsafe_preserve_version_counter(whole):
        if sizes:
            torch.cat([x.view(shape)[:n] for x, n in zip(pieces, sizes, strict=True)], out=whole)
            return
        if rows * len(pieces) == total:
            torch.cat([one.view(shape) for one in pieces], out=whole)
            return
        for j, one in enumerate(pieces):
            start, end = min(j * rows, total), min((j + 1) * rows, total)
            if end > start:
                whole[start:end] = one.view(shape)[: end - start]


def flat_piece(own: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    """A rank's rows of a parameter as they travel: of that type, flat, with padding."""
    flat = own.detach().to(dtype).reshape(-1)
    lacking = size - flat.numel()
    return torch.cat([flat, flat.new_zeros(lacking)]) if lacking else flat


def copy_rows(target: Tensor, flat: Tensor, piece: int, sizes: Sequence[int] = ()) -> None:
    """One row per rank of the team, padded with zeros: pieces of equal size, or in the proportions
    of `sizes`."""
    if sizes:
        each = flat.numel() // max(1, sum(sizes))
        for row, own in zip(target, flat.split([n * each for n in sizes]), strict=True):
            row[: len(own)].copy_(own)
            row[len(own) :].zero_()
        return
    full, rest = divmod(flat.numel(), max(1, piece))
    if full == len(target):
        target.copy_(flat.view(full, piece))
        return
    target[:full].copy_(flat[: full * piece].view(full, piece))
    if rest:
        target[full, :rest].copy_(flat[full * piece :])
        target[full, rest:].zero_()
    target[full + bool(rest) :].zero_()


def padded(x: Tensor, layout: Cut, parts: int, index: int) -> Tensor:
    """A whole value that is zero outside of one rank's piece."""
    frame = Frame(x, layout, parts)
    whole = x.new_zeros(frame.sizes)
    whole[within(frame.box(layout, index))] = frame.open(x)
    return frame.close(whole)


class Frame:
    """The whole value of a piece, with outer parts as dims of their own: pieces become boxes."""

    def __init__(self, own: Tensor, layout: Cut, parts: int, *others: Cut) -> None:
        used = [split for cut in (layout, *others) for split in splits(cut)]
        self.outers = {split.dim: split.outer for split in used if split.outer > 1}
        self.parts = parts
        self.sizes = list(self.open(own).shape)
        for cut in cuts(layout, parts):
            self.sizes[self._dim(cut.split)] *= cut.parts

    def _dim(self, split: Split) -> int:
        return split.dim + sum(dim <= split.dim for dim in self.outers)

    def open(self, x: Tensor) -> Tensor:
        for dim in sorted(self.outers, reverse=True):
            x = x.unflatten(dim, (self.outers[dim], -1))
        return x

    def close(self, x: Tensor) -> Tensor:
        for dim in sorted(self.outers):
            x = x.flatten(dim, dim + 1)
        return x

    def box(self, layout: Cut, index: int) -> Box:
        """Where one rank's piece lies in the whole."""
        offsets, sizes = [0] * len(self.sizes), list(self.sizes)
        for split, parts, place in cuts(layout, self.parts, index):
            dim = self._dim(split)
            sizes[dim] //= parts
            offsets[dim] = place * sizes[dim]
        return tuple(offsets), tuple(sizes)
