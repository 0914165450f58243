"""Many devices: pools of pipelines, and replicas in step that share out rows, in the order of their
bounds; the engine prices the first of each."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from ..plan import BUCKET_BYTES
from .common import with_common_borders
from .judging import Family, Judge, Leaf
from .least import Possible
from .pipelines import Grouping, Shared, groupings
from .shapes import Group, Sharing, as_unequal_plan, placed
from .space import divisors

MOST_PRICED = 16  # of each kind of pipelines: how many the engine prices
MOST_IN_STEP = 8  # the same of replicas that share out rows
MOST_REFINED = 48  # of how many groupings the kinds of pipelines are worked out
MOST_ALIKE = 2  # with common borders, of each grouping
STAGES = (1, 2, 4, 8)  # of a pipeline, and micro-batches, where rows are shared out


class Proposals:
    """What may be fast on many devices."""

    def __init__(self, judge: Judge, deadline: float = math.inf) -> None:
        self.judge, self.deadline = judge, deadline

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def run(self, groups: Sequence[Group]) -> None:
        judge, limits, rows = self.judge, self.judge.limits, self.judge.num_rows
        pinned = [limits.recompute] if limits.recompute is not None else judge.tables.recomputes
        # with different numbers of micro-batches, ZeRO 2 and 3 do what 1 does
        zeros = limits.zeros(min(2, rows))[:2]
        bounded = sorted((own.ideal_s(rows // own.rows), k, own) for k, own in enumerate(
            groupings(judge.tables, groups, judge.room_bytes, divisors(rows), zeros, pinned)))
        judge.seen["considered"] += len(bounded)
        self._without_stages(bounded)
        self._pipelines(bounded)
        self._in_step(groups)
        judge.left_out(Possible(judge, groups).least_s(judge.first_s()))

    def _without_stages(self, bounded: Sequence[tuple[float, int, Grouping]]) -> None:
        """The quickest replicas of a single stage, of all groupings."""
        found: list[tuple[float, int, int, Shared]] = []
        for ideal_s, k, own in bounded if self.judge.limits.pp in (None, 1) else ():
            if ideal_s >= self.judge.first_s() or self.late:
                break
            found += [(shared.seconds, k, own.zero, shared) for shared in with_common_borders(
                own, self.judge.num_rows // own.rows, 1, self.judge.first_s(), 1)]
        for seconds, _, zero, shared in sorted(found)[:MOST_PRICED]:
            if seconds < self.judge.first_s() and not self.late:
                self._written(shared, zero)

    def _pipelines(self, bounded: Sequence[tuple[float, int, Grouping]]) -> None:
        """Whole pipelines of each grouping in order, until no bound is below the best plan."""
        judge, rows = self.judge, self.judge.num_rows
        queue: list[tuple[float, int, Grouping, Shared | None, bool]] = [
            (ideal_s, k, own, None, True) for ideal_s, k, own in bounded]
        tried: set[tuple[object, ...]] = set()
        serial, refined = itertools.count(len(bounded)), 0
        while (queue and len(tried) < MOST_PRICED and queue[0][0] < judge.first_s()
               and not self.late):
            _, number, own, shared, rough = heapq.heappop(queue)
            if shared is not None:
                key = (shared.shape, tuple(shared.cuts), shared.sharing, own.zero)
                if key not in tried:
                    tried.add(key)
                    self._written(shared, own.zero)
            elif rough and refined < MOST_REFINED:
                refined += 1
                heapq.heappush(queue, (own.least_s(rows // own.rows), number, own, None, False))
            elif not rough:
                for found in self._shared(own, rows // own.rows):
                    heapq.heappush(queue, (found.seconds, next(serial), own, found, False))

    def _in_step(self, groups: Sequence[Group]) -> None:
        """Replicas that share out the rows of as many micro-batches each."""
        judge = self.judge
        leaves = sorted(((judge.walked_s(leaf), next(judge.serial), leaf)
                         for leaf in self._by_rows(groups)), key=lambda entry: entry[:2])
        judge.seen["considered"] += len(leaves)
        for walked_s, _, leaf in leaves[:MOST_IN_STEP]:
            if walked_s < judge.first_s() and not self.late:
                judge.offer(judge.plan(leaf))

    def _shared(self, own: Grouping, count: int) -> Iterator[Shared]:
        """The quickest of either kind."""
        yield from with_common_borders(own, count, MOST_ALIKE, self.judge.first_s(),
                                       self.judge.limits.pp)
        if (found := own.shared(count)) is not None:
            yield found

    def _by_rows(self, groups: Sequence[Group]) -> Iterator[Leaf]:
        """Replicas of one class each, in step, with as many rows as they can take; those of the
        lowest bounds."""
        counts, found = Counter(self.judge.cluster.class_of), []
        by_class = [[group for group in groups if group.device == k] for k in counts]
        for stages, chosen in itertools.product(STAGES, itertools.product(*by_class)):
            if self.late or (len(chosen) > 2 and len({group.degree for group in chosen}) > 1):
                continue  # of more than two classes, too many to try
            shape = tuple((group,) * stages for group in chosen
                          for _ in range(counts[group.device] // (group.degree * stages)))
            if (shape and stages <= len(self.judge.graph.blocks)
                    and self.judge.as_pinned(shape)):
                found += [family for family in self.judge.families(shape)
                          if family.num_micro_batches in STAGES]
        shared = ((family, self.judge.even_out(family)) for family in found if not self.late)
        bounded = [(max(self.judge.own_s(family, r, own) for r, own in enumerate(given)), k, family,
                    given) for k, (family, given) in enumerate(shared) if given]
        for _, _, family, given in heapq.nsmallest(MOST_IN_STEP, bounded):
            yield from self._leaves(family, family.sharing(given))

    def _leaves(self, family: Family, sharing: Sharing) -> Iterator[Leaf]:
        """The best cut of every replica by its bound, for each ZeRO stage."""
        dp = len(family.shape)
        schedule = self.judge.schedules(family.shape)[0]
        for zero in self.judge.limits.zeros(2):
            cuts = []
            for r, lineup in enumerate(family.shape):
                own, rows, count = self.judge.bounds.of(lineup), sharing.rows[r], sharing.number[r]
                sends, backs = self.judge.messages(lineup, family.places[r], rows)
                seconds = own.seconds(rows, count, schedule, sends, backs) + own.outside(dp, zero)
                seconds[~own.fits(dp, zero, count)] = np.inf
                cuts.append(int(seconds.argmin()) if seconds.min() < np.inf else -1)
            if min(cuts) >= 0:
                yield Leaf(family, sharing, zero, schedule, tuple(cuts))

    def _written(self, shared: Shared, zero: int) -> None:
        """Offer the plans of a shape whose cuts and shares are known."""
        judge, (_, shape, cuts, sharing) = self.judge, shared
        places = placed(shape, judge.cluster)
        pinned = judge.as_pinned(shape, sharing.number)
        if places is None or (zero and len(shape) == 1) or not pinned:
            return
        before = judge.first_s()
        for schedule in judge.schedules(shape):
            judge.offer(as_unequal_plan(shape, places, cuts, sharing, judge.options, judge.limits,
                                        schedule, zero, BUCKET_BYTES))
            if judge.first_s() == before:
                break  # the first is 1F1B, which the others beat by little
