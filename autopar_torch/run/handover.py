"""A loss whose `backward()` gives the parameters the gradients that the step has kept aside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import RunError


@dataclass
class LossScale:
    """By what the loss of the last step was scaled, as GradScaler does. Gradients in float16 vanish
    unless they are computed of a scaled loss, and they are before its backward is called."""

    value: float = 1.0

    def heard(self, factor: float) -> None:
        self.value = min(max(1.0, factor), 2.0**24)  # of no number: 1


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor,
                grads: list[tuple[Tensor, Tensor]], scale: float,
                told: LossScale) -> Tensor:  # fmt: skip
        ctx.grads, ctx.scale, ctx.told = grads, scale, told
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[None, ...]:
        if ctx.grads is None:
            raise RunError("backward() was already called on this loss", fix="run forward again")
        factor = float(upstream[0]) / ctx.scale
        ctx.told.heard(float(upstream[0]))
        for param, grad in ctx.grads:
            if factor != 1.0:
                grad.mul_(factor)
            param.grad = grad if param.grad is None else param.grad.add_(grad)
        ctx.grads = None
        return None, None, None, None, None


def hand_over(anchor: Tensor, loss: Tensor, grads: list[tuple[Tensor, Tensor]],
              scale: float = 1.0, told: LossScale | None = None) -> Tensor:  # fmt: skip
    """A loss whose backward gives the parameters their gradients, which are those of the loss times
    `scale`."""
    return cast(Tensor, _HandOver.apply(anchor, loss, grads, scale, told or LossScale()))
