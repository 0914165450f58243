"""A loss whose `backward()` gives the parameters the gradients that the step has kept aside."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..errors import RunError


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor,
                grads: list[tuple[Tensor, Tensor]]) -> Tensor:  # fmt: skip
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[None, None, None]:
        if ctx.grads is None:
            raise RunError("backward() was already called on this loss", fix="run forward again")
        factor = float(upstream[0])
        for param, grad in ctx.grads:
            if factor != 1.0:
                grad.mul_(factor)
            param.grad = grad if param.grad is None else param.grad.add_(grad)
        ctx.grads = None
        return None, None, None


def hand_over(anchor: Tensor, loss: Tensor, grads: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A loss whose backward gives the parameters their gradients."""
    return cast(Tensor, _HandOver.apply(anchor, loss, grads))
