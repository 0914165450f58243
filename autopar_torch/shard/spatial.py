"""A linear in n steps on n x n ranks (PrimePar): blocks move in rings, under the matmuls.

Rank (r, c) has the blocks I[r, r + c], W[r + c, c] and makes O[r, c], all modulo n. At step t

    forward    O[r, c]                  += I[r, r + c + t]         @ W[r + c + t, c]
    backward   dI[r, r + c]             += dO[r, c + t]            @ W[r + c, c + t].T
    gradient   dW[r + c - 1, c - 1]     += I[r + t, r + c - 1].T   @ dO[r + t, c - 1]

but the last step of the gradient makes dW[r + c, c] and adds it to what the neighbour has summed.
No two ranks ever hold the same block, no result is a partial sum, and I and dO end their first
phase where the gradient needs them. The paper moves the weights themselves, so its backward starts
one block further and ends with a message that takes them home; here micro-batches overlap, weights
stay home, and what travels is let go: one message less, and dI arrives as I was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from .collectives import Axis, arrive, start_messages
from .layout import side
from .linear import deliver, outer, product

Shift = tuple[int, int]  # a block comes from rank (r + a, c + b) and goes to (r - a, c - b)
FORWARD: tuple[Shift, Shift] = (0, 1), (1, 0)  # I, W
BACKWARD: tuple[Shift, Shift] = (0, 1), (-1, 1)  # dO, W
GRADIENT: tuple[Shift, Shift] = (1, -1), (1, 0)  # I, dO
TURN: tuple[Shift, Shift] = (1, 0), (1, 1)  # I, dO, before the last step
HOME: Shift = (0, 1)  # dW
SKIP: Shift = (0, -1)  # dO to where the gradient needs it, if there is no backward

Landing = Callable[[], list[Tensor]]


class Ring(Protocol):
    """Moves blocks around: `start` sends them off, the result waits for those that come."""

    n: int

    def start(self, blocks: Sequence[Tensor], shifts: Sequence[Shift]) -> Landing: ...


class RankRing:
    """This rank's place on the square, and its messages."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.n = axis, side(axis.parts)
        self.row, self.col = divmod(axis.index, self.n)

    def _place(self, rows: int, cols: int) -> int:
        return (self.row + rows) % self.n * self.n + (self.col + cols) % self.n

    def start(self, blocks: Sequence[Tensor], shifts: Sequence[Shift]) -> Landing:
        """What comes has buffers of its own: what goes is still in use."""
        came = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in blocks]
        out = [(x, self._place(-a, -b)) for x, (a, b) in zip(blocks, shifts, strict=True)]
        into = [(x, self._place(a, b)) for x, (a, b) in zip(came, shifts, strict=True)]
        works = start_messages(out, into, self.axis, tagged=True)

        def land() -> list[Tensor]:
            arrive(works)  # what the computation has not hidden
            return came

        return land


def forward(ring: Ring, x: Tensor, weight: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """(result, the operand where it ends). `transposed`: the weight is stored as columns, rows."""
    total: Tensor | None = None
    for t in range(ring.n):
        land = ring.start((x, weight), FORWARD) if t < ring.n - 1 else None
        total = product(total, x, weight.t() if transposed else weight)
        if land is not None:
            x, weight = land()
    return cast(Tensor, total), x


def backward(ring: Ring, dy: Tensor, weight: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """(gradient of the operand, the result's gradient where it ends)."""
    total: Tensor | None = None
    for t in range(ring.n):
        land = ring.start((dy, weight), BACKWARD) if t < ring.n - 1 else None
        total = product(total, dy, weight if transposed else weight.t())
        if land is not None:
            dy, weight = land()
    return cast(Tensor, total), dy


def gradient(ring: Ring, x: Tensor, dy: Tensor, transposed: bool) -> Tensor:
    """Gradient of the weight, at home."""
    total: Tensor | None = None
    for t in range(ring.n - 1):
        land = ring.start((x, dy), TURN if t == ring.n - 2 else GRADIENT)
        total = product(total, *outer(x, dy, transposed))
        x, dy = land()
    land = ring.start((cast(Tensor, total),), (HOME,))
    a, b = outer(x, dy, transposed)
    last = a @ b
    return land()[0].add_(last)


class _Spatial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None,
                linear: SpatialLinear) -> Tensor:
        y, end = forward(linear.ring, _flat(x), weight, linear.transposed)
        ctx.save_for_backward(end, weight)
        ctx.linear, ctx.shape, ctx.has_bias = linear, x.shape, bias is not None
        ctx.weight = weight
        y = y if bias is None else y.add_(bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (x, weight), dy, linear = ctx.saved_tensors, _flat(grads[0]), ctx.linear
        ring, transposed = linear.ring, linear.transposed
        db = dy.sum(0) if ctx.has_bias else None
        dx = None
        if ctx.needs_input_grad[0]:
            dx, dy = backward(ring, dy, weight, transposed)
            dx = dx.view(ctx.shape)
        elif ctx.needs_input_grad[1]:
            (dy,) = ring.start((dy,), (SKIP,))()
        if not ctx.needs_input_grad[1]:
            return dx, None, db, None

        def work(into: Tensor | None) -> Tensor:
            found = gradient(ring, x, dy, transposed)
            return found if into is None else into.add_(found)

        return dx, deliver(ctx.weight, work) if linear.leaf else work(None), db, None


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, -2).contiguous()


class SpatialLinear(nn.Module):
    """`linear` (transposed weight) or `addmm` on this rank's blocks; of the bias its columns."""

    def __init__(self, axis: Axis, transposed: bool, leaf: bool) -> None:
        super().__init__()
        self.ring, self.transposed, self.leaf = RankRing(axis), transposed, leaf

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return cast(Tensor, _Spatial.apply(x, weight, bias, self))

    def extra_repr(self) -> str:
        return f"{self.ring.n} x {self.ring.n}"
