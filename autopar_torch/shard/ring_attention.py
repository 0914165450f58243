"""Causal attention along the sequence: keys and values go around, queries stay.

Of n ranks, rank r has the halves 2r and 2r + 1 of a sequence in 2n halves. With these the last rank
would have nearly all to do. So each keeps its first, and swaps its second with rank n - 1 - r: an
early and a late half, and for every rank the same work. Of what comes from another rank, either
both halves of the queries see the early half, or the late half of the queries sees all: one product
without a mask, half as large as the square.

Parts of a softmax join by the logarithms of their sums, which fused kernels give. Their backward
takes those of the whole, so its parts add up: gradients of keys and values travel along with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .collectives import Axis, arrive, start_messages

aten = torch.ops.aten
MOST_SCORES = 1 << 26  # at a time, where no fused kernel is at hand

# --- one product, of (batch, heads, length, size) -------------------------------------------------


class Kernel(NamedTuple):
    """Forward gives (result, logarithm of the sum of each line); backward takes both."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernel_for(q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    """A fused one, where there is one for such tensors."""
    size = q.shape[-1]
    if size == v.shape[-1] and q.device.type == "cpu":
        return Kernel(aten._scaled_dot_product_flash_attention_for_cpu,
                      aten._scaled_dot_product_flash_attention_for_cpu_backward)
    if size == v.shape[-1] and q.is_cuda and size % 8 == 0:
        given = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True)
        if torch.backends.cuda.can_use_flash_attention(given):
            return Kernel(_flash, _flash_backward)
    return Kernel(plain, plain_backward)


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool,
           scale: float) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)
    return found[0], found[1]


def _flash_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor,
                    dropout: float, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # nothing is dropped
    return cast(Any, aten._scaled_dot_product_flash_attention_backward(
        dy, q, k, v, y, sums.contiguous(), None, None, q.shape[2], k.shape[2], dropout, causal,
        seed, seed[0], scale=scale))


def plain(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool,
          scale: float) -> tuple[Tensor, Tensor]:
    """The same by plain ops, some queries at a time."""
    found = []
    for _, _, scores in _strips(q, k, causal, scale):
        sums = scores.logsumexp(-1)
        found.append(((scores - sums[..., None]).exp() @ _of_group(v), sums))
    y, sums = (torch.cat(parts, 3).flatten(1, 2) for parts in zip(*found, strict=True))
    return y.to(q.dtype), sums


def plain_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor,
                   dropout: float, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    dq, (dk, dv) = [], (torch.zeros_like(_of_group(x)) for x in (k, v))
    own = [_by_group(x, k) for x in (dy, y, sums[..., None])]
    for rows, queries, scores in _strips(q, k, causal, scale):
        dy, y, sums = (x[:, :, :, rows] for x in own)
        shares = (scores - sums).exp()
        dv += (shares.mT @ dy).sum(2, keepdim=True)
        ds = shares * (dy @ _of_group(v).mT - (dy * y).sum(-1, keepdim=True)) * scale
        dk += (ds.mT @ queries).sum(2, keepdim=True)
        dq.append(ds @ _of_group(k))
    return (torch.cat(dq, 3).flatten(1, 2).to(q.dtype), dk.squeeze(2).to(k.dtype),
            dv.squeeze(2).to(v.dtype))


def _strips(q: Tensor, k: Tensor, causal: bool,
            scale: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(which queries, themselves, their scores); heads are in groups that share a key."""
    queries, keys = _by_group(q, k), _of_group(k)
    each = max(1, MOST_SCORES // (q.shape[:2].numel() * k.shape[2]))
    for start in range(0, q.shape[2], each):
        own = queries[:, :, :, start : start + each]
        scores = own @ keys.mT * scale
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(hidden.triu(start + 1), -math.inf)
        yield slice(start, start + each), own, scores


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    return wide(x).unflatten(1, (k.shape[1], -1))


def _of_group(x: Tensor) -> Tensor:
    return wide(x)[:, :, None]


def wide(x: Tensor) -> Tensor:
    """Sums of many parts are made in no less than float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- around, of (batch, length, heads, size) ------------------------------------------------------


class RingAttention(nn.Module):
    """Of this rank's piece of the sequence; its inputs are (batch, heads, length, size)."""

    def __init__(self, axis: Axis, scale: float | None) -> None:
        super().__init__()
        self.axis, self.n, self.scale = axis, axis.parts, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = _Ring.apply(*(x.transpose(1, 2) for x in (q, k, v)), self)
        return cast(Tensor, y).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"{self.n} ranks"

    def scale_of(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    # --- messages ---

    def swapped(self, given: Sequence[Tensor], back: bool = False) -> list[Tensor]:
        """From neighbouring halves to (early, late), or back."""
        in_order = 2 * self.axis.index < self.n  # the half that stays is the early one
        ahead, after = ((in_order, True) if back else (True, in_order))
        halves = [x.chunk(2, 1)[:: 1 if ahead else -1] for x in given]
        others = [other for _, other in halves]
        mirror = self.n - 1 - self.axis.index
        if mirror != self.axis.index:
            others = self._start(others, mirror, mirror)()
        pairs = ((own, other) for (own, _), other in zip(halves, others, strict=True))
        return [torch.cat(pair[:: 1 if after else -1], 1) for pair in pairs]

    def passed(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """To the next rank, and from the one before."""
        index = self.axis.index
        return self._start(tensors, (index + 1) % self.n, (index - 1) % self.n)

    def _start(self, tensors: Sequence[Tensor], to: int,
               source: int) -> Callable[[], list[Tensor]]:
        came = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        works = start_messages([(x, to) for x in tensors], [(x, source) for x in came], self.axis,
                               tagged=True)

        def land() -> list[Tensor]:
            arrive(works)
            return came

        return land

    def seen(self, step: int, length: int) -> list[tuple[slice, slice, bool]]:
        """Of step 0 to n: (queries, keys, whether only those before) that meet. What a rank has
        itself is done first and last, as messages are under way then too."""
        early, late, every = slice(0, length // 2), slice(length // 2, length), slice(0, length)
        if step == 0:
            return [(late, early, False)]
        if step == self.n:
            return [(early, early, True), (late, late, True)]
        own, other = (min(2 * r, 2 * self.n - 1 - 2 * r)
                      for r in (self.axis.index, (self.axis.index - step) % self.n))
        return [(every, early, False) if own > other else (late, every, False)]


def _run(kernel: Callable[..., tuple[Tensor, ...]], *given: Tensor, causal: bool,
         scale: float) -> list[Tensor]:
    """A kernel on what lies as it travels."""
    found = kernel(*(x.transpose(1, 2) for x in given), 0.0, causal, scale=scale)
    return [x.transpose(1, 2) for x in found]


def attend(ring: RingAttention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(result, logarithms of the sums) of this rank's halves."""
    total = wide(torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device))
    sums, own = torch.full_like(total[..., 0], -math.inf), (k, v)
    run, length = kernel_for(*(x.transpose(1, 2) for x in (q, k, v))).forward, q.shape[1]
    for step in range(ring.n + 1):
        land = ring.passed((k, v) if step < ring.n - 1 else ())
        for rows, keys, causal in ring.seen(step, length):
            part = _run(run, q[:, rows], k[:, keys], v[:, keys], causal=causal,
                        scale=ring.scale_of(q))
            _join(total[:, rows], sums[:, rows], *part)
        k, v = land() or own
    return total.to(q.dtype), sums


def _join(total: Tensor, sums: Tensor, y: Tensor, own: Tensor) -> None:
    """Add a part, in place."""
    both = torch.logaddexp(sums, own)
    total *= (sums - both).exp()[..., None]
    total += y * (own - both).exp()[..., None]
    sums.copy_(both)


def attend_backward(ring: RingAttention, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor,
                    sums: Tensor) -> list[Tensor]:
    """Gradients of this rank's halves. Those of what goes around are one step behind it."""
    dq, *grads = (wide(torch.zeros_like(x)) for x in (q, k, v))
    run, length = kernel_for(*(x.transpose(1, 2) for x in (q, k, v))).backward, q.shape[1]
    own = k, v
    for step in range(ring.n + 1):
        going = [k, v] if step < ring.n - 1 else []
        land = ring.passed([*going, *(grads if step else [])])
        found = []
        for rows, keys, causal in ring.seen(step, length):
            more, *parts = _run(run, dy[:, rows], q[:, rows], k[:, keys], v[:, keys], y[:, rows],
                                sums[:, rows], causal=causal, scale=ring.scale_of(q))
            dq[:, rows] += more
            found.append((keys, parts))
        came = land()
        grads = came[len(going) :] or grads
        for keys, parts in found:
            for total, part in zip(grads, parts, strict=True):
                total[:, keys] += part
        k, v = came[:2] if going else own
    return [x.to(q.dtype) for x in (dq, *grads)]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        ring: RingAttention = given[-1]
        halves = ring.swapped(given[:-1])
        y, sums = attend(ring, *halves)
        ctx.save_for_backward(*halves, y, sums)
        ctx.ring = ring
        return ring.swapped((y,), back=True)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        ring: RingAttention = ctx.ring
        (dy,) = ring.swapped(grads)
        found = attend_backward(ring, dy, *ctx.saved_tensors)
        return *ring.swapped(found, back=True), None
