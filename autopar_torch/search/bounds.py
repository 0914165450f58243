"""Lower bounds of time and memory, for all candidates at once. What they drop is not priced."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..profile import Curve
from .evaluate import gathering, summing
from .memory import in_flight, lasting, so_far, staying
from .space import SCHEDULES, Candidate, Candidates
from .tables import Array, Ints, Tables

FORWARD, BACKWARD, INPUT, WEIGHT, KEPT, WORKING, ADDED = range(7)  # fields of a program
ROUNDING = 1 + 1e-9  # a bound and a price may round differently; then `Found.order` decides
TINY = 1e-9  # seconds or bytes, instead of a division by zero


class Bounded:
    """Candidates as columns, the cost of each of their programs (program x candidate), and bounds:
    of time for all of them, of memory for those that `possible` is called with."""

    def __init__(self, found: Candidates, tables: Tables, num_rows: int,
                 capacity_bytes: float) -> None:
        self.found, self.tables, self.capacity_bytes = found, tables, capacity_bytes
        (self.option, self.pp, self.dp, self.count, self.schedule, self.virtual, self.zero,
         self.recompute) = np.ascontiguousarray(found.rows.T)
        self.rows = -(-num_rows // (self.dp * self.count))
        self.size = np.unique(self.rows, return_inverse=True)[1].reshape(-1)  # which of the rows
        self.programs = max(len(keys) for keys, _ in tables.programs)
        counts = self._per_option(lambda o: np.bincount(tables.programs[o][1]))
        self.counts = counts.take(self.option, 1)
        self.costs = self._costs()
        common = [int(np.bincount(which).argmax()) for _, which in tables.programs]
        self.common = np.array(common)[self.option]
        self.held = self._held()
        self.seconds = self._seconds()
        self.memory_bytes = np.full(len(found), np.inf)  # until a candidate is looked at

    def _per_option(self, values: Callable[[int], Array | Ints]) -> Array:
        """A column of numbers per option, padded to the most programs."""
        found = np.zeros((self.programs, len(self.tables.options)))
        for option in range(len(self.tables.options)):
            column = values(option)
            found[: len(column), option] = column
        return found

    def _by(self, *columns: Ints) -> tuple[Ints, Ints]:
        """(one candidate of each combination of these columns, the combination of each). With an
        option goes `dp` or `pp`, as one tells the other."""
        none = len(self.found)
        code: Ints = np.zeros(none, dtype=np.int64)
        for column in columns:
            code = code * (int(column.max()) + 1) + column
        seen = np.full(int(code.max()) + 1, none)
        seen[code] = np.arange(none)
        there = np.flatnonzero(seen < none)
        first = seen[there]
        seen[there] = np.arange(len(there))
        return first, seen[code]

    def _costs(self) -> Array:
        """Field x program x candidate: what a micro-batch costs, gathers of ZeRO 3 included."""
        first, which = self._by(self.option, self.size, self.recompute)
        table = np.zeros((7, self.programs, len(first)))
        for row, i in enumerate(first):
            own = self.tables.columns(int(self.option[i]), int(self.rows[i]),
                                      self.found.recomputes[self.recompute[i]])
            table[:, : len(own), row] = own.T[:7]
        costs = table.take(which, 2)
        costs[: INPUT + 1] += self._least(gathering, 3)
        return costs

    def _least(self, seconds: Callable[[Tables, Candidate], Array], zero: int) -> Array:
        """Program x candidate: from this ZeRO stage on, the least of something of its blocks."""
        first, which = self._by(self.option, self.dp, (self.zero >= zero).astype(int))
        found = np.zeros((self.programs, len(first)))
        for row, i in enumerate(first.tolist()):
            if self.zero[i] >= zero and self.dp[i] > 1:
                option = int(self.option[i])
                least = self.tables.least(option, seconds(self.tables, self.found[i]))
                found[: len(least), row] = least
        return found.take(which, 1)

    def _held(self) -> Array:
        """Three rows of bytes per candidate: parameters and optimizer state with all gradients; for
        one block of the most common program the same without gradients; the gradients it keeps."""
        tables, copies = self.tables, self.tables.precision == "bfloat16"
        first, which = self._by(self.option, self.dp, self.zero)
        found = np.zeros((3, len(first)))
        for option, (_, programs) in enumerate(tables.programs):
            rows = np.flatnonzero(self.option[first] == option)
            if len(rows):
                zero, dp = self.zero[first[rows]][:, None], self.dp[first[rows]][:, None]
                params, alike = tables.params(option), programs == self.common[first[rows[0]]]
                stays = lasting(zero, dp, params, copies)
                found[0, rows] = stays.sum(axis=1) + params.trained.sum()
                found[1, rows] = stays[:, alike].min(axis=1)
                found[2, rows] = so_far(zero, dp, params, tables.half_grads)[:, alike].min(axis=1)
        return found.take(which, 1)

    def _team(self, op: str, i: int) -> Curve:
        """The curve of the ranks that share the first stage of a candidate."""
        stride = int(self.pp[i]) * self.tables.options[self.option[i]].degree
        return self.tables.curve(op, 0, stride, int(self.dp[i]))

    def _seconds(self) -> Array:
        """Seconds below any cut: for which the busiest position is busy, or the chain through it.

        With positions k = 0..p-1 of forward f_k, backward b_k and t_k = f_k + b_k: in 1F1B the
        first backward of k starts after all forwards on the way and all backwards behind it (of
        which only the inner parts are waited for). Until then k has done no more than
        w = min(m, p) forwards, so (m-w) f_k and all backwards are left, the last of them before
        those on the way back. With f_k <= phi t_k, and t_k that of `_longest` or more, it is
        F + I + (m-1 - (w-1) phi) t_k. GPipe is the same with w = 1: all forwards pass k, and all
        backwards. In a zero bubble m t_k - w f_k are left behind all forwards.
        """
        p, m, forward = self.pp, self.count, self.costs[FORWARD]
        split = self.schedule == SCHEDULES.index("zero_bubble")
        whole, parts = self.costs[BACKWARD], self.costs[INPUT] + self.costs[WEIGHT]
        either = (self.schedule == SCHEDULES.index("1f1b")) & (p > 1)
        backward = np.where(split, parts, np.where(either, np.minimum(parts, whole), whole))
        work = forward + backward + self._per_micro_batch()
        early = np.where(split, 0.0, np.minimum(self.costs[INPUT], whole))
        ahead, longest = (self.counts * (forward + early)).sum(axis=0), self._longest(work)
        used = (self.counts > 0) & (work > 0)
        phi = np.where(used, forward / np.where(used, work, 1.0), 0.0).max(axis=0)
        first = np.where(self.schedule == SCHEDULES.index("gpipe"), 1, np.minimum(m, p))
        left = m - np.where(split, first, first - 1) * phi - ~split
        chain = ahead + np.maximum(left, 0.0) * longest
        plain = (p > 1) & (self.schedule != SCHEDULES.index("interleaved"))
        return self._outside() + np.maximum(m * longest, np.where(plain, chain, 0.0)) / ROUNDING

    def _longest(self, work: Array) -> Array:
        """A lower bound of the seconds of the position whose blocks take longest.

        That is no less than the average. And blocks are whole: let n of them have w seconds, those
        of the most common program, or more. If no position has more than t, each has place for
        floor(t / w) of the n, and one that also holds a shorter block of o seconds, or one of
        w + o, for floor((t - o) / w); together the positions need place for n. With o = (q + r) w,
        q whole and r a fraction, the least such t is w min(ceil((n+q) / p) + r, ceil((n+q+1) / p)).
        """
        used = np.where(self.counts > 0, work, 0.0)
        w = np.maximum(work[self.common, np.arange(len(self.pp))], TINY)
        n = np.where(used >= w, self.counts, 0).sum(axis=0)
        other = np.where(used >= w, used - w, used) / w
        q = np.floor(other)
        places = np.minimum(np.ceil((n + q) / self.pp) + other - q,
                            np.ceil((n + q + 1) / self.pp))
        return np.maximum((self.counts * work).sum(axis=0) / self.pp, (w * places).max(axis=0))

    def _per_micro_batch(self) -> Array:
        """Program x candidate: the least seconds of adding gradients and of waiting for their sums
        (see `Pricer`)."""
        tables, many = self.tables, (self.count - 1) / self.count
        add = tables.overheads.add_s_per_byte
        adding = add * self._per_option(lambda o: tables.least(o, tables.params(o).trained))
        saved = np.minimum(self.costs[ADDED], 0.0) * (self.count > 1)  # by all but the first
        once = np.where(self.zero == 3, 1.0, many)
        added = many * adding.take(self.option, 1) + saved
        return staying(self.zero, self.dp) * added + self._least(summing, 2) * once

    def _outside(self) -> Array:
        """What comes before and after: gathering at least the smallest block, and updating at
        least the average share."""
        # here ZeRO 1 and 2 do the same
        first, which = self._by(self.option, self.dp, self.zero - (self.zero >= 2))
        tables, found = self.tables, np.zeros(len(first))
        over = tables.overheads
        for row, i in enumerate(first):
            c = self.found[i]
            params, world = tables.params(c.option), tables.options[c.option].degree * c.pp * c.dp
            byte_s = over.update_s_per_byte / (c.dp if c.zero else 1)
            update_s = params.trained * byte_s + params.number * over.update_s_per_tensor
            found[row] = over.step_s + update_s.sum() / c.pp
            found[row] += tables.curve("sum", 0, 1, world).seconds(4.0) if world > 1 else 0.0
            if c.zero in (1, 2) and c.dp > 1:
                least = params.leaf.min() if c.pp > 1 else params.leaf.sum()
                if least:
                    found[row] += lower_bound_s(self._team("gather", int(i)), least)
        return found[which]

    def possible(self, chosen: Ints) -> Ints:
        """The candidates that memory may hold: no cut needs less on every device, and all blocks
        find a place.

        Some position holds at least the average of what lasts and of the gradients. And of the
        blocks of the most common program, x_k of them on position k: it needs x_k r_k with r_k for
        what lasts, for the activations in flight there and for the gradients where they last too.
        As the x_k sum to the number n of such blocks, the largest x_k r_k is at least
        n / sum(1 / r_k); there, the working memory of such a block comes on top. Blocks are whole:
        position k has place for no more than floor(free_bytes / r_k) of them, and together the
        positions need place for n.
        """
        own_program = self.common[chosen], chosen
        mean, own, grads = self.held[:, chosen]
        kept, working = self.costs[KEPT][own_program], self.costs[WORKING][own_program]
        count, p = self.counts[own_program], self.pp[chosen]
        fixed = self.tables.overheads.fixed_bytes
        free_bytes = np.maximum(0.0, self.capacity_bytes - fixed - working)
        each = own + np.where(self.count[chosen] > 1, grads, 0.0)
        grows = kept / self.virtual[chosen]
        starts = np.cumsum(p) - p
        schedule, pp, m, virtual = self.found.rows[np.repeat(chosen, p)][:, [4, 1, 3, 5]].T
        flight = in_flight(schedule, pp, m, virtual, np.arange(len(pp)) - np.repeat(starts, p))
        rate = TINY + np.repeat(each, p) + flight * np.repeat(grows, p)
        inverse = np.add.reduceat(1 / rate, starts)
        fitting = np.add.reduceat(np.floor(np.repeat(free_bytes * ROUNDING, p) / rate), starts)
        lower_bound = fixed + np.maximum(mean / p, count / inverse + working)
        self.memory_bytes[chosen] = lower_bound
        return chosen[(lower_bound <= self.capacity_bytes) & (fitting >= count)]


def lower_bound_s(curve: Curve, num_bytes: float) -> float:
    """A lower bound for messages of so many bytes or more, whatever larger ones were measured."""
    points = getattr(curve, "points", None)  # assumed links have no points
    if points is None:
        return curve.seconds(num_bytes)
    falling = len(points) > 1 and points[-1][1] < points[-2][1]
    larger = [y for x, y in points if x >= num_bytes]
    return 0.0 if falling else max(0.0, min([curve.seconds(num_bytes), *larger]))


__all__ = ["ROUNDING", "Bounded"]
