"""Ops on a weight of which a rank has some indices of the first dim: partial sums, no syncs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .collectives import VocabPart


class OwnRows(nn.Module):
    """`weight[ids]` for the ids this rank has; zeros for the others."""

    def __init__(self, owner: VocabPart) -> None:
        super().__init__()
        self.owner = owner

    def forward(self, weight: Tensor, index: Sequence[Tensor]) -> Tensor:
        ids, size = index[0], weight.shape[0]
        ids = torch.where(ids < 0, ids + size * self.owner.parts, ids)
        local = ids - self.owner.start(size)
        foreign = (local < 0) | (local >= size)
        found = weight[torch.where(foreign, 0, local)]
        return found.masked_fill(foreign.view(*ids.shape, *[1] * (weight.dim() - 1)), 0.0)


class OwnExperts(nn.Module):
    """Rows, sorted by expert, times the weights of the experts this rank has; zeros for the others.

    Its rows are moved to the front, where the op finds them by offsets that start at 0. What the op
    leaves behind the last offset is masked, in the results and in the gradients.
    """

    def __init__(self, owner: VocabPart, op: Any) -> None:
        super().__init__()
        self.owner, self.op = owner, op

    def forward(self, rows: Tensor, weight: Tensor, offs: Tensor, **options: Any) -> Tensor:
        own = weight.shape[0]
        first = self.owner.start(own)
        before = offs[first - 1] if first else torch.zeros_like(offs[0])
        ends = offs[first : first + own] - before
        place = torch.arange(len(rows), device=rows.device)
        mine = (place < ends[-1])[:, None]
        ahead, back = (place + before) % len(rows), (place - before) % len(rows)
        moved = torch.where(mine, rows.index_select(0, ahead), 0)
        made = cast(Tensor, self.op(moved, weight, ends, **options))
        return torch.where(mine, made, 0).index_select(0, back)
