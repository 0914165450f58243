"""Lower bounds of time and memory, for all candidates at once. What they kill is never priced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..profile import Curve
from .evaluate import after, summing
from .memory import lasting, so_far, staying
from .space import SCHEDULES, Candidates
from .tables import Array, Ints, Tables

FORWARD, BACKWARD, INPUT, WEIGHT, KEPT, WORKING = range(6)  # fields of a program
ROUNDING = 1 + 1e-9  # a bound and a price may round differently
NEARLY = 0.9  # blocks of programs that take so much of the most common one count with it
TINY = 1e-9  # seconds or bytes, instead of a division by zero


class Bounds(NamedTuple):
    """Per candidate: no cut of it is faster, or needs less memory on every device."""

    seconds: Array
    memory_bytes: Array
    holds: NDArray[np.bool_]  # whether the capacity may hold it, block by block


class _Space:
    """The candidates as columns, and what every program of theirs costs (program x candidate)."""

    COLUMNS = ("option", "pp", "dp", "count", "virtual", "zero", "recompute", "schedule", "rows",
               "size", "split", "hurries", "counts", "costs", "added", "added_most", "common",
               "held")

    def __init__(self, found: Candidates, tables: Tables, num_rows: int) -> None:
        self.found, self.tables = found, tables
        (self.option, self.pp, self.dp, self.count, self.schedule, self.virtual, self.zero,
         self.recompute) = np.ascontiguousarray(found.rows.T)
        self.rows = -(-num_rows // (self.dp * self.count))
        self.size = np.unique(self.rows, return_inverse=True)[1].reshape(-1)  # which of the rows
        self.split = self.schedule == SCHEDULES.index("zero_bubble")
        self.hurries = ((self.schedule == SCHEDULES.index("1f1b")) & (self.pp > 1)
                        & (self.recompute == 0))
        self.programs = max(len(keys) for keys, _ in tables.programs)
        counts = self.per_option(lambda o: np.bincount(tables.programs[o][1]))
        self.counts = counts.take(self.option, 1)
        self.costs = self._costs()
        self.added, self.added_most = _per_micro_batch(self)
        common = [int(np.bincount(which).argmax()) for _, which in tables.programs]
        self.common = np.array(common)[self.option]
        self.held = self._held()

    def take(self, chosen: Ints) -> _Space:
        """Only these candidates."""
        space = copy.copy(self)
        space.found = self.found[chosen]
        for name in self.COLUMNS:
            setattr(space, name, getattr(self, name).take(chosen, -1))
        return space

    def per_option(self, values: Callable[[int], Array | Ints]) -> Array:
        """A column of numbers per option, padded to the most programs."""
        found = np.zeros((self.programs, len(self.tables.options)))
        for option in range(len(self.tables.options)):
            column = values(option)
            found[: len(column), option] = column
        return found

    def by(self, *columns: Ints) -> tuple[Ints, Ints]:
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
        first, which = self.by(self.option, self.size, self.recompute)
        table = np.zeros((6, self.programs, len(first)))
        for row, i in enumerate(first):
            own = self.tables.columns(int(self.option[i]), int(self.rows[i]),
                                      bool(self.recompute[i]))
            table[:, : len(own), row] = own.T[:6]
        costs = table.take(which, 2)
        costs[: INPUT + 1] += self._gathers()
        return costs

    def _gathers(self) -> Array:
        """ZeRO 3: seconds of gathering the parameters of a block of every program."""
        leaf = self.per_option(lambda o: self.tables.least(o, self.tables.params(o).leaf))
        first, which = self.by(self.option, self.dp, self.zero)
        table = np.zeros((self.programs, len(first)))
        for row, i in enumerate(first):
            if self.zero[i] == 3 and self.dp[i] > 1:
                curve = self.team("gather", int(i))
                table[:, row] = [curve.seconds(size) if size else 0.0
                                 for size in leaf[:, self.option[i]]]
        return table.take(which, 1)

    def _held(self) -> Array:
        """What lasts and all gradients; of a block of the most common program (the least of them)
        what lasts, and of its gradients what stays."""
        tables, copies = self.tables, self.tables.precision == "bfloat16"
        first, which = self.by(self.option, self.dp, self.zero)
        found = np.zeros((3, len(first)))
        for option, (_, programs) in enumerate(tables.programs):
            rows = np.flatnonzero(self.option[first] == option)
            if len(rows):
                zero, dp = self.zero[first[rows]][:, None], self.dp[first[rows]][:, None]
                params, alike = tables.params(option), programs == self.common[first[rows[0]]]
                stays = lasting(zero, dp, params, copies)
                found[0, rows] = stays.sum(axis=1) + tables.totals(option).trained
                found[1, rows] = stays[:, alike].min(axis=1)
                found[2, rows] = so_far(zero, dp, params, tables.halved)[:, alike].min(axis=1)
        return found.take(which, 1)

    def backward(self) -> Array:
        """Program x candidate: seconds of a whole backward, both parts where it is split; where
        the last one is, no more than either takes."""
        whole, parts = self.costs[BACKWARD], self.costs[INPUT] + self.costs[WEIGHT]
        both = np.where(self.hurries, np.minimum(parts, whole), whole)
        return np.where(self.split, parts, both)

    def early(self) -> Array:
        """Program x candidate: the least that the position before waits for."""
        return np.minimum(self.costs[INPUT], self.costs[BACKWARD])

    def team(self, op: str, i: int) -> Curve:
        """Of the ranks that share the first stage of a candidate."""
        stride = int(self.pp[i]) * self.tables.options[self.option[i]].degree
        return self.tables.curve(op, 0, stride, int(self.dp[i]))


class Bounded:
    """Candidates with rough bounds of time; better ones, and those of memory, are worked out for
    whom they may concern."""

    def __init__(self, candidates: Candidates, tables: Tables, num_rows: int,
                 capacity: float) -> None:
        self.space, self.capacity = _Space(candidates, tables, num_rows), capacity
        self.outside, self.bucket = _outside(self.space)
        self.memory_bytes = np.full(len(candidates), np.inf)  # of those who were looked at
        self.holds = np.zeros(len(candidates), dtype=bool)

    def rough(self) -> Array:
        """By blocks alone: seconds that the average position is busy, or the chain through one that
        is no less busy (see `_pipeline`)."""
        space = self.space
        p, m, split, forward = space.pp, space.count, space.split, space.costs[FORWARD]
        work = forward + space.backward() + space.added
        total, ahead, early = ((space.counts * part).sum(axis=0)
                               for part in (work, forward, space.early()))
        phi = _ratio(forward, work, (space.counts > 0) & (work > 0)).max(axis=0)
        first = np.where(space.schedule == SCHEDULES.index("gpipe"), 1, np.minimum(m, p))
        left = m - np.where(split, first, first - 1) * phi - ~split
        chain = ahead + np.where(split, 0.0, early) + np.maximum(left, 0.0) * total / p
        plain = (p > 1) & (space.schedule != SCHEDULES.index("interleaved"))
        return self.outside + np.maximum(m * total / p, np.where(plain, chain, 0.0)) / ROUNDING

    def seconds(self, chosen: Ints) -> Array:
        """The bound of time of some."""
        return self.outside[chosen] + _pipeline(self.space.take(chosen), self.bucket[chosen])

    def possible(self, chosen: Ints) -> Ints:
        """Those of some that memory may hold."""
        least, holds = _memory(self.space.take(chosen), self.capacity)
        self.memory_bytes[chosen], self.holds[chosen] = least, holds
        return chosen[(least <= self.capacity) & holds]


def bounds(candidates: Candidates, tables: Tables, num_rows: int,
           capacity: float = np.inf) -> Bounds:
    """Both bounds of every candidate; the proofs are with `_pipeline` and `_memory`. Candidates
    that cannot fit are not looked at any further."""
    found = Bounded(candidates, tables, num_rows, capacity)
    seconds = np.full(len(candidates), np.inf)
    possible = found.possible(np.arange(len(candidates)))
    if len(possible):
        seconds[possible] = found.seconds(possible)
    return Bounds(np.maximum(seconds, found.rough()), found.memory_bytes, found.holds)


def _pipeline(space: _Space, bucket: Array) -> Array:
    """No cut ends its pipeline, and the sum of the last bucket of its first stage, sooner.

    With positions k = 0..p-1 of work t_k = f_k + b_k per micro-batch, which sum to S, and messages
    of M seconds along the chain and back:

    1F1B. The first backward of k starts after all forwards on the way and all backwards behind it.
    Until then k has done no more than w_k = min(m, p-k) forwards, so (m-w_k) f_k + (m-1) b_k are
    left after it, and behind them its last backward and those before k. But for the first stage's
    the last ones need only be inner, i_s of each b_s: F + I + M + (m-1) t_k - (w_k-1) f_k. With
    f_k <= phi t_k that is F + I + M + c_k t_k, c_k = m-1 - (w_k-1) phi. And with m >= p the first
    backwards behind k are whole: S + M + c_k t_k less b_s - i_s <= delta t_s of positions 1 to k.
    GPipe is the same with w_k = 1, and S for F + I, as all its backwards are whole: all forwards
    pass the slowest f, all backwards the slowest b.
    Zero bubble. The first inner backward of k starts after all forwards and the inner backwards
    behind it; then all but w_k forwards, and all of the rest, are left:
    F + M_f + sum of i_s behind k + m t_k - w_k f_k, with i_s >= iota t_s.

    What the stages are, the worst k counts: max_k a_k >= sum_k u_k a_k for weights that sum to 1.
    Choosing u_k c_k + iota (u_0 + .. + u_(k-1)) = K for all k makes that S K; and in the last case
    u_k c_k - delta (u_k + .. + u_(p-1)) = K, but u_0 c_0 = K. Any schedule takes m S / p, as some
    position has S / p to do for each of m micro-batches.

    As blocks are whole, some t_k is at least t of `_slowest`: c_0 t for it (c_0 is the least) in
    place of S K, or m t. As no position takes longer than the longest, that one gives the last case
    (m-1 - (p-1) max(phi, delta)) t. All chains end with the first stage, whose bucket follows; only
    m t may end, in 1F1B, with the weights of another.
    """
    over, p, m = space.tables.profile.profile.overheads, space.pp, space.count
    counts, split, least = space.counts, space.split, space.added
    forward = space.costs[FORWARD]
    work = forward + space.backward() + least
    extra = space.virtual * over.action_s + over.micro_batch_s  # of a position's forwards
    total = (counts * work).sum(axis=0) + p * extra
    ahead = (counts * forward).sum(axis=0) + p * extra
    phi, iota = _fractions(space, work, extra)
    there, back = _messages(space)
    name = space.schedule
    early = (counts * space.early()).sum(axis=0)
    base = np.where(split, ahead + there,
                    np.where(space.hurries, ahead + early, total) + there + back)
    factor, first = _spread(space, phi, iota)
    longest = _slowest(space, work) + extra
    followed = np.maximum(total * factor, longest * np.maximum(first, 0.0))
    plain = name != SCHEDULES.index("interleaved")
    drained = _drained(space, work, total, longest, phi) - (counts * least).sum(axis=0)
    alone = m * longest + np.where(space.hurries, 0.0, bucket)
    chains = np.where(plain, base + followed, total + there + back)
    chains = np.maximum(chains, drained + there + back)
    seconds = np.maximum(alone, chains + bucket)
    return np.where(p == 1, m * total + bucket, seconds)


def _fractions(space: _Space, work: Array, extra: Array) -> tuple[Array, Array]:
    """phi: the forward of a position is no more of its work; iota: its inner backward no less.

    Seconds e that come with every forward are in f_k and t_k: with F <= phi T and I >= iota T but
    for them, f_k <= (phi (1 - x) + x) t_k and i_k >= iota (1 - x) t_k, where x = e / t_k is at most
    that of the quickest block alone.
    """
    there, costs = space.counts > 0, space.costs
    used, slowest = there & (work > 0), work + space.added_most - space.added
    quickest = np.where(there, work, np.inf).min(axis=0)
    share = extra / np.maximum(quickest + extra, TINY)
    phi = _ratio(costs[FORWARD], work, used).max(axis=0) * (1 - share) + share
    iota = np.where(used, _ratio(costs[INPUT], slowest, used), 1.0).min(axis=0)
    return phi, np.where(space.split, iota * (1 - share), 0.0)


def _per_micro_batch(space: _Space) -> tuple[Array, Array]:
    """Program x candidate: `per_micro_batch` of its blocks, the least and the most of them."""
    tables = space.tables
    add = tables.profile.profile.overheads.add_s_per_byte
    adding = (
        add * space.per_option(lambda o: tables.least(o, tables.params(o).trained)),
        -add * space.per_option(lambda o: tables.least(o, -tables.params(o).trained)),
    )
    sums = (space.zero >= 2) & (space.dp > 1)
    first, which = space.by(space.option, space.dp, sums.astype(int))
    found = np.zeros((2, space.programs, len(first)))  # least and most of the sums
    for row in np.flatnonzero(sums[first]):
        i = int(first[row])
        option = int(space.option[i])
        seconds = summing(tables, space.found[i])
        least = tables.least(option, seconds)
        found[0, : len(least), row] = least
        found[1, : len(least), row] = -tables.least(option, -seconds)
    share = (space.count - 1) / space.count
    once = np.where(space.zero == 3, 1.0, share)
    stays = share * staying(space.zero, space.dp)
    adds = (adding[k].take(space.option, 1) * stays for k in range(2))
    least, most = (own + found[k].take(which, 1) * once for k, own in enumerate(adds))
    return least, most


def _ratio(part: Array, whole: Array, used: NDArray[np.bool_]) -> Array:
    return np.where(used, part / np.where(used, whole, 1.0), 0.0)


def _spread(space: _Space, phi: Array, iota: Array) -> tuple[Array, Array]:
    """(K, c_0) of every candidate: see `_pipeline`."""
    p, m, split = space.pp, space.count, space.split
    gpipe = space.schedule == SCHEDULES.index("gpipe")
    k = np.arange(p.max(initial=1))[:, None]
    ahead = np.where(gpipe, 1, np.minimum(m, p - k))
    done = np.where(split, ahead, ahead - 1) * phi
    c = m - done - ~split
    own = np.where(k < p, 1 / np.maximum(c, TINY), 0.0)
    weights = own.copy()  # times 1 - iota (u_0 + .. + u_(k-1)), a product of such differences
    weights[1:] *= np.maximum(0.0, 1 - iota * own).cumprod(axis=0)[:-1]
    return 1 / weights.sum(axis=0), c[0]


def _drained(space: _Space, work: Array, total: Array, longest: Array, phi: Array) -> Array:
    """1F1B whose first backwards are whole (of all else it says nothing), without messages: S + S K
    or what the longest position gives, see `_pipeline`. Adding is left to be subtracted. (Terms are
    those of the sum of all u_k, multiplied out from the first position on.)"""
    p, m = space.pp, space.count
    used = (space.counts > 0) & (work > 0)
    delta = _ratio(space.backward() - space.early(), work, used).max(axis=0)
    alone = np.maximum(0.0, m - 1 - (p - 1) * np.maximum(phi, delta)) * longest
    found = np.full(len(p), -np.inf)
    i = np.flatnonzero(space.hurries & (m >= p))
    k = np.arange(p[i].max(initial=1))[:, None]
    inside, less = k < p[i], np.where(k, delta[i], 0.0)
    rate = m[i] - 1 - (p[i] - k - 1) * phi[i] - less
    proven = (~inside | (rate > TINY)).all(axis=0)
    weights = np.where(inside & proven, 1 / np.where(rate > TINY, rate, 1.0), 0.0)
    weights[1:] *= (1 + less * weights)[:-1].cumprod(axis=0)
    factor = np.where(proven, 1 / np.maximum(weights.sum(axis=0), TINY), 0.0)
    found[i] = total[i] + np.maximum(total[i] * factor, alone[i])
    return found


def _messages(space: _Space) -> tuple[Array, Array]:
    """Seconds of the cheapest messages over all borders between positions, there and back."""
    tables = space.tables
    first, which = space.by(space.option, space.size, space.pp)
    found = np.zeros((len(first), 2))
    known: dict[tuple[int, tuple[float, ...]], list[float]] = {}
    rows = zip(space.option[first].tolist(), space.rows[first].tolist(), space.pp[first].tolist(),
               strict=True)
    for row, (option, num_rows, p) in enumerate(rows):
        sizes = tables.least_sends(option, num_rows)
        for curve, after_stages in tables.hops(tables.options[option].degree, p, p):
            key = (id(curve), sizes)
            if key not in known:
                known[key] = [at_least(curve, size) for size in sizes]
            found[row] += [len(after_stages) * seconds for seconds in known[key]]
    return found[which, 0], found[which, 1]


def at_least(curve: Curve, num_bytes: float) -> float:
    """Seconds of a message of so many bytes or more, whatever was measured of larger ones."""
    points = getattr(curve, "points", None)  # links that are assumed have none
    if points is None:
        return curve.seconds(num_bytes)
    falling = len(points) > 1 and points[-1][1] < points[-2][1]
    larger = [y for x, y in points if x >= num_bytes]
    return 0.0 if falling else max(0.0, min([curve.seconds(num_bytes), *larger]))


def _slowest(space: _Space, work: Array) -> Array:
    """Seconds of the blocks of the position that has most of them, at least.

    It has no less than the average. And blocks are whole: let n of them have w seconds or more. If
    no position has more than t, each has place for floor(t / w) of the n, and one that also holds a
    shorter block of o seconds, or one of w + o, for floor((t-o) / w); together the positions need
    place for n. With o = (q + r) w, q whole and r a fraction, the least such t is
    w min(ceil((n+q) / p) + r, ceil((n+q+1) / p)). Any w will do; that of the most common block or
    one nearly as long makes most of it.
    """
    counts, p = space.counts, space.pp
    used = np.where(counts > 0, work, 0.0)
    usual = work[space.common, np.arange(len(p))]
    w = np.maximum(np.where(used >= NEARLY * usual, work, np.inf).min(axis=0), TINY)
    n = np.where(used >= w, counts, 0).sum(axis=0)
    other = np.where(used >= w, used - w, used) / w
    q = np.floor(other)
    places = np.minimum(np.ceil((n + q) / p) + other - q, np.ceil((n + q + 1) / p))
    return np.maximum((counts * work).sum(axis=0) / p, (w * places).max(axis=0) / ROUNDING)


def _outside(space: _Space) -> tuple[Array, Array]:
    """What comes before and after: gathering and updating at least the average share; and, where
    the first stage ends with a whole backward, the sum of its last bucket, which holds block 0."""
    over = space.tables.profile.profile.overheads
    # what ZeRO 1 and 2 do here is the same
    first, which = space.by(space.option, space.dp, space.zero - (space.zero >= 2))
    found, bucket = np.zeros(len(first)), np.zeros(len(first))
    for row, i in enumerate(first):
        c = space.found[i]
        total, p, dp, zero = space.tables.totals(c.option), c.pp, c.dp, c.zero
        found[row] = over.step_s + after(space.tables, c)(total.trained / p)
        if zero in (1, 2) and dp > 1:
            leaf = total.leaf / p
            found[row] += at_least(space.team("gather", int(i)), leaf) + leaf * over.fill_s_per_byte
        if dp > 1 and zero < 3 and (size := float(space.tables.params(c.option).trained[0])):
            op = "scatter" if zero else "sum"
            packed = total.trained if p == 1 else size  # all of it, before the last
            bucket[row] = at_least(space.team(op, int(i)), size) + packed * over.packing(op)
    whole = np.isin(space.schedule, [SCHEDULES.index("1f1b"), SCHEDULES.index("gpipe")])
    return found[which], np.where(whole, bucket[which], 0.0)


def _memory(space: _Space, capacity: float) -> tuple[Array, NDArray[np.bool_]]:
    """No cut needs less on every device; and whether all blocks find a place.

    Some position holds at least the average of what lasts and of the gradients. And of the blocks
    of the most common program, x_k of them on position k: it needs x_k r_k with r_k for what lasts,
    for the activations in flight there and for the gradients where they last too. As the x_k sum to
    the number n of such blocks, the largest x_k r_k is at least n / sum(1 / r_k); there, the
    working memory of such a block comes on top. Blocks are whole: position k has place for no more
    than floor(room / r_k) of them, and together the positions need place for n.
    """
    mean, own, grads = space.held
    own_program = space.common, np.arange(len(space.found))
    kept, working = space.costs[KEPT][own_program], space.costs[WORKING][own_program]
    count = space.counts[own_program]
    fixed = space.tables.profile.profile.overheads.fixed_bytes
    room = np.maximum(0.0, capacity - fixed - working)
    each = own + np.where(space.count > 1, grads, 0.0)
    grows = kept / space.virtual
    starts = np.cumsum(space.pp) - space.pp
    rate = TINY + np.repeat(each, space.pp) + _in_flight(space, starts) * np.repeat(grows, space.pp)
    inverse = np.add.reduceat(1 / rate, starts)
    places = np.add.reduceat(np.floor(np.repeat(room * ROUNDING, space.pp) / rate), starts)
    return fixed + np.maximum(mean / space.pp, count / inverse + working), places >= count


def _in_flight(space: _Space, starts: Ints) -> Array:
    """`in_flight` of all positions of all candidates; those of one begin at its start."""
    p, most = space.pp, space.count * space.virtual
    first = {"1f1b": p, "gpipe": most, "zero_bubble": p, "interleaved": (space.virtual + 1) * p - 1}
    fewer = {"1f1b": 1, "gpipe": 0, "zero_bubble": 0, "interleaved": 2}  # from position to position
    ahead = np.choose(space.schedule, [first[name] for name in SCHEDULES])
    less = np.array([fewer[name] for name in SCHEDULES])[space.schedule]
    k = np.arange(p.sum()) - np.repeat(starts, p)
    return np.minimum(np.repeat(most, p), np.repeat(ahead, p) - np.repeat(less, p) * k)


__all__ = ["Bounded", "Bounds", "bounds"]
