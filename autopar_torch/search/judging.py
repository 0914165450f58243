"""What a plan of unequal replicas costs: bounds of it, and its price by the engine."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from ..errors import SearchError
from ..model import ModelGraph
from ..plan import BUCKET_BYTES, MOST_MICRO_BATCHES, Plan, Recompute, ScheduleName, Stage
from ..profile import Lookup, program_key
from ..simulate import simulate
from .best import Choice, search
from .lineups import Bounds
from .shapes import Group, Lineup, Lineups, Placement, Sharing, as_unequal_plan, placed
from .space import SAFETY, Constraints, Option, divisors
from .tables import Array, Tables

HALVINGS = 24  # of a bisection
MOST_TEAMS = 16  # teams of one stage that its sums are bounded by


class Family(NamedTuple):
    """All sharings of one kind among the replicas of a shape. Units are shared out: micro-batches
    of so many rows; or rows, to each of so many micro-batches."""

    shape: Lineups
    places: Placement
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


class Judge:
    """All that a search has found so far, and what it is found by."""

    def __init__(self, graph: ModelGraph, options: Sequence[Option], profile: Lookup,
                 num_rows: int, limits: Constraints, kept: int, many: bool) -> None:
        self.graph, self.options, self.profile = graph, options, profile
        self.num_rows, self.limits, self.kept, self.many = num_rows, limits, kept, many
        self.cluster = profile.profile.cluster
        self.room_bytes = [(limits.memory_bytes or device.memory_bytes) / SAFETY
                           for device in self.cluster.classes]
        self.tables = Tables(options, graph, profile, limits.precision, limits.grad_dtype)
        self.bounds = Bounds(self.tables, limits.recompute or False, self.room_bytes)
        self.best: list[tuple[float, int, Choice]] = []
        self.serial = itertools.count()
        self.seen: Counter[str] = Counter()
        self.discarded: Counter[str] = Counter()
        self.nothing: SearchError | None = None
        self.left_out_s = np.inf  # no plan that was not looked at is faster
        self._replica_s, self.messages = cache(self._of_replica), cache(self._of_messages)

    def limit(self) -> float:
        return self.best[-1][0] if len(self.best) == self.kept else np.inf

    def first_s(self) -> float:
        return self.best[0][0] if self.best else np.inf

    def left_out(self, bound_s: float) -> None:
        self.left_out_s = min(self.left_out_s, bound_s)

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.left_out_s / self.first_s())

    def ideal_s(self, groups: Sequence[Group]) -> float:
        """No plan is faster: all devices compute all the time, each block with the rows and in the
        group that suit it; then everyone gets the loss.

        A device's seconds are priced by how quick its class is. A block costs no less than on the
        class where it is cheapest, and all devices together have so much to pay with per second.
        """
        least: dict[int, Array] = {}  # per class and block: seconds of a device for a row
        for group, rows in itertools.product(groups, self.row_counts):
            own = self.bounds.blocks(group, rows)
            seconds = np.diff(own.forward + own.backward) * group.degree / rows
            least[group.device] = np.minimum(least.get(group.device, np.inf), seconds)
        numbers, whole = Counter(self.cluster.class_of), {k: own.sum() for k, own in least.items()}
        price = np.min([least[k] / whole[k] for k in least], axis=0).sum()
        speed = sum(numbers[k] / whole[k] for k in least)
        return float(self.num_rows * price / speed) + self.everyone_s

    @cached_property
    def everyone_s(self) -> float:
        """Until everyone has the loss, also who idles."""
        return self.loss_s(((tuple(range(self.cluster.num_devices)),),))

    @cached_property
    def row_counts(self) -> list[int]:
        """Rows of a micro-batch among which some take least seconds each: what blocks take lies on
        lines between those that were measured."""
        measured = {piece.rows for cell in self.profile.profile.cells for piece in cell.pieces}
        return sorted({*divisors(self.num_rows), *(n for n in measured if n < self.num_rows)})

    def even(self) -> None:
        """Equal replicas on all devices of every set of classes, each as the slowest of them; of
        many devices, also on fewer nodes of a class: what has few rows cannot use all."""
        of_class = [[rank for rank, k in enumerate(self.cluster.class_of) if k == own]
                    for own in range(len(self.cluster.classes))]
        for size in range(1, len(of_class) + 1):
            for chosen in itertools.combinations(of_class, size):
                self._even_on(sorted(itertools.chain(*chosen)))
        for ranks in of_class if self.many else ():
            for some in self._fewer(ranks):
                self._even_on(some, self.first_s())

    def _fewer(self, ranks: Sequence[int]) -> Iterator[list[int]]:
        """Those on a half of the nodes, on a quarter, and so on; and on three of four of these."""
        nodes = [[*own] for _, own in itertools.groupby(ranks, self.cluster.node_of.__getitem__)]
        numbers = {part >> i for part in (len(nodes), len(nodes) * 3 // 4)
                   for i in range(len(nodes).bit_length())}
        for number in sorted(numbers - {0, len(nodes)}, reverse=True):
            yield [*itertools.chain(*nodes[:number])]

    def _even_on(self, devices: Sequence[int], most_step_s: float = np.inf) -> None:
        """On these devices. With many the engine prices only the best."""
        classes = {self.cluster.class_of[rank] for rank in devices}
        options = [option for i, option in enumerate(self.options)
                   if all(self.measured(k, i) for k in classes)]
        try:
            found = search(self.graph, options, self.profile, self.num_rows, self.limits,
                           kept=1 if self.many else self.kept, devices=devices,
                           most_step_s=most_step_s)
        except SearchError as error:
            self.nothing = self.nothing or error if error.where == "constraints" else error
            return
        self.seen["considered"] += found.considered
        self.discarded.update(found.discarded)
        for choice in found.choices:
            if len(classes) == 1 and self.many and self.profile.profile.assumed:
                self._keep(choice)
            else:
                self.offer(choice.plan)

    def measured(self, device: int, option: int) -> bool:
        """Whether all programs were measured on a class."""
        recompute = self.limits.recompute or False
        return all((kind, program_key(key, recompute), device) in self.profile.costs
                   for kind, key in self.tables.programs[option][0])

    def as_pinned(self, shape: Lineups, numbers: Sequence[int] = ()) -> bool:
        """Whether a shape and the numbers of its micro-batches are what the user pins, if any."""
        limits = self.limits
        return (limits.dp in (None, len(shape))
                and all(limits.pp in (None, len(lineup)) for lineup in shape)
                and all(limits.num_micro_batches in (None, number) for number in numbers))

    def families(self, shape: Lineups) -> Iterator[Family]:
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

    def even_out(self, family: Family) -> list[int]:
        """Units of each replica, so that the slowest is as quick as can be. Empty if that is over
        the limit anyway."""
        alike: dict[Lineup, list[int]] = {}
        for r, lineup in enumerate(family.shape):
            alike.setdefault(lineup, []).append(r)

        def most(seconds: float) -> list[int]:
            found = [0] * len(family.shape)
            for replicas in alike.values():
                units = bisect.bisect_right(range(1, family.units + 1), seconds,
                                            key=partial(self.own_s, family, replicas[0]))
                for r in replicas:
                    found[r] = units
            return found

        limit = self.first_s() if self.many else self.limit()
        high = min(limit, max(self.own_s(family, own[0], family.units) for own in alike.values()))
        low = 0.0
        if sum(most(high)) < family.units or min(most(high)) < 1:
            return []
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            enough = sum(most(middle)) >= family.units and min(most(middle)) >= 1
            low, high = (low, middle) if enough else (middle, high)
        given = most(high)
        while (over := sum(given) - family.units) > 0:
            ends = [self.own_s(family, r, own) if own > 1 else 0.0 for r, own in enumerate(given)]
            for r in sorted(range(len(given)), key=lambda r: -ends[r])[:over]:
                given[r] -= 1
        return given

    def own_s(self, family: Family, replica: int, units: int) -> float:
        """A lower bound of the step by one replica, whatever its cut, schedule and ZeRO stage."""
        rows, count = (family.rows, units) if family.rows else (
            units, family.num_micro_batches)
        return self._replica_s(family.shape[replica], family.places[replica], rows, count,
                               len(family.shape))

    def _of_replica(self, lineup: Lineup, places: tuple[tuple[int, ...], ...], rows: int,
                    count: int, dp: int) -> float:
        own, sends, backs = self.bounds.of(lineup), *self.messages(lineup, places, rows)
        columns = [own.seconds(rows, count, schedule, sends, backs)
                   for schedule in self.schedules((lineup,))]
        return float((np.min(columns, axis=0) + own.outside(dp, int(dp > 1))).min())

    def schedules(self, shape: Lineups) -> list[ScheduleName]:
        if max(map(len, shape)) == 1:
            return ["1f1b"]
        if self.limits.schedule is not None:
            return [self.limits.schedule]
        return ["1f1b", "gpipe", "zero_bubble"]

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

    def loss_s(self, places: Placement) -> float:
        devices = sorted(d for replica in places for group in replica for d in group)
        return self.profile.curve("sum", devices).seconds(4.0) if len(devices) > 1 else 0.0

    def sums_s(self, family: Family, replica: int, zero: int) -> Array:
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

    def walked_s(self, leaf: Leaf) -> float:
        """A bound that walks through the schedule of each replica."""
        family, dp, found = leaf.family, len(leaf.cuts), 0.0
        distinct = {key: r for r, key in reversed(list(enumerate(
            zip(family.shape, leaf.cuts, *leaf.sharing, strict=True))))}
        for (lineup, k, count, rows), r in distinct.items():
            own = self.bounds.of(lineup)
            sums = self.sums_s(family, r, leaf.zero)[k].tolist()
            gathers, early = self._per_use(leaf, r)
            sends, backs = self.messages(lineup, family.places[r], rows, k)
            ends = own.ends(k, rows, count, leaf.schedule, sends, backs, gathers, early,
                            leaf.zero == 3)
            if not any(early):
                work = own.last_backward(k, rows)
                ends += [end - w + s for end, w, s in zip(ends, work, sums, strict=True)]
            found = max(found, max(ends) + float(own.outside(dp, leaf.zero)[k]))
        return found + self.loss_s(family.places)

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

    def offer(self, plan: Plan) -> None:
        """Keep a plan if it is fast enough and fits; what does not fit recomputes, if it may."""
        if any(choice.plan == plan for _, _, choice in self.best):
            return
        self.seen["priced"] += 1
        room = [self.room_bytes[k] for k in self.cluster.class_of]
        timeline = simulate(plan, self.graph, self.profile, self.num_rows, room_bytes=room)
        peaks = [memory.peak_bytes for memory in timeline.memory]
        over = {rank for rank in plan.devices if peaks[rank] > room[rank]}
        if over:
            again = plan if self.limits.recompute is not None else _recomputing(
                plan, over, self.tables.recomputes)
            if again != plan:
                self.offer(again)
            else:
                self.discarded["memory"] += 1
            return
        self._keep(Choice(plan, timeline.step_s, max(peaks)))

    def _keep(self, choice: Choice) -> None:
        self.best.append((choice.step_s, next(self.serial), choice))
        self.best = sorted(self.best, key=lambda entry: entry[:2])[: self.kept]

    def plan(self, leaf: Leaf) -> Plan:
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


def _recomputing(plan: Plan, ranks: set[int], choices: Sequence[Recompute]) -> Plan:
    """The same, where these ranks recompute more."""
    more = dict(itertools.pairwise(choices))

    def changed(stage: Stage) -> Stage:
        again = more.get(stage.recompute, True) if ranks & set(stage.devices) else stage.recompute
        return replace(stage, recompute=again)

    return replace(plan, replicas=tuple(
        replace(replica, stages=tuple(map(changed, replica.stages)))
        for replica in plan.replicas))
