"""Price one candidate with its borders: the closed formula for time, and bytes per position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..profile import Curve
from ..shard.reduction import BUCKET_BYTES
from ..simulate.formula import Pipeline
from .memory import Memory
from .space import Candidate
from .tables import Array, Blocks, Tables

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(4)  # rows of Blocks


class Found(NamedTuple):
    """A priced plan."""

    step_s: float
    memory_bytes: float
    candidate: Candidate
    borders: tuple[int, ...]

    @property
    def order(self) -> tuple[float, float, Candidate, tuple[int, ...]]:
        """Ties fall the same way everywhere: less memory, then the plainer plan."""
        return (self.step_s, self.memory_bytes, self.candidate, self.borders)


class Pricer:
    """Everything about one candidate that does not depend on its borders, and then the rest."""

    def __init__(self, tables: Tables, candidate: Candidate, num_rows: int) -> None:
        self.tables, self.candidate = tables, candidate
        option, c = tables.options[candidate.option], candidate
        self.tp = option.degree
        self.rows = rows_of(c, num_rows)
        self.over = tables.profile.profile.overheads
        self.params = tables.params(c.option)
        split = c.schedule == "zero_bubble"
        blocks = with_gathers(tables, c, tables.blocks(c.option, self.rows, split, c.recompute))
        work = np.array(blocks[:4])
        work[_WEIGHT if split else _BACKWARD] += self.params.trained * again(c, tables)
        self.seconds = work[_FORWARD] + (work[_INPUT] + work[_WEIGHT] if split
                                         else work[_BACKWARD])  # fmt: skip
        self.work = np.zeros((4, work.shape[1] + 1))
        np.cumsum(work, axis=1, out=self.work[:, 1:])
        ahead = tables.sends(c.option, self.rows)[0]
        self.work_key = (c.option, self.rows, split, c.recompute, c.micro_batches, c.stages(),
                         (c.dp, c.pp) if c.zero == 3 else None)  # fmt: skip
        self.memory = Memory(c, self.params, blocks, ahead, self.over.fixed_bytes,
                             tables.precision == "bfloat16")  # fmt: skip
        self.trained, self.leaf = _sums(self.params.trained), _sums(self.params.leaf)

    def price(self, borders: tuple[int, ...], memory_bytes: float | None = None) -> Found:
        pipe = self.pipeline(borders)
        c = self.candidate
        stops = self.tables.ends(c.schedule, pipe, c.micro_batches, c.virtual)
        stages = list(pairwise(borders))
        last = max(self._reduced(stop, stages[p], p) for p, stop in enumerate(stops))
        memory = self.peak(borders) if memory_bytes is None else memory_bytes
        return Found(float(self.outside(borders) + last), memory, c, borders)

    def peak(self, borders: Sequence[int]) -> float:
        stages = list(pairwise(borders))
        pp = self.candidate.pp
        return max(self.memory.peak(p, stages[p::pp]) for p in range(pp))

    # --- time -----------------------------------------------------------------------------------

    def pipeline(self, borders: tuple[int, ...]) -> Pipeline:
        over = self.over
        part = np.diff(self.work[:, list(borders)], axis=1)
        part[_FORWARD] += over.action_s + over.micro_batch_s
        part[_BACKWARD : _INPUT + 1] += over.action_s
        return Pipeline(*map(tuple, part.tolist()), *self._messages(borders))

    def _messages(self, borders: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of the messages at every border; none within a position."""
        c = self.candidate
        ahead, back = self.tables.sends(c.option, self.rows)
        send, ret = [0.0] * c.stages(), [0.0] * c.stages()
        for s, border in enumerate(borders[1:-1]):
            here, there = s % c.pp * self.tp, (s + 1) % c.pp * self.tp
            if here != there:
                curve = self.tables.curve("send", here, there - here, 2)
                send[s], ret[s + 1] = curve.seconds(ahead[border]), curve.seconds(back[border])
        return tuple(send), tuple(ret)

    def outside(self, borders: Sequence[int]) -> float:
        """What comes before the pipeline and after it: ZeRO 1 and 2 gather the parameters; the
        loss is summed over everyone, then the optimizer runs."""
        c, over = self.candidate, self.over
        trained, leaf = (_largest(total, borders, c.pp) for total in (self.trained, self.leaf))
        seconds = over.step_s
        if c.zero in (1, 2):
            curve = self.tables.curve("gather", 0, c.pp * self.tp, c.dp)
            seconds += curve.seconds(leaf) + leaf * over.copy_s_per_byte
        return seconds + after(self.tables, c, trained)

    def _reduced(self, stop: float, stage: tuple[int, int], position: int) -> float:
        """When the sums of a position are there: buckets leave as its last backward fills them."""
        c = self.candidate
        if c.dp == 1:
            return stop
        op = "scatter" if c.zero else "sum"
        curve = self.tables.curve(op, position * self.tp, c.pp * self.tp, c.dp)
        first, end = stage
        starts = self.work[_BACKWARD, first:end].tolist()
        sizes = self.params.trained[first:end].tolist()
        done = size = 0.0
        for i in range(end - first - 1, -1, -1):
            size += sizes[i]
            if size and (c.zero >= 2 or size >= BUCKET_BYTES or i == 0):
                ready = stop - (starts[i] - starts[0])
                done = max(done, ready) + bucket_seconds(curve, size, self.tables)
                size = 0.0
        return max(done, stop)


def rows_of(c: Candidate, num_rows: int) -> int:
    return max(1, num_rows // (c.dp * c.micro_batches))


def again(c: Candidate, tables: Tables) -> float:
    """Seconds per byte of adding gradients, spread over the micro-batches; the first adds none."""
    share = (c.micro_batches - 1) / c.micro_batches
    return share * tables.profile.profile.overheads.add_s_per_byte


def with_gathers(tables: Tables, c: Candidate, blocks: Blocks) -> Blocks:
    """ZeRO 3 gathers every block before it runs, forward and backward."""
    if c.zero < 3 or c.dp == 1:
        return blocks
    leaf = tables.params(c.option).leaf
    curve = tables.curve("gather", 0, c.pp * tables.options[c.option].degree, c.dp)
    known = {size: curve.seconds(size) if size else 0.0 for size in set(leaf.tolist())}
    seconds = np.array([known[size] for size in leaf.tolist()])
    return blocks._replace(forward=blocks.forward + seconds, backward=blocks.backward + seconds,
                           input=blocks.input + seconds,
                           working=blocks.working + 2 * leaf)  # fmt: skip


def after(tables: Tables, c: Candidate, trained: float) -> float:
    """The loss is summed over everyone, then the optimizer runs on so many bytes."""
    over, world = tables.profile.profile.overheads, tables.options[c.option].degree * c.pp * c.dp
    seconds = tables.curve("sum", 0, 1, world).seconds(4.0) if world > 1 else 0.0
    tensors = float(tables.params(c.option).number.sum()) / c.pp
    owned = trained / (c.dp if c.zero else 1)
    return seconds + owned * over.update_s_per_byte + tensors * over.update_s_per_tensor


def bucket_seconds(curve: Curve, size: float, tables: Tables) -> float:
    return curve.seconds(size) + size * tables.profile.profile.overheads.copy_s_per_byte


def _largest(total: Array, borders: Sequence[int], pp: int) -> float:
    """Most of something that one position has."""
    parts = np.diff(total[list(borders)])
    return float(parts.reshape(-1, pp).sum(axis=0).max())


def _sums(values: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])
