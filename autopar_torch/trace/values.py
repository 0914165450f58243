"""Values on which it is tried whether rows depend on each other: each shows what others hide."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Remade = Callable[[Tensor], Tensor]


def plain(value: Tensor) -> Tensor:
    return value


def alike(value: Tensor) -> Tensor:
    """One token everywhere: all go to one expert."""
    last = value.shape[-1] if value.dim() > 1 and value.is_floating_point() else 1
    return value.flatten()[:last].expand(value.shape).contiguous()


def positive(value: Tensor) -> Tensor:
    return value.abs() + 0.1 if value.is_floating_point() else value


def counted(value: Tensor) -> Tensor:
    """No sequence has a length of 0."""
    return value + 1 if value.dtype in (torch.int64, torch.int32) else value


def far(value: Tensor) -> Tensor:
    return 10 * value + 5 if value.is_floating_point() else value


def tiny(value: Tensor) -> Tensor:
    """Beside it a small constant counts, as in `sqrt(x.mean() + 1e-8)`."""
    return 1e-12 * value if value.is_floating_point() else value


def as_shares(value: Tensor) -> Tensor:
    """Probabilities."""
    return value.softmax(-1) if value.dim() and value.is_floating_point() else value


def around(number: float) -> list[Remade]:
    """Values on both sides of a number that some are compared with, then all on one side, or it."""
    def shifted(of_floats: Remade, of_whole: Remade) -> Remade:
        def change(value: Tensor) -> Tensor:
            if value.dtype == torch.bool:
                return value
            if value.is_floating_point():
                return of_floats(value) + number
            return of_whole(value) + int(number)

        return change

    return [shifted(plain, lambda value: 2 * value - 1), shifted(plain, plain),
            shifted(torch.abs, torch.ones_like), shifted(torch.zeros_like, torch.zeros_like),
            shifted(lambda value: -value.abs(), lambda value: torch.zeros_like(value) - 1)]


EACH = (plain, positive, plain, alike, far, tiny, counted, as_shares)
PARTICULAR = counted, as_shares  # where others are refused
ORDINARY = plain, positive, counted, as_shares  # of which one has to be finite
