"""A loss that is no number is named at its step, with the rows that made it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .world import World

log = logging.getLogger("autopar_torch")
Rows = tuple[int, int]


class _Seen(NamedTuple):
    """The losses of one step on their way to the CPU: of the batch, and of parts of it."""

    step: int
    values: Tensor
    rows: tuple[Rows, ...]
    arrival: Any  # an event of a GPU; None: they are there


class NonFinite:
    """Looks at every loss of a training step; at one that is on a GPU, when it has arrived."""

    def __init__(self, world: World, on: bool) -> None:
        self.world, self.on = world, on
        self.waiting, self.bad = list[_Seen](), False

    def check(self, step: int, replica: int | None, total: Tensor,
              parts: Mapping[Rows, Tensor]) -> None:
        """`parts`: what this rank alone has of the loss, by rows of the global batch."""
        if not self.on:
            return
        values = torch.stack([x.detach().sum() for x in (total, *parts.values())])
        self.waiting.append(_on_its_way(step, values, tuple(parts)))
        while self.waiting and (not self.waiting[0].arrival or self.waiting[0].arrival.query()):
            self._judge(replica, self.waiting.pop(0))

    def _judge(self, replica: int | None, seen: _Seen) -> None:
        total, *parts = seen.values.tolist()
        before, self.bad = self.bad, not math.isfinite(total)
        if before or not self.bad:
            return
        guilty = [f"{a} to {b - 1}" for (a, b), x in zip(seen.rows, parts, strict=True)
                  if not math.isfinite(x)]
        if guilty or self.world.rank == 0:
            made = f"rows {', '.join(guilty)} made it" if guilty else (
                "no rows of this replica made it; the rank that knows them says so")
            place = "idle" if replica is None else f"replica {replica}"
            log.warning("the loss of step %d is %s: %s (%s). Training goes on; "
                        "guards={\"nan\": False} leaves this out", seen.step, total, made,
                        place)


def _on_its_way(step: int, values: Tensor, rows: tuple[Rows, ...]) -> _Seen:
    if not values.is_cuda:
        return _Seen(step, values, rows, None)
    there = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    there.copy_(values, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record()
    return _Seen(step, there, rows, arrival)
