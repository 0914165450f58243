"""Price one candidate with its borders: its schedule's time, and bytes per position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..profile import Curve
from ..simulate.walk import Pipeline
from .memory import Memory, staying
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


class Parts(NamedTuple):
    """Of several cuts of a candidate."""

    work: Array  # forward, backward, input, weight; cut; stage
    send: Array  # cut; border between two stages
    back: Array


class Pricer:
    """Everything about one candidate that does not depend on its borders, and then the rest."""

    def __init__(self, tables: Tables, candidate: Candidate, num_rows: int) -> None:
        self.tables, self.candidate = tables, candidate
        option, c = tables.options[candidate.option], candidate
        self.tp = option.degree
        self.rows = c.rows(num_rows)
        self.over = tables.profile.profile.overheads
        self.params = tables.params(c.option)
        split = c.schedule == "zero_bubble"
        blocks = with_gathers(tables, c, tables.blocks(c.option, self.rows, c.recompute))
        work = np.array(blocks[:4])
        work[[_BACKWARD, _WEIGHT]] += per_micro_batch(tables, c)
        if c.schedule == "1f1b" and c.recompute:  # see `Plan.whole`
            work[_INPUT], work[_WEIGHT] = work[_BACKWARD], 0.0
        self.seconds = work[_FORWARD] + (work[_INPUT] + work[_WEIGHT] if split
                                         else work[_BACKWARD])
        self.work = np.zeros((4, work.shape[1] + 1))
        np.cumsum(work, axis=1, out=self.work[:, 1:])
        ahead = tables.sends(c.option, self.rows)[0]
        self.work_key = (c.option, self.rows, split, c.recompute, c.micro_batches, c.stages(),
                         (c.dp, c.pp, c.zero) if c.zero >= 2 else None)
        self.bucket = tables.bucket_bytes(c)
        self.op = "scatter" if c.zero else "sum"
        self.programs = tables.programs[c.option][1]
        self._lags: dict[tuple[object, ...], float] = {}
        self._weighed: dict[tuple[int, ...], tuple[Parts, int, float]] = {}
        self.memory = Memory(c, self.params, blocks, ahead, self.over.fixed_bytes,
                             tables.precision == "bfloat16", self.bucket,
                             tables.halved)
        self.closing = after(tables, c)
        self.trained, self.leaf = _sums(self.params.trained), _sums(self.params.leaf)

    def price(self, borders: tuple[int, ...], memory_bytes: float | None = None) -> Found:
        last = self.summed(self.pipeline(borders), borders)
        memory = self.peak(borders) if memory_bytes is None else memory_bytes
        return Found(float(self.outside_of(borders) + last), memory, self.candidate, borders)

    def summed(self, pipe: Pipeline, borders: tuple[int, ...]) -> float:
        """When all gradients are there and summed."""
        c, stages = self.candidate, list(pairwise(borders))
        stops = self.tables.ends(c.schedule, pipe, c.micro_batches, c.virtual)
        return max(self._reduced(stop, stages[p], p) for p, stop in enumerate(stops))

    def busy(self, pipe: Pipeline) -> list[float]:
        """Seconds that each stage computes and exchanges in all."""
        m, found = self.candidate.micro_batches, []
        works = zip(*pipe[: _WEIGHT + 1], strict=True)
        for s, (forward, backward, early, late) in enumerate(works):
            halved = self.candidate.halved(s)
            found.append(m * forward + (m - halved) * backward + halved * (early + late))
        return found

    def peak(self, borders: Sequence[int]) -> float:
        stages = list(pairwise(borders))
        pp = self.candidate.pp
        return max(self.memory.peak(p, stages[p::pp]) for p in range(pp))

    # --- time -----------------------------------------------------------------------------------

    def weighed(self, cuts: Sequence[tuple[int, ...]]) -> tuple[Parts, list[float]]:
        """Parts of several cuts and what is outside; kept for whoever prices one of them."""
        borders = np.array(cuts)
        parts, outside = self.parts(borders), self.outside(borders)
        self._weighed |= {cut: (parts, i, outside[i]) for i, cut in enumerate(cuts)}
        return parts, outside

    def _known(self, borders: tuple[int, ...]) -> tuple[Parts, int, float]:
        if borders not in self._weighed:
            self.weighed([borders])
        return self._weighed[borders]

    def pipeline(self, borders: tuple[int, ...]) -> Pipeline:
        parts, i, _ = self._known(borders)
        forward, backward, early, late = map(tuple, parts.work[:, i].tolist())
        send, back = tuple(parts.send[i].tolist()), tuple(parts.back[i].tolist())
        return Pipeline(forward, backward, early, late, (*send, 0.0), (0.0, *back))

    def parts(self, borders: NDArray[np.int64]) -> Parts:
        """Seconds of every stage, and of the messages between stages, for some cuts (rows)."""
        c, over = self.candidate, self.over
        work = np.diff(self.work[:, borders], axis=2)
        work[_FORWARD] += over.action_s
        work[_FORWARD][:, : c.pp] += over.micro_batch_s  # later stages of a position find it done
        send, back = np.zeros((2, len(borders), c.stages() - 1))
        for curve, s in self.tables.hops(self.tp, c.pp, c.stages()) if c.pp > 1 else ():
            ahead, answer = self.tables.message(c.option, self.rows, curve)
            there, here = ahead[borders[:, s + 1]], answer[borders[:, s + 1]]
            for side in (s, s + 1) if curve.held else ():  # part of it holds up both ranks
                work[_FORWARD][:, side] += curve.held * there
                work[_BACKWARD : _INPUT + 1, :, side] += curve.held * here
            send[:, s], back[:, s] = (1 - curve.held) * there, (1 - curve.held) * here
        return Parts(work, send, back)

    def outside(self, borders: NDArray[np.int64]) -> list[float]:
        """Per cut: what comes before the pipeline and after it. ZeRO 1 and 2 gather the parameters;
        the loss is summed over everyone, then the optimizer runs."""
        c, over = self.candidate, self.over
        trained, leaf = (_largest(total, borders, c.pp) for total in (self.trained, self.leaf))
        seconds = [over.step_s + self.closing(size) for size in trained]
        if c.zero in (1, 2):
            curve = self.tables.curve("gather", 0, c.pp * self.tp, c.dp)
            seconds = [s + curve.seconds(size) + size * over.fill_s_per_byte
                       for s, size in zip(seconds, leaf, strict=True)]
        return seconds

    def outside_of(self, borders: tuple[int, ...]) -> float:
        return self._known(borders)[2]

    def _reduced(self, stop: float, stage: tuple[int, int], position: int) -> float:
        """When the sums of a position are there."""
        c = self.candidate
        if c.dp == 1 or c.zero == 3:
            return stop
        curve = self.tables.curve(self.op, position * self.tp, c.pp * self.tp, c.dp)
        part, (first, end) = _WEIGHT if c.halved(position) else _BACKWARD, stage
        sizes = self.params.trained[first:end].tolist()
        key = (id(curve), part, self.programs[first:end].tobytes(), *sizes)
        if key not in self._lags:
            self._lags[key] = self._lag(curve, self.work[part, first:end].tolist(), sizes)
        return stop + self._lags[key]

    def _lag(self, curve: Curve, starts: Sequence[float], sizes: Sequence[float]) -> float:
        """Buckets leave as the last backward of a stage, or the second part of it, fills them."""
        copy_s = self.over.packing(self.op)  # it holds the backward up
        size, packed, done = 0.0, 0.0, -np.inf
        for i in range(len(sizes) - 1, -1, -1):
            size += sizes[i]
            if size and (self.candidate.zero >= 2 or size >= self.bucket or i == 0):
                packed += size * copy_s
                ready = starts[0] - starts[i] + packed
                done = max(done, ready) + curve.seconds(size)
                size = 0.0
        return max(done, packed)


def per_micro_batch(tables: Tables, c: Candidate) -> Array:
    """Seconds of adding a block's gradients to those that are there, and of `summing` them.

    The first micro-batch adds nothing; the last sums of ZeRO 2 go on beside the backward.
    """
    share, trained = (c.micro_batches - 1) / c.micro_batches, tables.params(c.option).trained
    add_s_per_byte = tables.profile.profile.overheads.add_s_per_byte
    adding = share * staying(c.zero, c.dp) * add_s_per_byte * trained
    return adding + summing(tables, c) * (1.0 if c.zero == 3 else share)


def summing(tables: Tables, c: Candidate) -> Array:
    """ZeRO 2 and 3 sum gradients at once, block by block, and keep only their own part."""
    sizes, which = tables.distinct(c.option, "trained")
    if c.zero < 2 or c.dp == 1:
        return np.zeros(len(which))
    curve = tables.curve("scatter", 0, c.pp * tables.options[c.option].degree, c.dp)
    over = tables.profile.profile.overheads
    byte_s = over.packing("scatter")
    seconds = [curve.seconds(n) + n * byte_s if n else 0.0 for n in sizes]
    return np.array(seconds)[which]


def with_gathers(tables: Tables, c: Candidate, blocks: Blocks) -> Blocks:
    """ZeRO 3 gathers every block before it runs, forward and backward."""
    if c.zero < 3 or c.dp == 1:
        return blocks
    leaf, (sizes, which) = tables.params(c.option).leaf, tables.distinct(c.option, "leaf")
    curve = tables.curve("gather", 0, c.pp * tables.options[c.option].degree, c.dp)
    over = tables.profile.profile.overheads
    known = [curve.seconds(n) + n * over.fill_s_per_byte if n else 0.0 for n in sizes]
    seconds = np.array(known)[which]
    return blocks._replace(forward=blocks.forward + seconds, backward=blocks.backward + seconds,
                           input=blocks.input + seconds,
                           working=leaf + np.maximum(leaf, blocks.working))


def after(tables: Tables, c: Candidate) -> Callable[[float], float]:
    """The loss is summed over everyone, then the optimizer runs: seconds by bytes of a device."""
    over, world = tables.profile.profile.overheads, tables.options[c.option].degree * c.pp * c.dp
    seconds = tables.curve("sum", 0, 1, world).seconds(4.0) if world > 1 else 0.0
    seconds += tables.totals(c.option).number / c.pp * over.update_s_per_tensor
    byte_s = over.update_s_per_byte / (c.dp if c.zero else 1)
    return lambda trained: seconds + trained * byte_s


def _largest(total: Array, borders: NDArray[np.int64], pp: int) -> list[float]:
    """Per cut: most of something that one position has."""
    parts = np.diff(total[borders], axis=1)
    return parts.reshape(len(borders), -1, pp).sum(axis=1).max(axis=1).tolist()


def _sums(values: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])
