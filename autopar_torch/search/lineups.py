"""One replica on groups of unequal devices: a lower bound of its seconds for each of its cuts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..plan import Recompute, ScheduleName
from ..profile import Lookup, Overheads
from ..simulate.walk import Pipeline, walk
from .memory import between
from .shapes import Group, Lineup
from .tables import Array, Ints, Least, Tables, sums_before

Bools = NDArray[np.bool_]
MOST_CUTS = 400  # so many cuts of a lineup are all looked at; of more, those nearest to balance


class Bounds:
    """What bounds of all lineups share: looked up once per group and number of rows."""

    def __init__(self, tables: Tables, recompute: Recompute, room_bytes: Sequence[float]) -> None:
        self.tables, self.recompute, self.room_bytes = tables, recompute, room_bytes
        self._blocks: dict[tuple[Group, int], Least] = {}
        self._lineups: dict[Lineup, LineupBounds] = {}

    @property
    def profile(self) -> Lookup:
        return self.tables.profile

    def of(self, lineup: Lineup) -> LineupBounds:
        if lineup not in self._lineups:
            self._lineups[lineup] = LineupBounds(self, lineup)
        return self._lineups[lineup]

    def known(self) -> Iterable[LineupBounds]:
        return self._lineups.values()

    def blocks(self, group: Group, rows: int) -> Least:
        """Sums over the blocks before each border."""
        if (group, rows) not in self._blocks:
            own = self.tables.quickest(group.option, rows, self.recompute, group.device)
            self._blocks[group, rows] = Least._make(sums_before(np.array(own)))
        return self._blocks[group, rows]


class LineupBounds:
    """Lower bounds of one lineup, for each of its cuts."""

    def __init__(self, shared: Bounds, lineup: Lineup) -> None:
        self.shared, self.lineup = shared, lineup
        self._outside: dict[int, Array] = {}

    @property
    def all_cuts(self) -> bool:
        count = len(self.shared.tables.graph.blocks)
        return math.comb(count - 1, len(self.lineup) - 1) <= MOST_CUTS

    @cached_property
    def cuts(self) -> Ints:
        """Cut x border. If there are many: around the cut in which all stages take equally long."""
        count, stages = len(self.shared.tables.graph.blocks), len(self.lineup)
        if self.all_cuts:
            inner = list(itertools.combinations(range(1, count), stages - 1))
            return np.array([(0, *borders, count) for borders in inner], dtype=np.int64)
        return self._balanced(count)

    def _balanced(self, count: int) -> Ints:
        """The cut whose slowest stage is the quickest, and its neighbours."""
        sums = [own.forward + own.backward
                for own in (self.shared.blocks(group, 1) for group in self.lineup)]
        best, cut = sums[0][1:], [np.zeros(count, dtype=np.int64)]  # by how many blocks are done
        for own in sums[1:]:
            longest = np.maximum(best[:, None], own[None, 1:] - own[1:, None])
            longest[np.tril_indices(count)] = np.inf  # a stage has a block or more
            cut.append(longest.argmin(axis=0))
            best = longest.min(axis=0)
        borders, end = [count], count - 1
        for choices in reversed(cut[1:]):
            end = int(choices[end])
            borders.append(end + 1)
        found = [(0, *reversed(borders))]
        for place in range(1, len(self.lineup)):
            for step in (-1, 1):
                other = list(found[0])
                other[place] += step
                if other[place - 1] < other[place] < other[place + 1]:
                    found.append(tuple(other))
        return np.array(found, dtype=np.int64)

    def seconds(self, rows: int, count: int, schedule: ScheduleName, sends: Sequence[float],
                backs: Sequence[float]) -> Array:
        """Per cut: from the first forward to the last backward, for so many micro-batches of so
        many rows. `sends` and `backs`: seconds of a message after each stage but the last."""
        f, w, i = self._per_stage(rows)
        p, m, there, back = len(self.lineup), count, sum(sends), sum(backs)
        if p == 1:
            return m * (f + w)[:, 0]
        behind = i.sum(axis=1, keepdims=True) - i.cumsum(axis=1)
        ahead = np.minimum(m, p - np.arange(p))
        begun = f.sum(axis=1) + there
        if schedule == "gpipe":
            late = behind + m * w + i.cumsum(axis=1) - i
            return begun + back + (m - 1) * f.max(axis=1) + late.max(axis=1)
        left = behind + m * (f + w) - ahead * f
        if schedule == "zero_bubble":
            return begun + left.max(axis=1)
        return begun + back + (left - w + i.cumsum(axis=1)).max(axis=1)

    def ends(self, cut: int, rows: int, count: int, schedule: ScheduleName,
             sends: Sequence[float], backs: Sequence[float], gathers: Sequence[float],
             sums: Sequence[float], last_too: bool) -> list[float]:
        """When every stage of a cut ends if replicas wait for nobody. Per stage, with ZeRO 2 or 3:
        seconds in which it gathers before each action, and sums after each micro-batch."""
        borders, columns = self.cuts[cut].tolist(), []
        for p, (group, a, b) in enumerate(zip(self.lineup, borders, borders[1:], strict=False)):
            own = self.shared.tables.blocks(group.option, rows, self.shared.recompute, group.device)
            forward, whole, early, late, added = (float(part[a:b].sum()) for part in (
                own.forward, own.backward, own.input, own.weight, np.minimum(own.added, 0.0)))
            if schedule == "1f1b" and self.shared.recompute is True:  # see `Plan.whole`
                early, late = whole, 0.0
            whole, early, late = whole + added + gathers[p], early + gathers[p], late + added
            last = sums[p] if last_too else 0.0
            columns.append((forward + self._before_forward[p] + gathers[p], whole + sums[p], early,
                            late + sums[p], whole + sums[p], late + sums[p], whole + last,
                            late + last))
        work = [tuple(max(0.0, x) for x in row) for row in zip(*columns, strict=True)]
        pipe = Pipeline._make([*work, (*sends, 0.0), (0.0, *backs)])
        return walk(schedule, tuple(range(len(columns))), pipe, count)

    def last_backward(self, cut: int, rows: int) -> list[float]:
        """Per stage: the seconds of its backward of one micro-batch."""
        borders = self.cuts[cut].tolist()
        return [float(sums[b] - sums[a]) for sums, a, b in zip(
            (self.shared.blocks(group, rows).backward for group in self.lineup), borders,
            borders[1:], strict=False)]

    def until_sums(self, rows: int, count: int) -> Array:
        """Cut x stage: the least seconds before its last backward, when its sums can begin."""
        f, w, _ = self._per_stage(rows)
        return f.cumsum(axis=1) + (count - 1) * (f + w)

    def _per_stage(self, rows: int) -> Least:
        """Each of them: cut x stage."""
        own = [self.shared.blocks(group, rows) for group in self.lineup]
        f, w, i = (self._between([sums[k] for sums in own]) for k in range(3))
        return Least(f + self._before_forward, w, i)

    @cached_property
    def _before_forward(self) -> Array:
        own = [self.over(group) for group in self.lineup]
        return np.array([over.action_s + over.micro_batch_s for over in own])

    def over(self, group: Group) -> Overheads:
        return self.shared.profile.overheads(group.device)

    def _by_stage(self, values: Sequence[Array]) -> Array:
        """Cut x stage: the sum of something over the blocks of each stage, by its group."""
        return self._between([sums_before(own) for own in values])

    def _between(self, sums: Sequence[Array]) -> Array:
        """Cut x stage: by the sums over the blocks before each border, one per stage."""
        return np.stack([own[self.cuts[:, p + 1]] - own[self.cuts[:, p]]
                         for p, own in enumerate(sums)], axis=1)

    def outside(self, dp: int, zero: int) -> Array:
        """Per cut: taking the batch, and the longest update."""
        parts = dp if zero else 1
        if parts not in self._outside:
            self._outside[parts] = self._taking_and_update(parts)
        return self._outside[parts]

    def _taking_and_update(self, parts: int) -> Array:
        params = [self.shared.tables.params(group.option) for group in self.lineup]
        update = self._by_stage([
            own.trained * self.over(group).update_s_per_byte / parts
            + own.number * self.over(group).update_s_per_tensor
            for group, own in zip(self.lineup, params, strict=True)])
        return update.max(axis=1) + min(self.over(group).step_s for group in self.lineup)

    def trained(self) -> Array:
        """Cut x stage: bytes of gradients on one device."""
        return self._by_stage([self.shared.tables.params(group.option).trained
                               for group in self.lineup])

    def fits(self, dp: int, zero: int, count: int) -> Bools:
        """Per cut: whether parameters, optimizer and gradients so far leave some room."""
        columns = [between(self.shared.tables, group.option, zero, dp, count > 1)
                   for group in self.lineup]
        room = np.array([self.shared.room_bytes[group.device] - self.over(group).fixed_bytes
                         for group in self.lineup])
        fitting: Bools = np.all(self._by_stage(columns) <= room, axis=1)
        return fitting
