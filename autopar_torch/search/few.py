"""Few devices: every shape, sharing, cut, schedule and ZeRO stage is bounded, the best are priced.

Families of plans come back to the queue as plans, plans with the bound of a walk through their
schedules; it ends when no bound is below the plans that are kept.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ..plan import ScheduleName
from .bounds import ROUNDING
from .judging import Family, Judge, Leaf
from .shapes import Group, Lineups, Shapes, Sharing

MOST_JOINT = 4096  # cuts of all replicas together that are looked at for one sharing


class Enumeration:
    """A queue of families and plans."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.heap: list[tuple[float, int, Family | Leaf]] = []

    def run(self, groups: Sequence[Group]) -> None:
        judge = self.judge
        for shape in Shapes(judge.cluster, groups, len(judge.graph.blocks), judge.num_rows,
                            judge.limits):
            for family in judge.families(shape):
                self._push(self._least(family), family)
        if not all(own.all_cuts for own in judge.bounds.known()):
            judge.left_out(judge.ideal_s(groups))
        self._empty()

    def _empty(self) -> None:
        while self.heap:
            bound, _, what = heapq.heappop(self.heap)
            if bound > self.judge.limit() * ROUNDING:
                self.judge.discarded["time bound"] += len(self.heap) + 1
                break
            if isinstance(what, Family):
                self._expand(what)
            elif what.walked:
                self.judge.offer(self.judge.plan(what))
            elif (walked := max(bound, self.judge.walked_s(what))) <= self.judge.limit() * ROUNDING:
                heapq.heappush(self.heap, (walked, next(self.judge.serial),
                                           what._replace(walked=True)))
            else:
                self.judge.discarded["time bound"] += 1

    def _push(self, bound: float, what: Family | Leaf) -> None:
        self.judge.seen["considered"] += 1
        if bound < np.inf:
            heapq.heappush(self.heap, (bound, next(self.judge.serial), what))

    def _least(self, family: Family) -> float:
        """A lower bound of all sharings."""
        given = self.judge.even_out(family)
        ends = [self.judge.own_s(family, r, own) for r, own in enumerate(given)]
        return max(ends, default=np.inf)

    def _expand(self, family: Family) -> None:
        zeros = self.judge.limits.zeros(len(family.shape))
        for units in self._units(family):
            sharing = family.sharing(units)
            if len(set(zip(*sharing, strict=True))) == 1 and not family.rows:
                continue  # the same as equal micro-batches
            for zero in zeros:
                for schedule in self.judge.schedules(family.shape):
                    self._cut(family, sharing, zero, schedule)

    def _units(self, family: Family) -> Iterator[tuple[int, ...]]:
        """Every way to share out the units with which no replica alone is too slow. Of replicas
        that are alike the first has most."""
        limit, caps = self.judge.limit(), []
        for r in range(len(family.shape)):
            most = 0
            while most < family.units and self.judge.own_s(family, r, most + 1) <= limit:
                most += 1
            caps.append(most)
        yield from _compositions(family.units, caps, family.shape)

    def _cut(self, family: Family, sharing: Sharing, zero: int, schedule: ScheduleName) -> None:
        """All cuts of all replicas that may be fast enough."""
        shape, dp, limit = family.shape, len(family.shape), self.judge.limit() * ROUNDING
        loss_s = self.judge.loss_s(family.places)
        each: list[list[tuple[float, int]]] = []
        for r, (lineup, places) in enumerate(zip(shape, family.places, strict=True)):
            count, rows, own = sharing.number[r], sharing.rows[r], self.judge.bounds.of(lineup)
            sends, backs = self.judge.messages(lineup, places, rows)
            inside = own.seconds(rows, count, schedule, sends, backs)
            summed = own.until_sums(rows, count) + self.judge.sums_s(family, r, zero)
            seconds = np.maximum(inside, summed.max(axis=1)) + own.outside(dp, zero) + loss_s
            seconds[~own.fits(dp, zero, count)] = np.inf
            possible = np.flatnonzero(seconds <= limit).tolist()
            each.append(sorted((float(seconds[k]), k) for k in possible))
        most = int(MOST_JOINT ** (1 / dp))
        if np.prod([len(own) for own in each]) > MOST_JOINT:
            self.judge.left_out(min(own[most][0] for own in each if len(own) > most))
            each = [own[:most] for own in each]
        for joint in itertools.product(*each):
            ordered = all((shape[r], sharing.number[r], sharing.rows[r]) != (
                shape[r - 1], sharing.number[r - 1], sharing.rows[r - 1])
                or joint[r][1] >= joint[r - 1][1] for r in range(1, dp))
            if ordered:
                self._push(max(bound for bound, _ in joint),
                           Leaf(family, sharing, zero, schedule, tuple(k for _, k in joint)))


def _compositions(units: int, caps: Sequence[int], shape: Lineups,
                  before: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    r = len(before)
    if r == len(caps) - 1:
        alike = r > 0 and shape[r] == shape[r - 1]
        if 1 <= units <= min(caps[r], before[-1] if alike else units):
            yield (*before, units)
        return
    rest = sum(caps[r + 1 :])
    most = min(caps[r], units - (len(caps) - 1 - r))
    if r and shape[r] == shape[r - 1]:
        most = min(most, before[-1])
    for own in range(most, max(1, units - rest) - 1, -1):
        yield from _compositions(units - own, caps, shape, (*before, own))
