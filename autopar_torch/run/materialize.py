"""Where full values of parameters come from: the model itself, its initialisation, or files."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .world import World

Source = Callable[[str], Tensor | None]


def full_values(model: nn.Module, world: World, device: torch.device, seed: int,
                weights: str | os.PathLike[str] | None) -> Source:  # fmt: skip
    """Parameter name -> its full value; rank 0's values where ranks may differ."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def value(name: str) -> Tensor | None:
        full = tensors[name].detach().to(device)
        if world.size > 1:
            full = full.contiguous()
            dist.broadcast(full, 0)
        return full

    return value


__all__ = ["Any", "full_values"]
