"""Losses as sums over rows divided by a number of the whole batch: exact under any splitting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def count_labels(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The divisor of a mean cross-entropy: the labels that count, each by its weight."""
    real = target != ignore_index
    if weight is None:
        return real.sum().to(torch.float32)
    return torch.where(real, weight[target.where(real, 0)], 0).sum()


def cross_entropy(logits: Tensor, target: Tensor, denominator: Tensor | None,
                  weight: Tensor | None, ignore_index: int, smoothing: float,
                  overwrite: bool = False) -> Tensor:
    """This part's share of the mean over the whole batch."""
    if weight is None and smoothing == 0.0 and logits.dim() == 2 and logits.dtype == torch.float32:
        total = sum_cross_entropy(logits, target, ignore_index, overwrite=overwrite)
    else:
        total = F.cross_entropy(logits, target, weight, reduction="sum", ignore_index=ignore_index,
                                label_smoothing=smoothing)
    return total if denominator is None else total / denominator


Reduce = Callable[[Tensor, Any], Tensor]


def sum_cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, start: int = 0,
                      reduce: Reduce | None = None, overwrite: bool = False) -> Tensor:
    """Sum of cross-entropies in fewer passes over the logits than softmax and loss apart.

    The logits may be those of classes start, start+1, ... only; `reduce` then joins the ranks.
    Where nothing else reads them, they need no copy: `overwrite`.
    """
    return cast(Tensor, _SumLoss.apply(logits, target, ignore_index, start, reduce, overwrite))


class _SumLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore: int, start: int,
                reduce: Reduce | None, overwrite: bool) -> Tensor:
        join = reduce or (lambda x, _: x)
        real = target != ignore
        local = target - start
        mine = real & (local >= 0) & (local < logits.shape[1])
        column = torch.where(mine, local, 0)[:, None]
        top = join(logits.detach().amax(1), dist.ReduceOp.MAX)
        powers = logits.detach().sub_(top[:, None]) if overwrite else logits - top[:, None]
        hit = join(powers.gather(1, column)[:, 0].masked_fill(~mine, 0.0), dist.ReduceOp.SUM)
        norm = join(powers.exp_().sum(1), dist.ReduceOp.SUM)
        ctx.save_for_backward(powers, norm, column, mine, real)
        return ((norm.log() - hit) * real).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        powers, norm, column, mine, real = ctx.saved_tensors
        powers.mul_((real * grads[0] / norm)[:, None])  # in place: a step runs backward once
        powers.scatter_add_(1, column, -(mine * grads[0])[:, None])
        return powers, None, None, None, None, None


def mean_over_rows(values: Tensor, denominator: Tensor) -> Tensor:
    """This part's share of the mean of all values of the whole batch."""
    return values.sum() / denominator


def count_values(batch: Tensor, per_row: int) -> Tensor:
    """Number of values in the whole batch, which has so many in every row."""
    return torch.tensor(float(batch.shape[0] * per_row), device=batch.device)


def made_of_rows(n: int, power: float, shift: float, shifted: float, logs: int) -> float:
    """`n**power * (n + shift)**shifted * log(n)**logs`; infinite where Python would have stopped at
    a division by zero."""
    if not n + shift and shifted < 0:
        return math.inf
    return float(n**power * float(n + shift)**shifted * math.log(n)**logs)


def number_of_rows(batch: Tensor, factor: float, power: float, shift: float, shifted: float,
                   logs: int, dtype: torch.dtype) -> Tensor:
    """`factor` times what is made of the rows of the whole batch."""
    value = factor * made_of_rows(len(batch), power, shift, shifted, logs)
    if dtype == torch.float32:  # as numbers are counted
        dtype = torch.get_default_dtype()
    return torch.tensor(value if dtype.is_floating_point else round(value), dtype=dtype,
                        device=batch.device)
