"""How a tensor is spread over the ranks: its whole from the parts, its part of the whole, and what
a function of every element gives, each element counted once.

All of it is collective: every rank runs the same script, so every rank asks at the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from ..shard.atoms import Atom, atoms
from ..shard.holdings import Box
from .world import World

Each = Callable[[list[Tensor]], list[Tensor]]  # one number of every tensor


class Spread:
    """Of one parameter or buffer. Who has which boxes is asked for when it is first needed."""

    def __init__(self, name: str, shape: Sequence[int], local: Sequence[int], world: World,
                 cut: Callable[[Tensor], Tensor],
                 boxes_of: Callable[[], Mapping[int, Sequence[Box]]]) -> None:  # fmt: skip
        self.name, self.shape, self.local = name, torch.Size(shape), torch.Size(local)
        self.world, self.cut, self._boxes_of = world, cut, boxes_of

    @cached_property
    def boxes_of(self) -> Mapping[int, Sequence[Box]]:
        """Every holder's boxes, in the order in which they lie in its part."""
        return self._boxes_of()

    @cached_property
    def atoms(self) -> list[Atom]:
        return atoms(self.boxes_of)

    @property
    def is_empty(self) -> bool:
        """Whether this rank has nothing of it."""
        return not self.local.numel()

    def like(self, other: Spread) -> bool:
        """Whether the parts of both are the same elements on every rank."""
        return self is other or (self.shape == other.shape and self.boxes_of == other.boxes_of)

    def whole(self, local: Tensor) -> Tensor:
        """The full tensor on every rank; backward gives every holder the gradient of its part."""
        return cast(Tensor, _Whole.apply(local, self))

    def part(self, full: Tensor) -> Tensor:
        """This rank's part of a full tensor; backward gives everyone the whole gradient."""
        return cast(Tensor, _Part.apply(full, self))

    def gathered(self, local: Tensor) -> Tensor:
        full = torch.zeros(self.shape, dtype=local.dtype, device=local.device)
        for (offsets, sizes), piece in self.spoken(local):
            full[_index(offsets, sizes)] = piece
        self.world.sum(full.view(torch.uint8) if full.dtype == torch.bool else full)
        return full

    def spoken(self, local: Tensor) -> list[tuple[Box, Tensor]]:
        """(box, view of the part) of all that this rank speaks for."""
        mine = [atom for atom in self.atoms if atom.holders[0] == self.world.rank]
        return [(box, self._view(local, box)) for atom in mine for box in atom.boxes]

    def atom(self, local: Tensor, atom: Atom) -> Tensor:
        """The elements of an atom, in any shape."""
        if atom.boxes == tuple(self.boxes_of[self.world.rank]):
            return local
        return torch.cat([self._view(local, box).reshape(-1) for box in atom.boxes])

    def _view(self, local: Tensor, box: Box) -> Tensor:
        own = self.boxes_of[self.world.rank]
        for (offsets, sizes), piece in zip(own, views(local, own), strict=True):
            start = [a - b for a, b in zip(box[0], offsets, strict=True)]
            if all(a >= 0 and a + n <= m for a, n, m in zip(start, box[1], sizes, strict=True)):
                return piece[_index(start, box[1])]
        return local[:0]


def _index(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))


def stacking_dim(boxes: Sequence[Box], local: Tensor) -> int:
    """The dim along which the rectangles of a part lie one after the other."""
    sizes = [size for _, size in boxes]
    dims = range(local.dim() if len(boxes) > 1 else 0)
    return next((d for d in dims if sizes[0][d] != local.shape[d]
                 and sum(s[d] for s in sizes) == local.shape[d]), 0)  # fmt: skip


def views(local: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """The pieces of a part that are its rectangles."""
    if len(boxes) <= 1:
        return [local] * len(boxes)
    dim = stacking_dim(boxes, local)
    return list(local.split([size[dim] for _, size in boxes], dim))


def paste(full: Tensor, local: Tensor, boxes: Sequence[Box]) -> None:
    """Write a part into the full tensor."""
    for (offsets, sizes), piece in zip(boxes, views(local, boxes), strict=True):
        full[_index(offsets, sizes)] = piece.reshape(sizes)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spread: Spread) -> Tensor:
        ctx.spread = spread
        return spread.gathered(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.spread.part(grads[0]), None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, spread: Spread) -> Tensor:
        ctx.spread = spread
        return spread.cut(full)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.spread.whole(grads[0]), None


class _Everyones(torch.autograd.Function):
    """Numbers of this rank, in their places among everyone's. All who have an atom have the same
    number of it; the loss is the same on all ranks, so each takes the gradient of its own place."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, slots: list[int], said: list[int], count: int,
                world: World) -> Tensor:  # fmt: skip
        ctx.slots = slots
        every = torch.zeros(count, dtype=own.dtype, device=own.device)
        if said:
            every[[slots[i] for i in said]] = own[said]
        return world.sum(every)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][ctx.slots], None, None, None, None


def everyones(parts: Sequence[tuple[Spread, Tensor]],
              each: Each) -> tuple[Tensor, list[int]]:  # fmt: skip
    """`each` of every atom of tensors, on every rank, in one message; and how many each has."""
    world = parts[0][0].world
    slots: list[int] = []
    said: list[int] = []
    pieces: list[Tensor] = []
    count = 0
    for spread, local in parts:
        for slot, atom in enumerate(spread.atoms, count):
            if world.rank in atom.holders:
                if atom.holders[0] == world.rank:
                    said.append(len(slots))
                slots.append(slot)
                pieces.append(spread.atom(local, atom))
        count += len(spread.atoms)
    example = sum(torch.zeros(1, dtype=kind) for kind in {local.dtype for _, local in parts})
    own = torch.zeros(0, dtype=each([cast(Tensor, example)])[0].dtype, device=parts[0][1].device)
    if pieces:
        own = torch.stack([x.to(own.dtype) for x in each(pieces)])
    every = cast(Tensor, _Everyones.apply(own, slots, said, count, world))
    return every, [len(spread.atoms) for spread, _ in parts]
