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
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import RunError
from ..shard.again import is_retained
from .world import World

_ALIKE = 0.02  # by which norms of one gradient may differ: ranks may add up in another order
Upstream = dict[str, Tensor]  # output -> its gradient; without those that nothing was made of
# What came, and whether more may come (`retain_graph`) -> the gradient of every parameter
Finish = Callable[[Upstream, bool], Sequence[Tensor | None]]
Anew = Callable[[Upstream, Sequence[Tensor]], Sequence[Tensor | None]]  # of these tensors
NOTHING = None, None, None, None  # for what comes before them


@dataclass
class LossScale:
    """The factor by which the script scaled the loss of the last step, as GradScaler does. Float16
    gradients vanish unless the loss is scaled, and they are made before `backward()` is called."""

    value: float = 1.0

    def heard(self, factor: float) -> None:
        self.value = min(max(1.0, factor), 2.0**24)  # if it is no number: 1


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: dict[str, Tensor], finish: Finish, again: Anew,
                *learning: Tensor) -> tuple[Tensor, ...]:
        ctx.names, ctx.finish, ctx.again, ctx.learning = tuple(values), finish, again, learning
        ctx.set_materialize_grads(False)
        return tuple(values.values())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.finish is None:
            raise RunError("backward() was already called on what this call returned",
                           where="backward or torch.autograd.grad, a second time",
                           fix="run forward again, add losses up before one backward(), or say "
                           "retain_graph=True the first time")
        finish, more = ctx.finish, is_retained()
        if not more:
            ctx.finish = None
        given = {name: grad for name, grad in zip(ctx.names, upstream, strict=True)
                 if grad is not None}
        if not torch.is_grad_enabled():
            return *NOTHING, *finish(given, more)
        asked = ctx.needs_input_grad[len(NOTHING):]
        found = iter(ctx.again(given, [x for x, is_asked in zip(ctx.learning, asked, strict=True)
                                       if is_asked]))
        return *NOTHING, *(next(found) if is_asked else None for is_asked in asked)


def promise(anchor: Tensor, values: dict[str, Tensor], learning: Sequence[Tensor],
            finish: Finish, again: Anew) -> dict[str, Tensor]:
    """The same values, whose backward asks `finish` for the gradients of all that learns, more than
    once if the graph is retained; or `again`, for gradients that can be differentiated."""
    made = cast(Any, _HandOver.apply)(anchor, values, finish, again, *learning)
    return dict(zip(values, made, strict=True))


def between(value: Tensor, name: str, others: str) -> Tensor:
    """An output that others are made of, which here are results of their own: a gradient at it
    would miss what comes by way of these, so it is refused."""
    node = cast(Any, value.grad_fn)

    def refuse(*_: Any) -> Any:
        raise RunError(
            f"a gradient is asked for at the output {name}, of which {others} is made, too: what "
            "comes by way of that is not known", where="autograd.grad, retain_grad, register_hook",
            fix="compute what is made of it outside of the model; or ask for the gradient of a "
            "copy (.clone()), if only what you make of it counts; or use model.module, which every "
            "rank runs whole")

    def check(_: Tensor) -> None:
        if not torch._C._will_engine_execute_node(node):
            refuse()

    shown = value.view_as(value)
    shown.register_hook(check)
    vars(shown).update(retain_grad=refuse, register_hook=refuse)
    return shown


def hand_over(anchor: Tensor, loss: Tensor, grads: list[tuple[Tensor, Tensor]], again: Anew,
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

    return promise(anchor, {"loss": loss}, [x for x, _ in grads], finish, again)["loss"]


def check_alike(world: World, upstream: Upstream) -> None:
    """All ranks must be here, with the same gradients; they meet in a group of its own."""
    if world.size == 1:
        return
    norm = torch.stack([g.detach().double().norm() for g in upstream.values()]).norm()
    ends = torch.stack([norm, -norm])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=world.aside)
    most, least = ends[0].item(), -ends[1].item()
    if most - least > _ALIKE * most:
        raise RunError(
            f"the gradients of the outputs differ between ranks: their norms are {least:.3g} "
            f"to {most:.3g}", where="backward of a loss outside of the model",
            fix="compute the same loss of the whole outputs on every rank: with the global "
            "targets, and the same random numbers")


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
