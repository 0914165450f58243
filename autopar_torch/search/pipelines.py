"""Many unequal devices: which pipelines they make, and how many of each.

A pipeline is a multiset of groups of one size. A dynamic program finds its best order and cut; a
knapsack finds how many of each kind of pipeline do most micro-batches in a given time, and
bisection the least time in which all are done. Messages and the stages' order in time are left out:
what it finds is about what plans take, which the engine prices.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..plan import Recompute
from .memory import between
from .shapes import Group, Lineup, Lineups, Sharing
from .tables import Array, Tables, sums_before

MOST_KINDS = 600  # multisets of groups that are looked at
STEPS = 14  # of a bisection
MOST_OFF = 1e3  # what takes so many times the bound is not possible
TINY = 1e-12


class PipelineKind(NamedTuple):
    """One kind of pipeline: its groups and cut, seconds of its slowest stage and of all stages.

    Whatever the schedule and cut, the first micro-batch takes `chain_s` to come back to the first
    stage, and each later one the part `ahead` of the slowest stage, or waits `filling_s` in all.
    """

    lineup: Lineup
    cut: tuple[int, ...]
    slowest_s: float
    all_s: float
    filling_s: float
    chain_s: float
    ahead: float
    late_s: float  # about: of the sums with other pipelines, what no backward hides

    def micro_batches(self, seconds: float) -> int:
        """How many it has done by then in 1F1B, its gradients summed."""
        return max(0, int((seconds - self.late_s - self.all_s) / self.slowest_s + 1.0 + TINY))


class Shared(NamedTuple):
    """Pipelines that share a batch, and about how long they take."""

    seconds: float
    shape: Lineups
    cuts: list[tuple[int, ...]]
    sharing: Sharing


class Grouping:
    """Groups of each class, micro-batches of so many rows, a ZeRO stage."""

    def __init__(self, tables: Tables, groups: Sequence[Group], num_groups: Sequence[int],
                 room_bytes: Sequence[float], rows: int, zero: int,
                 recomputes: Sequence[Recompute], first: Collection[Group],
                 stages: dict[tuple[Group, int, int, int], Array]) -> None:
        self.tables, self.groups, self.num_groups = tables, groups, list(num_groups)
        self.room_bytes, self.rows, self.zero, self.recomputes = room_bytes, rows, zero, recomputes
        self.num_blocks = len(tables.graph.blocks)
        self.first, self._stages = first, stages  # of each class; of all groupings
        self._least: dict[int, float] = {}
        self._of_groups: dict[frozenset[Group], tuple[float, float, float]] = {}

    def speaks_for(self, chosen: Sequence[int]) -> bool:
        """Of all groupings that are alike in these classes, one is the first in all others."""
        return all(c in chosen or group in self.first for c, group in enumerate(self.groups))

    def ideal_s(self, count: int) -> float:
        """All groups are busy all the time; and no micro-batch is there and back sooner than on
        the quickest groups."""
        works = [self._work(group) for group in self.groups]
        speed = sum(n / float(w[2].sum()) for n, w in zip(self.num_groups, works, strict=True))
        return max(count / speed, float(np.min([w[1] for w in works], axis=0).sum()))

    # --- kinds of pipelines ---------------------------------------------------------------------

    @cached_property
    def kinds(self) -> list[PipelineKind]:
        """The best order and cut of every multiset of groups, from the last stage on."""
        end = self.num_blocks
        start = np.full(end + 1, np.inf)
        start[end] = 0.0
        empty = (0,) * len(self.groups)
        known: dict[tuple[int, ...], tuple[Array, Array, Array, Array]] = {}
        level = {empty: (start, np.where(start, 0.0, 0.0))}
        found: list[PipelineKind] = []
        for depth in range(self._most_stages):
            following: dict[tuple[int, ...], tuple[Array, Array]] = {}
            for used in self._longer(level):
                options = [(c, level[less]) for c, less in self._shorter(used) if less in level]
                made = [in_front(self.stage(c, depth), *ahead) for c, ahead in options]
                pick = np.argmin([own[0] for own in made], axis=0)
                columns = [np.choose(pick, [own[k] for own in made]) for k in range(3)]
                known[used] = (*columns, np.array([c for c, _ in options])[pick])
                following[used] = columns[0], columns[1]
                if columns[0][0] < np.inf:
                    found.append(self._kind(used, known))
            level = following
        return found

    @cached_property
    def _most_stages(self) -> int:
        most, classes = 1, len(self.groups)
        while most < min(self.num_blocks, sum(self.num_groups)) and (
                math.comb(most + 1 + classes, classes) <= MOST_KINDS):
            most += 1
        return most

    def _longer(self, level: dict[tuple[int, ...], tuple[Array, Array]]) -> list[tuple[int, ...]]:
        found = {(*used[:c], used[c] + 1, *used[c + 1 :]) for used in level
                 for c in range(len(self.groups)) if used[c] < self.num_groups[c]}
        return sorted(used for used in found  # of one degree
                      if len({g.degree for g, n in zip(self.groups, used, strict=True) if n}) == 1)

    def _shorter(self, used: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
        for c, n in enumerate(used):
            if n:
                yield c, (*used[:c], n - 1, *used[c + 1 :])

    def _kind(self, used: tuple[int, ...],
              known: dict[tuple[int, ...], tuple[Array, Array, Array, Array]]) -> PipelineKind:
        slowest, total = float(known[used][0][0]), float(known[used][1][0])
        lineup, cut, at = [], [0], 0
        while any(used):
            _, _, ends, classes = known[used]
            c, at = int(classes[at]), int(ends[at])
            lineup.append(self.groups[c])
            cut.append(at)
            used = (*used[:c], used[c] - 1, *used[c + 1 :])
        forward, back, ahead = self._quickest(frozenset(lineup))
        return PipelineKind(tuple(lineup), tuple(cut), slowest, total, max(slowest, forward),
                    max(slowest * ahead, back), max(ahead, TINY), 0.0)

    def _quickest(self, groups: frozenset[Group]) -> tuple[float, float, float]:
        """Of all blocks, each on the group that suits it: forward, what the stage before waits for,
        and the least part of all work that this is."""
        if groups not in self._of_groups:
            works = [self._work(group) for group in groups]
            forward, back = (float(np.min([w[k] for w in works], axis=0).sum()) for k in (0, 1))
            ahead = min(float((w[1] / np.maximum(w[2], TINY)).min()) for w in works)
            self._of_groups[groups] = forward, back, ahead
        return self._of_groups[groups]

    def late_s(self, some: Sequence[PipelineKind]) -> list[float]:
        """About: what gathers and sums of the largest stage add to each, if they share a batch.
        ZeRO gathers parameters first; the last micro-batch's backward hides sums."""
        steps = {c: own.lineup.count(group) * group.degree
                 for own in some for c, group in enumerate(self.groups) if group in own.lineup}
        team = sorted(rank for c, step in steps.items() for rank in self._ranks[c][::step])
        if len(team) < 2:
            return [0.0] * len(some)
        gather, summed = (self.tables.profile.curve(op, team).seconds
                          for op in ("gather", "scatter" if self.zero else "sum"))
        found = []
        for own in some:
            of = [self.groups.index(group) for group in own.lineup]
            trained, leaf = (max(sums[c][b] - sums[c][a] for c, (a, b) in zip(
                of, pairwise(own.cut), strict=True)) for sums in self._sizes)
            first_s = gather(leaf) if self.zero else 0.0
            found.append(first_s + max(0.0, summed(trained) - own.slowest_s))
        return found

    @cached_property
    def _ranks(self) -> list[list[int]]:
        """Of every class of the groups."""
        class_of = self.tables.cluster.class_of
        return [[r for r, k in enumerate(class_of) if k == g.device] for g in self.groups]

    @cached_property
    def _sizes(self) -> list[list[list[float]]]:
        """Of every group: bytes of gradients on a device before each border; and of leaves."""
        params = [self.tables.params(group.option) for group in self.groups]
        return [[sums_before(own).tolist() for own in column]
                for column in ([p.trained for p in params], [p.leaf for p in params])]

    def whole_s(self, number: int) -> float:
        """Seconds of a micro-batch for the whole model on one group of a class."""
        return float(self._work(self.groups[number])[2].sum())

    def _work(self, group: Group) -> tuple[Array, Array, Array]:
        """Per block: its forward; with what the stage before waits for; with all its backward."""
        own = self.tables.quickest(group.option, self.rows, self.recomputes[0], group.device)
        return own.forward, own.forward + own.input, own.forward + own.backward

    def stage(self, number: int, from_end: int) -> Array:
        """First block x end: seconds of a micro-batch, infinite where it does not fit."""
        group = self.groups[number]
        key = group, self.rows, self.zero, from_end
        if key not in self._stages:
            best = np.full((self.num_blocks + 1,) * 2, np.inf)
            for recompute in self.recomputes:
                seconds, size = self._spans(group, from_end, recompute)
                best = np.minimum(best, np.where(size <= self.room_bytes[group.device], seconds,
                                                 np.inf))
            best[np.tril_indices(self.num_blocks + 1)] = np.inf
            self._stages[key] = best
        return self._stages[key]

    def _spans(self, group: Group, from_end: int, recompute: Recompute) -> tuple[Array, Array]:
        """First block x end: seconds and bytes of a stage so far from the last one."""
        tables = self.tables
        own = tables.blocks(group.option, self.rows, recompute, group.device)
        over = tables.profile.overheads(group.device)
        zero = min(self.zero, 1)  # what 2 and 3 save besides, they do not where numbers differ
        dp = max(1, tables.cluster.num_devices // (from_end + 1)) if zero else 1
        held = between(tables, group.option, zero, dp)
        came = tables.sends(group.option, self.rows)[0]
        least = tables.quickest(group.option, self.rows, recompute, group.device)
        work = least.forward + least.backward
        seconds, size = (sums[None, :] - sums[:, None] for sums in map(
            sums_before, (work, held + (from_end + 1) * own.kept)))
        more = over.fixed_bytes + float(own.working.max()) + (from_end + 1) * came
        return seconds + over.action_s + over.micro_batch_s, size + more[:, None]

    # --- how many of each -----------------------------------------------------------------------

    def least_s(self, count: int) -> float:
        """About the least time for so many micro-batches, parts of pipelines included."""
        if count not in self._least:
            low = self.ideal_s(count)
            self._least[count] = bisected(lambda s: self._most(s) >= count, low) if (
                self.kinds) else float("inf")
        return self._least[count]

    def _most(self, seconds: float) -> float:
        """No schedule has done more micro-batches by then."""
        slowest, filling, chain, ahead = self._columns
        busy, back = (seconds - filling) / slowest, (seconds - chain) / (ahead * slowest)
        values = np.maximum(0.0, np.minimum(busy, back) + 1.0)
        return float(values @ knapsack(values, self._uses, np.array(self.num_groups, float)))

    @cached_property
    def _columns(self) -> Array:
        return np.array([(k.slowest_s, k.filling_s, k.chain_s, k.ahead) for k in self.kinds]).T

    @cached_property
    def _uses(self) -> Array:
        """Class x kind: how many groups it takes."""
        counts = [Counter(kind.lineup) for kind in self.kinds]
        return np.array([[own[group] for own in counts] for group in self.groups], dtype=float)

    def shared(self, count: int) -> Shared | None:
        """Whole pipelines and their micro-batches: those that the bound would take, rounded down,
        then others for the groups that are left."""
        seconds = self.least_s(count)
        if seconds == np.inf:
            return None
        later = bisected(lambda s: max(k.micro_batches(s) for k in self.kinds) > 0, seconds)
        chosen = self._whole(np.array([float(k.micro_batches(later)) for k in self.kinds]))
        if not any(chosen):
            return None
        some = [(kind, n) for kind, n in zip(self.kinds, chosen, strict=True) if n]
        done = bisected(lambda s: sum(n * kind.micro_batches(s) for kind, n in some) >= count,
                         seconds)
        found = shared_out(some, done, count, self.rows)
        if len(found.shape) > 1:
            done += max(self.late_s([kind for kind, _ in some]))
        return found._replace(seconds=done)

    def _whole(self, values: Array) -> list[int]:
        free = np.array(self.num_groups, float)
        chosen = np.floor(knapsack(values, self._uses, free) + 1e-6)
        free -= self._uses @ chosen
        for k in np.argsort(-values / np.maximum(self._uses.sum(axis=0), 1.0), kind="stable"):
            column = self._uses[:, k]
            if values[k] >= 1.0:
                more = np.floor(np.min(free[column > 0] / column[column > 0]))
                chosen[k] += more
                free -= more * column
        return [int(n) for n in chosen]


def in_front(stage: Array, slowest: Array, total: Array) -> tuple[Array, Array, Array]:
    """With one more stage in front: per first block, its slowest stage, all of them, its end."""
    longest = np.maximum(stage, slowest[None, :])
    sums = stage + total[None, :]
    ends = np.argmin(np.where(np.isfinite(longest), longest + TINY * sums, np.inf), axis=1)
    rows = np.arange(len(stage))
    return longest[rows, ends], np.where(np.isfinite(longest[rows, ends]), sums[rows, ends],
                                         np.inf), ends


def shared_out(some: Sequence[tuple[PipelineKind, int]], seconds: float, count: int,
               rows: int) -> Shared:
    """So many micro-batches, in the numbers that so many pipelines of each kind do by then."""
    lines = [kind for kind, n in some for _ in range(n)]
    numbers = _trimmed([kind.micro_batches(seconds) for kind in lines], lines, count)
    kept = [(kind, n) for kind, n in zip(lines, numbers, strict=True) if n]
    return Shared(seconds, tuple(kind.lineup for kind, _ in kept), [kind.cut for kind, _ in kept],
                  Sharing(tuple(n for _, n in kept), (rows,) * len(kept)))


def _trimmed(numbers: list[int], lines: Sequence[PipelineKind], count: int) -> list[int]:
    """So many micro-batches in all: those that come last are left out."""
    while (over := sum(numbers) - count) > 0:
        ends = [kind.all_s + (n - 1) * kind.slowest_s if n else -1.0
                for kind, n in zip(lines, numbers, strict=True)]
        latest = sorted(range(len(lines)), key=lambda i: -ends[i])[: max(1, over // len(lines))]
        for i in latest:
            numbers[i] -= 1
    return numbers


def bisected(enough: Callable[[float], bool], low: float) -> float:
    """The least seconds that are enough, from a lower bound on."""
    high = low
    while not enough(high):
        high *= 1.5
        if high > MOST_OFF * low:
            return float("inf")
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def knapsack(values: Array, uses: Array, have: Array) -> Array:
    """How much of each kind is worth most, in parts too."""
    basis, inverse = _best_basis(values, uses, have)
    found = np.zeros(sum(uses.shape))
    found[basis] = inverse @ have
    return np.maximum(found[: len(values)], 0.0)


def knapsack_prices(values: Array, uses: Array, have: Array) -> Array:
    """What one more of each class would be worth; no kind is worth more than what it uses."""
    basis, inverse = _best_basis(values, uses, have)
    prices: Array = np.append(values, np.zeros(len(have)))[basis] @ inverse
    return prices


def _best_basis(values: Array, uses: Array, have: Array) -> tuple[list[int], Array]:
    """Of a linear program with one row per class, by the simplex method."""
    rows, count = uses.shape
    table = np.hstack([uses, np.eye(rows)])
    worth = np.concatenate([values, np.zeros(rows)])
    basis = list(range(count, count + rows))
    for _ in range(50 * rows):
        inverse = np.linalg.inv(table[:, basis])
        gain = worth - worth[basis] @ inverse @ table
        enter = int(np.argmax(gain))
        if gain[enter] <= 1e-9:
            break
        column, level = inverse @ table[:, enter], inverse @ have
        ratio = np.where(column > 1e-9, level / np.maximum(column, 1e-9), np.inf)
        basis[int(np.argmin(ratio))] = enter
    return basis, np.linalg.inv(table[:, basis])


def groupings(tables: Tables, groups: Sequence[Group], room_bytes: Sequence[float],
          row_counts: Sequence[int], zeros: Sequence[int],
          recomputes: Sequence[Recompute]) -> Iterator[Grouping]:
    """One tensor degree per class, for every number of rows and ZeRO stage."""
    cluster = tables.cluster
    by_node = Counter(zip(cluster.node_of, cluster.class_of, strict=True))
    by_class = [own for k in range(len(cluster.classes))
                if (own := [g for g in groups if g.device == k])]
    first = {own[0] for own in by_class}
    stages: dict[tuple[Group, int, int, int], Array] = {}
    for chosen in itertools.product(*by_class):
        counts = [sum(n // g.degree for (_, k), n in by_node.items() if k == g.device)
                  for g in chosen]
        for rows, zero in itertools.product(row_counts, zeros):
            yield Grouping(tables, chosen, counts, room_bytes, rows, zero, recomputes, first,
                           stages)
