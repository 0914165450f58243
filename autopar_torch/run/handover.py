"""A loss whose `backward()` gives the parameters the gradients that the step has kept aside.

The parameters are inputs of its autograd node, so that hooks, `torch.autograd.grad` and adding up
are torch's own. Nobody else keeps the gradients, so torch takes them without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import RunError


@dataclass
class LossScale:
    """The factor by which the script scaled the loss of the last step, as GradScaler does. Float16
    gradients vanish unless the loss is scaled, and they are made before `backward()` is called."""

    value: float = 1.0

    def heard(self, factor: float) -> None:
        self.value = min(max(1.0, factor), 2.0**24)  # if it is no number: 1


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, grads: list[Tensor], scale: float,
                told: LossScale, *params: Tensor) -> Tensor:
        ctx.grads, ctx.scale, ctx.told = grads, scale, told
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RunError("backward() was already called on this loss",
                           where="backward or torch.autograd.grad, a second time",
                           fix="run forward again")
        if torch.is_grad_enabled():
            raise RunError("a gradient of the gradients cannot be taken",
                           where="backward or torch.autograd.grad with create_graph=True",
                           fix="put what needs it into the model, or train in one process "
                           "without parallelize()")
        given = float(upstream[0])
        ctx.told.heard(given)
        grads, ctx.grads = ctx.grads, None
        if grads and given != ctx.scale:
            torch._foreach_mul_(grads, given / ctx.scale)
        return None, None, None, None, None, *grads


def hand_over(anchor: Tensor, loss: Tensor, grads: list[tuple[Tensor, Tensor]],
              scale: float = 1.0, told: LossScale | None = None) -> Tensor:
    """A loss whose backward gives the parameters their gradients, as parts where they are parts:
    those of the loss times `scale`."""
    params = [param for param, _ in grads]
    values = [grad for _, grad in grads]
    made = _HandOver.apply(anchor, loss, values, scale, told or LossScale(), *params)
    return cast(Tensor, made)
