"""The fastest plan where devices differ: replicas of any shape, any cuts, any shares of the rows.

Plans of equal replicas come first, on every set of classes, so that more devices never make a plan
slower. Then come shapes, by increasing lower bound: with their shares, then with their cuts, then
with the price that the engine gives. It ends when no bound is below the best plans.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from ..errors import SearchError
from ..model import ModelGraph
from ..plan import BUCKET_BYTES, MOST_MICRO_BATCHES, Plan, ScheduleName, Stage
from ..profile import Lookup, program_key
from ..simulate import simulate
from .best import KEPT, SAFETY, Choice, Result, search
from .bounds import ROUNDING
from .lineups import Bounds
from .many import Pool, Shared, pools
from .shapes import (
    Group,
    Lineup,
    Places,
    Shape,
    Shapes,
    Sharing,
    as_unequal_plan,
    groups_of,
    placed,
)
from .space import Constraints, Option, divisors
from .tables import Array, Tables

MOST_JOINT = 4096  # cuts of all replicas together that are looked at for one sharing
FEW = 4  # devices: all their shapes are looked at
MOST_POOLS = 8  # of many devices: how many the engine prices
HALVINGS = 24  # of a bisection
STAGES = (1, 2, 4, 8)  # of a pipeline, and micro-batches, where rows are shared out
MOST_REFINED = 48  # and of how many the kinds of pipelines are worked out
MOST_TEAMS = 16  # teams of one stage that its sums are bounded by


class Family(NamedTuple):
    """All sharings of one kind among the replicas of a shape. Units are shared out: micro-batches
    of so many rows; or rows, to each of so many micro-batches."""

    shape: Shape
    places: Places
    units: int
    rows: int = 0  # of a micro-batch; 0: units are rows
    num_micro_batches: int = 0

    def sharing(self, units: Sequence[int]) -> Sharing:
        if self.rows:
            return Sharing(tuple(units), (self.rows,) * len(units))
        return Sharing((self.num_micro_batches,) * len(units), tuple(units))


class Leaf(NamedTuple):
    """A plan but for what recomputes."""

    family: Family
    sharing: Sharing
    zero: int
    schedule: ScheduleName
    cuts: tuple[int, ...]  # of each replica, by number
    walked: bool = False  # whether its bound is that of `_walked_s`


def fastest(graph: ModelGraph, options: Sequence[Option], profile: Lookup, num_rows: int,
            limits: Constraints, kept: int = KEPT) -> Result:
    """The fastest plans: of equal replicas where all devices are equal, else of any."""
    equal = len(profile.profile.cluster.classes) == 1
    return (search if equal else search_unequal)(graph, options, profile, num_rows, limits,
                                                 kept=kept)


def search_unequal(graph: ModelGraph, options: Sequence[Option], profile: Lookup, num_rows: int,
                   limits: Constraints | None = None, kept: int = KEPT) -> Result:
    """The fastest plan on devices of several classes."""
    return _Hunt(graph, options, profile, num_rows, limits or Constraints(), kept).result()


class _Hunt:
    """The state of one search."""

    def __init__(self, graph: ModelGraph, options: Sequence[Option], profile: Lookup,
                 num_rows: int, limits: Constraints, kept: int) -> None:
        self.start = time.perf_counter()
        self.graph, self.options, self.profile = graph, options, profile
        self.num_rows, self.limits, self.kept = num_rows, limits, kept
        self.cluster = profile.profile.cluster
        self.room_bytes = [(limits.memory_bytes or device.memory_bytes) / SAFETY
                           for device in self.cluster.classes]
        self.tables = Tables(options, graph, profile, limits.precision, limits.grad_dtype)
        self.bounds = Bounds(self.tables, bool(limits.recompute), self.room_bytes)
        self.best: list[tuple[float, int, Choice]] = []
        self.heap: list[tuple[float, int, Family | Leaf]] = []
        self.serial, self.many = itertools.count(), self.cluster.num_devices > FEW
        self.seen: Counter[str] = Counter()
        self.discarded: Counter[str] = Counter()
        self.nothing: SearchError | None = None
        self.gap = 0.0
        self._replica_s, self._messages = cache(self._of_replica), cache(self._of_messages)

    def result(self) -> Result:
        groups = groups_of(self.cluster, self.options, self.limits, self._measured)
        self._even()
        if not self.many:
            for shape in Shapes(self.cluster, groups, len(self.graph.blocks), self.num_rows,
                                self.limits):
                for family in self._families(shape):
                    self._push(self._least(family), family)
            self._run()
        else:
            self._many(groups)
        if not self.best:
            raise self.nothing or SearchError(
                f"no plan for {self.cluster.num_devices} devices and {self.num_rows} rows meets "
                "the constraints", where="constraints", fix="leave some of them open")
        return Result(tuple(choice for _, _, choice in self.best), self.seen["considered"],
                      dict(self.discarded), self.seen["priced"], self.gap,
                      time.perf_counter() - self.start)

    def _run(self) -> None:
        while self.heap:
            bound, _, what = heapq.heappop(self.heap)
            if bound > self._limit() * ROUNDING:
                self.discarded["time bound"] += len(self.heap) + 1
                break
            if isinstance(what, Family):
                self._expand(what)
            elif what.walked:
                self._offer(self._plan(what))
            elif (walked := max(bound, self._walked_s(what))) <= self._limit() * ROUNDING:
                heapq.heappush(self.heap, (walked, next(self.serial),
                                           what._replace(walked=True)))
            else:
                self.discarded["time bound"] += 1

    def _limit(self) -> float:
        return self.best[-1][0] if len(self.best) == self.kept else np.inf

    def _push(self, bound: float, what: Family | Leaf) -> None:
        self.seen["considered"] += 1
        if bound < np.inf:
            heapq.heappush(self.heap, (bound, next(self.serial), what))

    # --- plans of equal replicas ----------------------------------------------------------------

    def _even(self) -> None:
        """On all devices of every set of classes, each as the slowest of them. With many devices
        the engine prices only the best of each set."""
        class_of, count = self.cluster.class_of, len(self.cluster.classes)
        for size in range(1, count + 1):
            for chosen in itertools.combinations(range(count), size):
                devices = [rank for rank, k in enumerate(class_of) if k in chosen]
                try:
                    found = search(self.graph, self.options, self.profile, self.num_rows,
                                   self.limits, kept=1 if self.many else self.kept,
                                   devices=devices)
                except SearchError as error:
                    self.nothing = error
                    continue
                self.seen["considered"] += found.considered
                self.discarded.update(found.discarded)
                for choice in found.choices:
                    if size == 1 and self.profile.profile.assumed:
                        self._keep(choice)
                    else:
                        self._offer(choice.plan)

    # --- many devices ---------------------------------------------------------------------------

    def _many(self, groups: Sequence[Group]) -> None:
        """Pools by their bounds: whole pipelines of each, until no bound is below the best plan."""
        limits, rows = self.limits, self.num_rows
        pinned = [limits.recompute] if limits.recompute is not None else [False, True]
        zeros = [zero for zero in (0, 1, 2, 3) if limits.zero in (None, zero)]
        queue: list[tuple[float, int, Pool, Shared | None, bool]] = [
            (pool.ideal_s(rows // pool.rows), next(self.serial), pool, None, True)
            for pool in pools(self.tables, groups, self.room_bytes, divisors(rows), zeros, pinned)]
        heapq.heapify(queue)
        self.seen["considered"] += len(queue)
        bounds, tried, refined = [np.inf], 0, 0
        while queue and tried < MOST_POOLS and queue[0][0] < self._first_s():
            bound, number, pool, shared, rough = heapq.heappop(queue)
            if shared is not None:
                tried += 1
                self._written(shared, pool.zero)
            elif rough and refined == MOST_REFINED:
                bounds.append(bound)
            elif rough:
                refined += 1
                heapq.heappush(queue, (pool.least_s(rows // pool.rows), number, pool, None, False))
            else:
                bounds.append(pool.least_s(rows // pool.rows))
                if (shared := pool.shared(rows // pool.rows)) is not None:
                    heapq.heappush(queue, (shared.seconds, number, pool, shared, False))
        bounds += [bound for bound, _, _, shared, _ in queue if shared is None]
        leaves = sorted(((self._walked_s(leaf), next(self.serial), leaf)
                         for leaf in self._by_rows(groups)), key=lambda entry: entry[:2])
        self.seen["considered"] += len(leaves)
        for walked_s, _, leaf in leaves[:MOST_POOLS]:
            if walked_s < self._first_s():
                self._offer(self._plan(leaf))
        if self.best:
            self.gap = max(0.0, 1 - min(bounds) / self._first_s())

    def _by_rows(self, groups: Sequence[Group]) -> Iterator[Leaf]:
        """Replicas of one class each, in step, with as many rows as they can take; those of the
        lowest bounds."""
        counts, found = Counter(self.cluster.class_of), []
        by_class = [[group for group in groups if group.device == k] for k in counts]
        for stages, chosen in itertools.product(STAGES, itertools.product(*by_class)):
            if len(chosen) > 2 and len({group.degree for group in chosen}) > 1:
                continue  # of more than two classes, too many to try
            shape = tuple((group,) * stages for group in chosen
                          for _ in range(counts[group.device] // (group.degree * stages)))
            if shape and stages <= len(self.graph.blocks):
                found += [family for family in self._families(shape)
                          if family.num_micro_batches in STAGES]
        shared = ((family, self._even_out(family)) for family in found)
        bounded = [(max(self._own_s(family, r, own) for r, own in enumerate(given)), k, family,
                    given) for k, (family, given) in enumerate(shared) if given]
        for _, _, family, given in heapq.nsmallest(MOST_POOLS, bounded):
            yield from self._leaves(family, family.sharing(given))

    def _leaves(self, family: Family, sharing: Sharing) -> Iterator[Leaf]:
        """The best cut of every replica by its bound, for each ZeRO stage."""
        dp = len(family.shape)
        schedule = self._schedules(family.shape, max(sharing.number))[0]
        for zero in (z for z in (0, 1, 2, 3) if self.limits.zero in (None, z)):
            cuts = []
            for r, lineup in enumerate(family.shape):
                own, rows, count = self.bounds.of(lineup), sharing.rows[r], sharing.number[r]
                sends, backs = self._messages(lineup, family.places[r], rows)
                seconds = own.seconds(rows, count, schedule, sends, backs) + own.outside(dp, zero)
                seconds[~own.fits(dp, zero, count)] = np.inf
                cuts.append(int(seconds.argmin()) if seconds.min() < np.inf else -1)
            if min(cuts) >= 0:
                yield Leaf(family, sharing, zero, schedule, tuple(cuts))

    def _first_s(self) -> float:
        return self.best[0][0] if self.best else np.inf

    def _written(self, shared: Shared, zero: int) -> None:
        """Offer the plans of a shape whose cuts and shares are known."""
        _, shape, cuts, sharing = shared
        places = placed(shape, self.cluster)
        if places is None or (zero and len(shape) == 1):
            return
        before = self._first_s()
        for schedule in self._schedules(shape, max(sharing.number)):
            self._offer(as_unequal_plan(shape, places, cuts, sharing, self.options, self.limits,
                                        schedule, zero, BUCKET_BYTES))
            if self._first_s() == before:
                break  # the first is 1F1B, which the others beat by little

    # --- shapes and their shares ----------------------------------------------------------------

    def _measured(self, device: int, option: int) -> bool:
        """Whether all programs were measured on a class."""
        recompute = bool(self.limits.recompute)
        return all((kind, program_key(key, recompute), device) in self.profile.costs
                   for kind, key in self.tables.programs[option][0])

    def _families(self, shape: Shape) -> Iterator[Family]:
        places, dp, rows = placed(shape, self.cluster), len(shape), self.num_rows
        if places is None:
            return
        pinned = self.limits.num_micro_batches
        once = bool(self.graph.coupled or self.graph.writes)
        for total in divisors(rows):
            allowed = not (once and total > dp) and pinned in (None, total / dp)
            if dp <= total <= MOST_MICRO_BATCHES and allowed:
                yield Family(shape, places, total, rows // total)
        for count in divisors(rows) if dp > 1 else ():
            if dp * count <= rows and not (once and count > 1) and pinned in (None, count):
                yield Family(shape, places, rows // count, 0, count)

    def _least(self, family: Family) -> float:
        """A lower bound of all sharings."""
        given = self._even_out(family)
        return max(self._own_s(family, r, own) for r, own in enumerate(given)) if given else np.inf

    def _even_out(self, family: Family) -> list[int]:
        """Units of each replica, so that the slowest is as quick as can be. Empty if that is over
        the limit anyway."""
        alike: dict[Lineup, list[int]] = {}
        for r, lineup in enumerate(family.shape):
            alike.setdefault(lineup, []).append(r)

        def most(seconds: float) -> list[int]:
            found = [0] * len(family.shape)
            for replicas in alike.values():
                units = bisect.bisect_right(range(1, family.units + 1), seconds,
                                            key=partial(self._own_s, family, replicas[0]))
                for r in replicas:
                    found[r] = units
            return found

        limit = self._first_s() if self.many else self._limit()
        high = min(limit, max(self._own_s(family, own[0], family.units) for own in alike.values()))
        low = 0.0
        if sum(most(high)) < family.units or min(most(high)) < 1:
            return []
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            enough = sum(most(middle)) >= family.units and min(most(middle)) >= 1
            low, high = (low, middle) if enough else (middle, high)
        given = most(high)
        while (over := sum(given) - family.units) > 0:
            ends = [self._own_s(family, r, own) if own > 1 else 0.0 for r, own in enumerate(given)]
            for r in sorted(range(len(given)), key=lambda r: -ends[r])[:over]:
                given[r] -= 1
        return given

    def _own_s(self, family: Family, replica: int, units: int) -> float:
        """A lower bound of the step by one replica, whatever its cut, schedule and ZeRO stage."""
        rows, count = (family.rows, units) if family.rows else (
            units, family.num_micro_batches)
        return self._replica_s(family.shape[replica], family.places[replica], rows, count,
                               len(family.shape))

    def _of_replica(self, lineup: Lineup, places: tuple[tuple[int, ...], ...], rows: int,
                    count: int, dp: int) -> float:
        own, sends, backs = self.bounds.of(lineup), *self._messages(lineup, places, rows)
        columns = [own.seconds(rows, count, schedule, sends, backs)
                   for schedule in self._schedules((lineup,), count)]
        return float((np.min(columns, axis=0) + own.outside(dp, int(dp > 1))).min())

    def _schedules(self, shape: Shape, count: int) -> list[ScheduleName]:
        if max(map(len, shape)) == 1:
            return ["1f1b"]
        names: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "zero_bubble")
        return [name for name in names if self.limits.schedule in (None, name)
                and (name == "gpipe" or count > 1)]

    def _of_messages(self, lineup: Lineup, places: tuple[tuple[int, ...], ...], rows: int,
                     cut: int = -1) -> tuple[list[float], list[float]]:
        """Seconds of the messages between neighbours, there and back: of a cut, or at least."""
        sends: list[float] = []
        backs: list[float] = []
        borders = self.bounds.of(lineup).cuts[cut].tolist()
        for p, (group, here, there) in enumerate(zip(lineup, places, places[1:], strict=False)):
            curve = self.profile.curve("send", (here[0], there[0]))
            for found, sizes in zip((sends, backs), self.tables.sends(group.option, rows),
                                    strict=True):
                size = float(sizes[1:-1].min() if cut < 0 else sizes[borders[p + 1]])
                found.append((1 - curve.held) * curve.seconds(size))
        return sends, backs

    # --- from a family to plans -----------------------------------------------------------------

    def _expand(self, family: Family) -> None:
        dp = len(family.shape)
        zeros = [z for z in ((0, 1, 2, 3) if dp > 1 else (0,)) if self.limits.zero in (None, z)]
        for units in self._units(family):
            sharing = family.sharing(units)
            if len(set(zip(*sharing, strict=True))) == 1 and not family.rows:
                continue  # the same as equal micro-batches
            for zero in zeros:
                for schedule in self._schedules(family.shape, max(sharing.number)):
                    self._cut(family, sharing, zero, schedule)

    def _units(self, family: Family) -> Iterator[tuple[int, ...]]:
        """Every way to share out the units with which no replica alone is too slow. Of replicas
        that are alike the first has most."""
        caps = []
        for r in range(len(family.shape)):
            most = 0
            while most < family.units and self._own_s(family, r, most + 1) <= self._limit():
                most += 1
            caps.append(most)
        yield from _compositions(family.units, caps, family.shape)

    def _cut(self, family: Family, sharing: Sharing, zero: int, schedule: ScheduleName) -> None:
        """All cuts of all replicas that may be fast enough."""
        shape, dp, limit = family.shape, len(family.shape), self._limit() * ROUNDING
        loss_s = self._loss_s(family.places)
        each: list[list[tuple[float, int]]] = []
        for r, (lineup, places) in enumerate(zip(shape, family.places, strict=True)):
            count, rows, own = sharing.number[r], sharing.rows[r], self.bounds.of(lineup)
            sends, backs = self._messages(lineup, places, rows)
            inside = own.seconds(rows, count, schedule, sends, backs)
            summed = own.until_sums(rows, count) + self._sums_s(family, r, zero)
            seconds = np.maximum(inside, summed.max(axis=1)) + own.outside(dp, zero) + loss_s
            seconds[~own.fits(dp, zero, count)] = np.inf
            possible = np.flatnonzero(seconds <= limit).tolist()
            each.append(sorted((float(seconds[k]), k) for k in possible))
        most = int(MOST_JOINT ** (1 / dp))
        if np.prod([len(own) for own in each]) > MOST_JOINT:
            self.seen["trimmed"] += 1
            each = [own[:most] for own in each]
        for joint in itertools.product(*each):
            ordered = all((shape[r], sharing.number[r], sharing.rows[r]) != (
                shape[r - 1], sharing.number[r - 1], sharing.rows[r - 1])
                or joint[r][1] >= joint[r - 1][1] for r in range(1, dp))
            if ordered:
                self._push(max(bound for bound, _ in joint),
                           Leaf(family, sharing, zero, schedule, tuple(k for _, k in joint)))

    def _loss_s(self, places: Places) -> float:
        devices = sorted(d for replica in places for group in replica for d in group)
        return self.profile.curve("sum", devices).seconds(4.0) if len(devices) > 1 else 0.0

    def _sums_s(self, family: Family, replica: int, zero: int) -> Array:
        """Cut x stage: the least seconds of summing its gradients over the replicas."""
        sizes = self.bounds.of(family.shape[replica]).trained()
        if len(family.shape) == 1:
            return np.zeros_like(sizes)
        others = [groups for r, groups in enumerate(family.places) if r != replica]
        found = np.empty_like(sizes)
        for p, group in enumerate(family.places[replica]):
            teams = itertools.islice(itertools.product(*others), MOST_TEAMS)
            curves = {id(curve): curve for curve in (
                self.profile.curve("scatter" if zero else "sum",
                                   sorted([group[0], *(g[0] for g in team)])) for team in teams)}
            known = {size: min(curve.seconds(size) for curve in curves.values())
                     for size in set(sizes[:, p].tolist())}
            found[:, p] = [known[size] for size in sizes[:, p].tolist()]
        return found

    # --- prices ---------------------------------------------------------------------------------

    def _walked_s(self, leaf: Leaf) -> float:
        """A bound that walks through the schedule of each replica."""
        family, dp, found = leaf.family, len(leaf.cuts), 0.0
        distinct = {key: r for r, key in reversed(list(enumerate(
            zip(family.shape, leaf.cuts, *leaf.sharing, strict=True))))}
        for (lineup, k, count, rows), r in distinct.items():
            own = self.bounds.of(lineup)
            sums = self._sums_s(family, r, leaf.zero)[k].tolist()
            gathers, early = self._per_use(leaf, r)
            sends, backs = self._messages(lineup, family.places[r], rows, k)
            ends = own.ends(k, rows, count, leaf.schedule, sends, backs, gathers, early,
                            leaf.zero == 3)
            if not any(early):
                work = own.last_backward(k, rows)
                ends += [end - w + s for end, w, s in zip(ends, work, sums, strict=True)]
            found = max(found, max(ends) + float(own.outside(dp, leaf.zero)[k]))
        return found + self._loss_s(family.places)

    def _per_use(self, leaf: Leaf, replica: int) -> tuple[list[float], list[float]]:
        """Seconds per stage and micro-batch in which ZeRO gathers and sums, where the replicas are
        in step."""
        family = leaf.family
        stages = len(family.shape[replica])
        alike = len(set(zip(leaf.sharing.number, leaf.cuts, family.shape, strict=True))) == 1
        if leaf.zero < 2 or len(leaf.cuts) == 1 or not alike:
            return [0.0] * stages, [0.0] * stages
        borders = self.bounds.of(family.shape[replica]).cuts[leaf.cuts[replica]].tolist()
        gathers, sums = [], []
        for p, (group, a, b) in enumerate(zip(family.shape[replica], borders, borders[1:],
                                              strict=False)):
            team, params = sorted(g[p][0] for g in family.places), self.tables.params(group.option)
            scatter, gather = (self.profile.curve(op, team) for op in ("scatter", "gather"))
            sums.append(sum(scatter.seconds(x) for x in params.trained[a:b].tolist() if x))
            leaves = params.leaf[a:b].tolist() if leaf.zero == 3 else []
            gathers.append(sum(gather.seconds(x) for x in leaves if x))
        return gathers, sums

    def _offer(self, plan: Plan) -> None:
        """Keep a plan if it is fast enough and fits; what does not fit recomputes, if it may."""
        if any(choice.plan == plan for _, _, choice in self.best):
            return
        self.seen["priced"] += 1
        timeline = simulate(plan, self.graph, self.profile.profile, self.num_rows)
        peaks = [memory.peak_bytes for memory in timeline.memory]
        over = {rank for rank in plan.devices
                if peaks[rank] > self.room_bytes[self.cluster.class_of[rank]]}
        if over:
            again = _recomputing(plan, over) if self.limits.recompute is None else plan
            if again != plan:
                self._offer(again)
            else:
                self.discarded["memory"] += 1
            return
        self._keep(Choice(plan, timeline.step_s, max(peaks)))

    def _keep(self, choice: Choice) -> None:
        self.best.append((choice.step_s, next(self.serial), choice))
        self.best = sorted(self.best, key=lambda entry: entry[:2])[: self.kept]

    def _plan(self, leaf: Leaf) -> Plan:
        shape, places = leaf.family.shape, leaf.family.places
        cuts = [self.bounds.of(lineup).cuts[k].tolist()
                for lineup, k in zip(shape, leaf.cuts, strict=True)]
        return as_unequal_plan(shape, places, cuts, leaf.sharing, self.options, self.limits,
                               leaf.schedule, leaf.zero, self._bucket_bytes(leaf))

    def _bucket_bytes(self, leaf: Leaf) -> int:
        """As for equal replicas: small where sending leaves the core free."""
        shape = leaf.family.shape
        if len(shape) == 1 or leaf.zero >= 2:
            return BUCKET_BYTES
        team = sorted(replica[0][0] for replica in leaf.family.places)
        curve = self.profile.curve("scatter" if leaf.zero else "sum", team)
        whole = float(self.tables.params(shape[0][0].option).trained.sum())
        return self.tables.bucket_size(curve, whole / max(map(len, shape)))


def _compositions(units: int, caps: Sequence[int], shape: Shape,
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


def _recomputing(plan: Plan, ranks: set[int]) -> Plan:
    """The same with recompute on these ranks."""
    def changed(stage: Stage) -> Stage:
        return replace(stage, recompute=True) if ranks & set(stage.devices) else stage

    return replace(plan, replicas=tuple(
        replace(replica, stages=tuple(map(changed, replica.stages)))
        for replica in plan.replicas))
