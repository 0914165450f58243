"""How a tensor is spread over the ranks: its whole from the parts, its part of the whole.

All of it is collective: every rank runs the same script, so every rank asks at the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from ..shard.atoms import Atom, atoms, common, within
from ..shard.holdings import Box
from ..shard.reduction import Own
from .world import World


class Spread:
    """The parts of one parameter or buffer. Which rank has which boxes is found when needed."""

    def __init__(self, name: str, shape: Sequence[int], local: Sequence[int], world: World,
                 cut: Callable[[Tensor], Tensor],
                 boxes_of: Callable[[], Mapping[int, Sequence[Box]]],
                 own: Own | None = None) -> None:
        self.own = own  # None: all boxes have to be looked at
        self.name, self.shape, self.local = name, torch.Size(shape), torch.Size(local)
        self.world, self.cut, self._boxes_of = world, cut, boxes_of

    @cached_property
    def boxes_of(self) -> Mapping[int, Sequence[Box]]:
        """Every holder's boxes, in the order in which they lie in its part."""
        return self._boxes_of()

    @cached_property
    def atoms(self) -> list[Atom]:
        return atoms(self.boxes_of)

    def like(self, other: Spread) -> bool:
        """Whether the parts of both are the same elements on every rank."""
        return self is other or (self.shape == other.shape and self.boxes_of == other.boxes_of)

    def whole(self, local: Tensor) -> Tensor:
        """The full tensor on every rank; backward gives every holder the gradient of its part."""
        return cast(Tensor, _Whole.apply(local, self))

    def part(self, full: Tensor) -> Tensor:
        """This rank's part of a full tensor; backward gives every rank the whole gradient."""
        return cast(Tensor, _Rectangle.apply(full, self))

    def gathered(self, local: Tensor) -> Tensor:
        full = torch.zeros(self.shape, dtype=local.dtype, device=local.device)
        for box, piece in self.spoken(local):
            full[within(box)] = piece
        return summed(full, self.world)

    def spoken(self, local: Tensor) -> list[tuple[Box, Tensor]]:
        """(box, view of the part) of all that this rank speaks for."""
        if self.own is not None:
            pairs = zip(self.own.boxes, views(local, self.own.boxes), strict=True)
            return list(pairs) if self.own.speaks else []
        mine = [atom for atom in self.atoms if atom.holders[0] == self.world.rank]
        own = self.boxes_of[self.world.rank] if mine else ()
        return [(box, view_of(local, own, box)) for atom in mine for box in atom.boxes]

    def said(self, local: Tensor) -> list[Tensor]:
        """The elements that this rank speaks for, in any shape: over all ranks each once."""
        if self.own is not None:
            return [local] if self.own.speaks and self.own.boxes else []
        return [self.atom(local, atom) for atom in self.atoms
                if atom.holders[0] == self.world.rank]

    @property
    def speaker(self) -> int:
        """The first rank that has any of it; 0 where there is nothing."""
        if self.own is not None:
            return self.own.speaker
        return self.atoms[0].holders[0] if self.atoms else 0

    def atom(self, local: Tensor, atom: Atom) -> Tensor:
        """The elements of an atom, in any shape."""
        own = self.boxes_of[self.world.rank]
        if atom.boxes == tuple(own):
            return local
        return torch.cat([view_of(local, own, box).reshape(-1) for box in atom.boxes])


def summed(x: Tensor, world: World) -> Tensor:
    """Over all ranks, in place."""
    with world.doing("the whole of a parameter"):
        world.sum(x.view(torch.uint8) if x.dtype == torch.bool else x)
    return x


def view_of(local: Tensor, own: Sequence[Box], box: Box) -> Tensor:
    """A box of the full tensor in a part that has these boxes."""
    for outer, piece in zip(own, views(local, own), strict=True):
        if common(box, outer) == box:
            return piece[within(box, outer)]
    return local[:0]


def views(local: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """The pieces of a part that are its rectangles: along one dim they lie one after the other."""
    if len(boxes) <= 1:
        return [local] * len(boxes)
    lengths = list(zip(*(size for _, size in boxes), strict=True))  # by dim
    dim = next((d for d, n in enumerate(local.shape) if lengths[d][0] != n == sum(lengths[d])), 0)
    return list(local.split(list(lengths[dim]), dim))


def paste(full: Tensor, local: Tensor, boxes: Sequence[Box]) -> None:
    """Write a part into the full tensor."""
    for box, piece in zip(boxes, views(local, boxes), strict=True):
        full[within(box)] = piece.reshape(box[1])


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spread: Spread) -> Tensor:
        ctx.spread = spread
        ctx.set_materialize_grads(False)  # a parameter that nothing needs has no gradient
        return spread.gathered(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None if grads[0] is None else ctx.spread.part(grads[0]), None


class _Rectangle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, spread: Spread) -> Tensor:
        ctx.spread = spread
        ctx.set_materialize_grads(False)
        return spread.cut(full)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None if grads[0] is None else ctx.spread.whole(grads[0]), None
