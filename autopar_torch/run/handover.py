"""A loss whose `backward()` gives the parameters the gradients that the step has kept aside.

The parameters are inputs of its autograd node, so that hooks, `torch.autograd.grad` and adding up
are torch's own. Nobody else keeps the gradients, so torch takes them without a copy.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..errors import RunError


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, grads: list[Tensor],
                *params: Tensor) -> Tensor:  # fmt: skip
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RunError("backward() was already called on this loss", fix="run forward again")
        if torch.is_grad_enabled():
            raise RunError("a gradient of the gradients cannot be taken",
                           where="backward or torch.autograd.grad with create_graph=True",
                           fix="put what needs it into the model, or train in one process "
                           "without parallelize()")  # fmt: skip
        grads, ctx.grads = ctx.grads, None
        if grads and float(upstream[0]) != 1.0:
            torch._foreach_mul_(grads, float(upstream[0]))
        return None, None, None, *grads


def hand_over(anchor: Tensor, loss: Tensor, grads: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A loss whose backward gives the parameters their gradients, as parts where they are parts."""
    params = [param for param, _ in grads]
    return cast(Tensor, _HandOver.apply(anchor, loss, [grad for _, grad in grads], *params))
