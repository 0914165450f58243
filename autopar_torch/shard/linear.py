"""Linears whose weight gradients are added in place, or wait for a later action.

Autograd makes a gradient, then adds it to the one that is there: another pass over both, and memory
for one more. A product that starts from what is there needs neither.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

LARGE = 1 << 18  # elements
GradWork = Callable[[Tensor | None], Tensor]  # makes a gradient, added to the argument if given


class WeightQueue:
    """Weight gradients put off during a backward, to be computed by a later action."""

    active: WeightQueue | None = None

    def __init__(self) -> None:
        self.waiting: deque[tuple[Tensor, GradWork]] = deque()

    def __enter__(self) -> WeightQueue:
        WeightQueue.active = self
        return self

    def __exit__(self, *_: object) -> None:
        WeightQueue.active = None

    @torch.no_grad()
    def flush(self, done: Callable[[Tensor], object] = lambda weight: None) -> None:
        """Compute and accumulate the waiting gradients, and free each when it is done. `done` is
        called with each weight after its last one."""
        left = Counter(id(weight) for weight, _ in self.waiting)
        while self.waiting:
            weight, work = self.waiting.popleft()
            if weight.grad is None:  # it may be added up in more digits than the weight has
                weight.grad = work(None).to(weight.grad_dtype)
            else:
                weight.grad = work(weight.grad)
            left[id(weight)] -= 1
            if not left[id(weight)]:
                done(weight)


class _Delivery:
    least = 0.0


@contextlib.contextmanager
def delivered(least: float) -> Iterator[None]:
    """Linears that run inside hand the gradients of weights over as they are made here, if these
    have so many elements. Others are torch's own, which leave that to autograd."""
    before, _Delivery.least = _Delivery.least, least
    try:
        yield
    finally:
        _Delivery.least = before


def least_delivered() -> float:
    """Autograd keeps other values of linears that hand gradients over."""
    return _Delivery.least


def delivers(num_elements: float = math.inf) -> bool:
    """Whether what runs now hands the gradient of such a weight over; by default, of some."""
    on = _Delivery.least < math.inf and torch.is_grad_enabled()
    return on and num_elements >= _Delivery.least


def wants_delivery(device: torch.device, split: bool) -> float:
    """A split backward needs it of all. Else it saves a pass over gradients and costs work of the
    host for each linear: a good exchange on a CPU for what no cache holds, and a bad one where the
    host feeds a GPU."""
    return 0.0 if split else LARGE if device.type == "cpu" else math.inf


def deliver(weight: Tensor, work: GradWork) -> Tensor | None:
    """The gradient of a leaf, for autograd to add. None if it waits for its own action, or is added
    here to the one that is there; that is not done if hooks wait for autograd to add it."""
    if WeightQueue.active is not None:
        WeightQueue.active.waiting.append((weight, work))
        return None
    if weight.grad is None or weight._post_accumulate_grad_hooks:
        return work(None)
    work(weight.grad)
    return None


def product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """The product `a @ b`, added to a total if there is one."""
    if total is None:
        return a @ b
    return total.addmm_(a, b) if total.dtype == a.dtype else total.add_(a @ b)


def outer(x: Tensor, dy: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Factors of the gradient of a weight (`transposed`: that of `linear`, else of `addmm`)."""
    return (dy.t(), x) if transposed else (x.t(), dy)


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None,
                transposed: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.has_bias, ctx.transposed = weight, bias is not None, transposed
        return plain_linear(x, weight, bias, transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (x,), (dy,), transposed = ctx.saved_tensors, grads, ctx.transposed
        weight, flat = ctx.weight, dy.flatten(0, -2)
        dx = dy @ (weight if transposed else weight.t()) if ctx.needs_input_grad[0] else None
        db = flat.sum(0) if ctx.has_bias else None
        factors = outer(x.flatten(0, -2), flat, transposed)
        return dx, deliver(weight, lambda into: product(into, *factors)), db, None


def direct_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None,
                  transposed: bool = True) -> Tensor:
    """`linear`, or (not transposed) `addmm`, by a weight that is a leaf."""
    if delivers(weight.numel()):
        return cast(Tensor, _Direct.apply(x, weight, bias, transposed))
    return plain_linear(x, weight, bias, transposed)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if transposed or bias is None:
        return F.linear(x, weight if transposed else weight.t(), bias)
    return torch.addmm(bias, x, weight)
