"""Bytes of a position of a pipeline at its worst moment, for any range of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..simulate.memory import STATES
from .space import SCHEDULES, Candidate
from .tables import Array, Blocks, Ints, Params, Tables, sums_before


class PositionMemory:
    """Works out what does not depend on a candidate's borders, so that `peak` is a few sums.

    At the worst moment a position holds its parameters and what the optimizer keeps; and either
    activations in flight, the working memory of one block (or what a backward in two parts keeps of
    a micro-batch for its second part) and the gradients so far, or all gradients and the messages
    that they are packed into.
    """

    def __init__(self, c: Candidate, params: Params, blocks: Blocks, came: Array,
                 fixed_bytes: float, copies: bool, bucket: float,
                 half_grads: bool = False) -> None:
        self.candidate, self.fixed, self.bucket = c, fixed_bytes, bucket
        self.lasting = lasting(c.zero, c.dp, params, copies)
        self.states = STATES * params.trained / (c.dp if c.zero else 1)
        self.params, self.trained, self.stash, kept, self.stays = sums_before(np.array([
            self.lasting, params.trained, blocks.stash, blocks.kept,
            so_far(c.zero, c.dp, params, half_grads)])).tolist()
        self.kept = self.stash if c.schedule == "zero_bubble" else kept
        self.splits_last = c.schedule == "1f1b" and c.recompute is not True
        self.working, self.largest = blocks.working.tolist(), params.largest.tolist()
        self.came, self.again = came.tolist(), c.micro_batches > 1
        self.flight = in_flight(SCHEDULES.index(c.schedule), c.pp, c.micro_batches, c.virtual,
                                np.arange(c.pp)).tolist()

    def peak(self, position: int, stages: Sequence[tuple[int, int]]) -> float:
        """Most bytes on a device of a position that holds these stages."""
        base, trained, kept, stash, working, largest = self.fixed, 0.0, 0.0, 0.0, 0.0, 0.0
        stays = 0.0
        for a, b in stages:
            base += self.params[b] - self.params[a]
            trained += self.trained[b] - self.trained[a]
            stays += self.stays[b] - self.stays[a]
            kept += self.kept[b] - self.kept[a] + self.came[a]
            stash += self.stash[b] - self.stash[a] - (self.kept[b] - self.kept[a])
            working = max(working, max(self.working[a:b]))
            largest = max(largest, max(self.largest[a:b]))
        running = self.flight[position] / len(stages) * kept
        running += max(working, stash + largest) if self.splits_last and position else working
        if self.again:
            running += stays
        return base + max(running, self._packed(trained, largest))

    def _packed(self, trained: float, largest: float) -> float:
        """Messages of gradients beside what they were packed from (see simulate/memory.py)."""
        c = self.candidate
        if c.dp == 1:
            return trained + 2 * largest
        if not c.zero:
            return trained + max(2 * largest, min(trained, largest + self.bucket))
        if c.zero == 1:
            return 2 * trained + min(trained / c.dp, self.bucket)
        return 2 * trained + largest / c.dp + (trained / c.dp if self.again else 0.0)

    def parts(self, position: int, stages: Sequence[tuple[int, int]]) -> dict[str, float]:
        """What the bytes of `peak` are made of."""
        found = {"fixed": self.fixed}
        for name, column in (("parameters", self.lasting - self.states),
                             ("optimizer", self.states)):
            found[name] = float(sum(column[a:b].sum() for a, b in stages))
        rest = self.peak(position, stages) - sum(found.values())
        trained = sum(self.trained[b] - self.trained[a] for a, b in stages)
        kept = sum(self.kept[b] - self.kept[a] + self.came[a] for a, b in stages)
        running = self.flight[position] / len(stages) * kept
        if running < trained:  # the worst moment is that of the sums
            return found | {"gradients": trained, "messages": rest - trained}
        grads = sum(self.stays[b] - self.stays[a] for a, b in stages) if self.again else 0.0
        return found | {"gradients": grads, "activations": running,
                        "working": rest - grads - running}


def lasting(zero: int | Ints, dp: int | Ints, params: Params, copies: bool) -> Array:
    """Per block: parameters, their leaves where those are copies, and the optimizer's states."""
    owned = params.trained / dp ** (zero > 0)
    leaf = params.leaf * ((zero < 3) & ((zero > 0) | copies))
    return params.held - params.trained + (1 + STATES) * owned + leaf


def staying(zero: int | Ints, dp: int | Ints) -> Any:
    """The part of the gradients that is kept between micro-batches; also for columns at once."""
    return 1.0 / dp ** (zero >= 2)


def so_far(zero: int | Ints, dp: int | Ints, params: Params, half_grads: bool) -> Array:
    """Per block: bytes of gradients kept between micro-batches. What ZeRO 2 and 3 have summed has
    the type of the parameters; what is not summed yet may have the type of the leaves."""
    whole = params.leaf if half_grads else params.trained
    return np.where(zero >= 2, params.trained * staying(zero, dp), whole)


def between(tables: Tables, option: int, zero: int, dp: int, again: bool = True) -> Array:
    """Per block: bytes held between micro-batches; if there is `again` one, with gradients."""
    params = tables.params(option)
    held = lasting(zero, dp, params, tables.precision == "bfloat16")
    return held + so_far(zero, dp, params, tables.half_grads) * again


def in_flight(schedule: int | Ints, pp: int | Ints, count: int | Ints, virtual: int | Ints,
              position: Ints) -> Ints:
    """Micro-batches whose activations a position holds at its peak, summed over its stages."""
    most = count * virtual
    first = {"1f1b": pp, "gpipe": most, "zero_bubble": pp, "interleaved": (virtual + 1) * pp - 1}
    fewer = {"1f1b": 1, "gpipe": 0, "zero_bubble": 0, "interleaved": 2}  # from position to position
    ahead = np.choose(schedule, [first[name] - fewer[name] * position for name in SCHEDULES])
    return np.minimum(most, ahead)
