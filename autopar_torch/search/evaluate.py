"""Price one candidate with its borders: its schedule's time, and bytes per position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..simulate.walk import WORKS, Pipeline
from .borders import Once
from .memory import PositionMemory, staying
from .space import Candidate
from .tables import Array, Blocks, Tables, sums_before

FORWARD, BACKWARD, INPUT, WEIGHT, FIRST_B, FIRST_W, LAST_B, LAST_W = range(WORKS)


class Found(NamedTuple):
    """A priced plan."""

    step_s: float
    memory_bytes: float
    candidate: Candidate
    borders: tuple[int, ...]

    @property
    def order(self) -> tuple[float, float, Candidate, tuple[int, ...]]:
        """By time; ties alike on all machines: less memory first, then the plainer plan."""
        return (self.step_s, self.memory_bytes, self.candidate, self.borders)


class StageSeconds(NamedTuple):
    """Seconds of several cuts of a candidate."""

    work: Array  # fields of `Pipeline`; cut; stage
    send: Array  # cut; border between two stages
    back: Array
    held: Array  # cut; stage: for how long sending its gradients back blocks it
    begin: Array  # cut; position: what comes before its schedule
    update: Array  # cut; position: what comes after all are done

    def busy(self, c: Candidate) -> Array:
        """Cut x stage: seconds that it computes and exchanges in all."""
        m, num_split = c.micro_batches, np.array([c.num_split(s) for s in range(c.stages())])
        whole, split = num_split < m, num_split > 0  # the first backward, the last one
        times = np.array([0 * num_split + m, m - num_split - whole - ~split, num_split,
                          num_split - ~whole - split, whole, ~whole, ~split, split], dtype=float)
        return np.einsum("ws,wcs->cs", times, self.work)


class Pricer:
    """Prices the cuts of one candidate. What does not depend on borders is worked out once."""

    def __init__(self, tables: Tables, candidate: Candidate, num_rows: int) -> None:
        self.tables, self.candidate = tables, candidate
        option, c = tables.options[candidate.option], candidate
        self.tp = option.degree
        self.rows = c.rows(num_rows)
        self.over = tables.overheads
        self.params = tables.params(c.option)
        self.bucket = tables.bucket_bytes(c)
        self.op = "scatter" if c.zero else "sum"
        blocks, gathers = tables.blocks(c.option, self.rows, c.recompute), gathering(tables, c)
        if c.zero == 3:
            leaf = self.params.leaf
            blocks = blocks._replace(
                forward=blocks.forward + gathers, backward=blocks.backward + gathers,
                input=blocks.input + gathers, working=leaf + np.maximum(leaf, blocks.working))
        stays = staying(c.zero, c.dp) * (c.micro_batches > 1)  # part of a gradient that is added to
        adding = stays * self.over.add_s_per_byte * self.params.trained
        added = stays * (self.params.trained > 0) * blocks.added
        work = self._works(blocks, adding, added)
        split = c.schedule == "zero_bubble"
        self.seconds = work[FORWARD] + (work[INPUT] + work[WEIGHT] if split else work[BACKWARD])
        self.work, self.adding = sums_before(work), sums_before(adding)
        ahead = tables.sends(c.option, self.rows)[0]
        self.once = Once(work[INPUT], work[WEIGHT]) if (
            c.micro_batches == 1 and c.schedule != "gpipe") else None
        self.work_key = (c.option, self.rows, split, c.recompute, c.micro_batches, c.stages(),
                         (c.dp, c.pp, c.zero) if c.zero >= 2 else None, self.once is None)
        self.programs = tables.programs[c.option][1]
        self._lags: dict[tuple[object, ...], tuple[float, float]] = {}
        self._weighed: dict[tuple[int, ...], tuple[StageSeconds, int]] = {}
        self.memory = PositionMemory(c, self.params, blocks, ahead, self.over.fixed_bytes,
                             tables.precision == "bfloat16", self.bucket,
                             tables.half_grads)
        world = self.tp * c.pp * c.dp
        self.loss_s = tables.curve("sum", 0, 1, world).seconds(4.0) if world > 1 else 0.0
        byte_s = self.over.update_s_per_byte / (c.dp if c.zero else 1)
        self.update = sums_before(byte_s * self.params.trained
                            + self.over.update_s_per_tensor * self.params.number)
        self.leaf = sums_before(self.params.leaf)

    def _works(self, blocks: Blocks, adding: Array, added: Array) -> Array:
        """Fields of `Pipeline` per block. Later gradients are added to earlier ones. ZeRO 2 and 3
        sum them over the ranks after each micro-batch, but ZeRO 2 not after the last one: then, as
        with ZeRO 0 and 1, they are only packed, and the sums go on beside the backward."""
        c, sums, more = self.candidate, summing(self.tables, self.candidate), adding + added
        packing = self.over.packing(self.op) if c.dp > 1 else 0.0
        last = sums if c.zero == 3 else packing * self.params.trained
        early, late = blocks.input, blocks.weight
        if c.schedule == "1f1b" and c.recompute is True:  # see `Plan.whole`
            early, late = blocks.backward, np.zeros(len(sums))
        return np.array([blocks.forward, blocks.backward + more + sums, early, late + adding + sums,
                         blocks.backward + sums, late + sums, blocks.backward + more + last,
                         late + adding + last])

    def price(self, borders: tuple[int, ...], memory_bytes: float | None = None) -> Found:
        last = self.summed(borders)
        memory = self.peak(borders) if memory_bytes is None else memory_bytes
        return Found(last + self.closing(borders), memory, self.candidate, borders)

    def closing(self, borders: tuple[int, ...]) -> float:
        """The loss is summed over everyone, then the optimizer runs."""
        parts, i = self._known(borders)
        return self.loss_s + float(parts.update[i].max())

    def begins(self, borders: tuple[int, ...]) -> tuple[float, ...]:
        """When every position begins with its schedule."""
        parts, i = self._known(borders)
        return tuple(parts.begin[i].tolist())

    def ends(self, borders: tuple[int, ...]) -> list[float]:
        """When every stage has done its last backward."""
        c, pipe = self.candidate, self.pipeline(borders)
        return self.tables.ends(c.schedule, pipe, c.micro_batches, c.virtual, self.begins(borders))

    def summed(self, borders: tuple[int, ...]) -> float:
        """When all gradients are there and summed."""
        ends, stages, pp = self.ends(borders), list(pairwise(borders)), self.candidate.pp
        if self.candidate.dp == 1 or self.candidate.zero == 3:
            return max(ends)
        parts, i = self._known(borders)
        held = [0.0 if self.candidate.num_split(s) else h
                for s, h in enumerate(parts.held[i].tolist())]
        found = max(ends)
        for position in range(pp):
            done = -np.inf
            for s in reversed(range(position, len(stages), pp)):  # later stages are done first
                lag, total = self._lag(stages[s], s)
                done = max(done + total, ends[s] - held[s] + lag)
            found = max(found, done)
        return float(found)

    def busy(self, borders: tuple[int, ...]) -> list[float]:
        """Seconds that each stage computes and exchanges in all."""
        parts, i = self._known(borders)
        return parts.busy(self.candidate)[i].tolist()

    def peak(self, borders: Sequence[int]) -> float:
        stages = list(pairwise(borders))
        pp = self.candidate.pp
        return max(self.memory.peak(p, stages[p::pp]) for p in range(pp))

    # --- time -----------------------------------------------------------------------------------

    def weighed(self, cuts: Sequence[tuple[int, ...]]) -> StageSeconds:
        """The seconds of several cuts; they are kept for pricing one of them later."""
        parts = self.parts(np.array(cuts))
        self._weighed |= {cut: (parts, i) for i, cut in enumerate(cuts)}
        return parts

    def _known(self, borders: tuple[int, ...]) -> tuple[StageSeconds, int]:
        if borders not in self._weighed:
            self.weighed([borders])
        return self._weighed[borders]

    def pipeline(self, borders: tuple[int, ...]) -> Pipeline:
        parts, i = self._known(borders)
        work, send, back = (part.tolist() for part in (parts.work[:, i], parts.send[i],
                                                       parts.back[i]))
        return Pipeline._make([*map(tuple, work), (*send, 0.0), (0.0, *back)])

    def parts(self, borders: NDArray[np.int64]) -> StageSeconds:
        """Seconds of every stage and position, and of the messages between stages, for some cuts
        (rows)."""
        c, over = self.candidate, self.over
        work = np.diff(self.work[:, borders], axis=2)
        work[FORWARD] += over.action_s
        work[FORWARD][:, : c.pp] += over.micro_batch_s  # done once for all stages of a position
        send, back = np.zeros((2, len(borders), c.stages() - 1))
        held = np.zeros((len(borders), c.stages()))
        for curve, s in self.tables.hops(self.tp, c.pp, c.stages()) if c.pp > 1 else ():
            ahead, answer = self.tables.message(c.option, self.rows, curve)
            there, here = ahead[borders[:, s + 1]], answer[borders[:, s + 1]]
            for side in (s, s + 1) if curve.held else ():  # part of it blocks both ranks
                work[FORWARD][:, side] += curve.held * there
                for part in (BACKWARD, INPUT, FIRST_B, LAST_B):
                    work[part][:, side] += curve.held * here
            held[:, s + 1] = curve.held * here
            send[:, s], back[:, s] = (1 - curve.held) * there, (1 - curve.held) * here
        begin = np.full((len(borders), c.pp), over.step_s)
        if c.zero in (1, 2):
            begin += self._gathering(borders)
        return StageSeconds(work, send, back, held, begin, self._by_position(self.update, borders))

    def _by_position(self, sums: Array, borders: NDArray[np.int64]) -> Array:
        """Cut x position: the sum of something over the stages of each position."""
        return np.diff(sums[borders], axis=1).reshape(len(borders), -1, self.candidate.pp).sum(
            axis=1)

    def _gathering(self, borders: NDArray[np.int64]) -> Array:
        """ZeRO 1 and 2 gather the parameters of a position."""
        sizes = self._by_position(self.leaf, borders)
        curve = self.tables.curve("gather", 0, self.candidate.pp * self.tp, self.candidate.dp)
        known = {size: curve.seconds(size) if size else 0.0 for size in set(sizes.ravel().tolist())}
        seconds = [known[size] for size in sizes.ravel().tolist()]
        return np.array(seconds).reshape(sizes.shape) + sizes * self.over.fill_s_per_byte

    def _lag(self, stage: tuple[int, int], index: int) -> tuple[float, float]:
        """(by how much a stage's gradient sums end after its last backward, their seconds in all).
        Buckets leave as that backward, or the second part of it, fills them."""
        c, (first, end) = self.candidate, stage
        part = LAST_W if c.num_split(index) else LAST_B
        curve = self.tables.curve(self.op, index % c.pp * self.tp, c.pp * self.tp, c.dp)
        key = (id(curve), part, self.programs[first:end].tobytes(),
               self.params.trained[first:end].tobytes())
        if key not in self._lags:
            starts = (self.work[part] - self.adding)[first:end].tolist()  # adding comes first
            done, total = -np.inf, 0.0
            for i, size in buckets(self.params.each[first:end], self.bucket, c.zero >= 2):
                seconds = curve.seconds(size)
                done, total = max(done, starts[0] - starts[i]) + seconds, total + seconds
            self._lags[key] = float(done), total
        return self._lags[key]


def buckets(each: Sequence[tuple[float, ...]], most: float,
            apart: bool) -> Iterator[tuple[int, float]]:
    """Gradients of some blocks in messages, as `buckets_of` makes them: (block that completes it,
    bytes). `apart`: no message has gradients of two blocks."""
    size = 0.0
    rest = [i for i, sizes in enumerate(each) if sizes]
    for i in reversed(rest):
        for own in each[i]:
            size += own
            if size >= most:
                yield i, size
                size = 0.0
        if size and (apart or i == rest[0]):
            yield i, size
            size = 0.0


def summing(tables: Tables, c: Candidate) -> Array:
    """Seconds per block in which ZeRO 2 and 3 sum its gradients and keep a rank's own part."""
    each = tables.params(c.option).each
    if c.zero < 2 or c.dp == 1:
        return np.zeros(len(each))
    curve = tables.curve("scatter", 0, c.pp * tables.options[c.option].degree, c.dp)
    over, most = tables.overheads, tables.bucket_bytes(c)
    byte_s = over.packing("scatter")
    known = {sizes: sum(curve.seconds(size) + size * byte_s
                        for _, size in buckets([sizes], most, True)) for sizes in set(each)}
    return np.array([known[sizes] for sizes in each])


def gathering(tables: Tables, c: Candidate) -> Array:
    """Seconds per block in which ZeRO 3 gathers it before it runs, forward and backward."""
    leaf = tables.params(c.option).leaf
    if c.zero < 3 or c.dp == 1:
        return np.zeros(len(leaf))
    curve = tables.curve("gather", 0, c.pp * tables.options[c.option].degree, c.dp)
    over = tables.overheads
    known = {size: curve.seconds(size) + size * over.fill_s_per_byte if size else 0.0
             for size in set(leaf.tolist())}
    return np.array([known[size] for size in leaf.tolist()])
