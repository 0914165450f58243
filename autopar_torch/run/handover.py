"""What a call returns to autograd: its `backward()` gives the parameters their gradients.

They may be there already, kept aside by a step that has run its backwards, or they are made then.
The parameters are inputs of the autograd node, so that hooks, `torch.autograd.grad` and adding up
are torch's own. Nobody else keeps the gradients, so torch takes them without a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import RunError
from ..shard.again import is_retained

Upstream = dict[str, Tensor]  # output -> its gradient; without those that nothing was made of
# What came, and whether more may come (`retain_graph`) -> the gradient of every parameter
Finish = Callable[[Upstream, bool], Sequence[Tensor | None]]


@dataclass
class LossScale:
    """The factor by which the script scaled the loss of the last step, as GradScaler does. Float16
    gradients vanish unless the loss is scaled, and they are made before `backward()` is called."""

    value: float = 1.0

    def heard(self, factor: float) -> None:
        self.value = min(max(1.0, factor), 2.0**24)  # if it is no number: 1


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: dict[str, Tensor], finish: Finish,
                *params: Tensor) -> tuple[Tensor, ...]:
        ctx.names, ctx.finish = tuple(values), finish
        ctx.set_materialize_grads(False)
        return tuple(values.values())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.finish is None:
            raise RunError("backward() was already called on what this call returned",
                           where="backward or torch.autograd.grad, a second time",
                           fix="run forward again, add losses up before one backward(), or say "
                           "retain_graph=True the first time")
        if torch.is_grad_enabled():
            raise RunError("a gradient of the gradients cannot be taken",
                           where="backward or torch.autograd.grad with create_graph=True",
                           fix="put what needs it into the model, or train in one process "
                           "without parallelize()")
        finish, more = ctx.finish, is_retained()
        if not more:
            ctx.finish = None
        given = {name: grad for name, grad in zip(ctx.names, upstream, strict=True)
                 if grad is not None}
        return None, None, None, *finish(given, more)


def promise(anchor: Tensor, values: dict[str, Tensor], params: Sequence[Tensor],
            finish: Finish) -> dict[str, Tensor]:
    """The same values, whose backward asks `finish` for the gradients of `params`; more than once
    if the graph is retained."""
    made = cast(Any, _HandOver.apply)(anchor, values, finish, *params)
    return dict(zip(values, made, strict=True))


def hand_over(anchor: Tensor, loss: Tensor, grads: list[tuple[Tensor, Tensor]],
              scale: float = 1.0, told: LossScale | None = None,
              check: Callable[[], None] = lambda: None) -> Tensor:
    """A loss whose backward gives the parameters their gradients, as parts where they are parts:
    those of the loss times `scale`. `check` raises if they are not the gradients any more."""
    kept = [grad for _, grad in grads]

    def finish(upstream: Upstream, more: bool) -> list[Tensor]:
        check()
        given = float(upstream["loss"])
        (told or LossScale()).heard(given)
        if more:
            return [grad * (given / scale) for grad in kept]
        if kept and given != scale:
            torch._foreach_mul_(kept, given / scale)
        found, kept[:] = list(kept), []
        return found

    return promise(anchor, {"loss": loss}, [param for param, _ in grads], finish)["loss"]


@contextlib.contextmanager
def grads_kept(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Gradients that were there before: of what becomes a part, that part."""
    before = [(param, param.grad) for param in params if param.grad is not None]
    for param, _ in before:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in before:
            param.grad = grad
