"""A copy of a module whose parameters are parts, as one whose parameters are to be placed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..trace.burnt import tensors_of
from .sharded import Sharded, local


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """The module with tensors of full shapes and no content, which take next to no memory."""
    for tensor in tensors_of(module).values():
        empty: Tensor = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        empty = empty.expand(tuple(tensor.shape))
        is_param = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_param else empty
    return copy.deepcopy(module, memo)


def apart(module: nn.Module) -> nn.Module:
    """A copy with tensors of its own, also of those that forward makes and keeps, as old weight
    norms do, which torch does not copy."""
    kept = [value for own in module.modules() for value in vars(own).values()
            if isinstance(value, Tensor) and not value.is_leaf]
    return copy.deepcopy(module, {id(value): value.detach().clone() for value in kept})


def whole_values(module: nn.Module) -> Callable[[str], Tensor]:
    """The full tensor of every name; all ranks must ask in one order."""
    tensors = tensors_of(module)

    def value(name: str) -> Tensor:
        found = tensors[name]
        if isinstance(found, Sharded):
            return found.spread.gathered(local(found).detach())
        return cast(Tensor, found.detach().clone())

    return value
