"""The least seconds in which many devices can do a batch, whatever the plan.

A stage of a pipeline begins when the first micro-batch has passed those before it. So with m
micro-batches of r rows, in each of which a part `phi` or more of all work is forward, the stages do
no more by T than T * sum(v_p * (1 - phi / m) ** p) rows: v_p rows a second if stage p held all
blocks, the quickest stage first. (It is the optimum of a linear program over the seconds of the
stages.) Each class of devices gets a price in rows at which no pipeline does more than what its
devices cost; then all of them do no more than they cost together.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .borders import Once, ramped
from .judging import Judge
from .pipelines import knapsack_prices
from .shapes import Group, Placement
from .tables import Array, Least, sums_before

MOST_ROWS = 32  # of a micro-batch: up to so many, each number is looked at
FEW_STAGES = 4  # up to so many, all pipelines are looked at one by one
HALVINGS = 10  # of a bisection
TINY = 1e-12  # instead of a division by zero
WORTH = (1.0, 1.03, 1.06, 1.1, 1.2, 1.4, 2.0, 3.0)  # of a row, tried in turn


class Sized(NamedTuple):
    """Micro-batches of so many rows."""

    rows: int
    speeds: Array  # of each group: rows a second, if it held all blocks
    whole_s: Array  # of each group: a micro-batch, as the only stage
    phi: float  # the least part of a block's work that is forward
    once_s: float  # at least, until the first of them is done


class Possible:
    """Bounds for the groups that a search may use."""

    def __init__(self, judge: Judge, groups: Sequence[Group]) -> None:
        self.judge, self.groups = judge, groups
        self.num_blocks = len(judge.graph.blocks)
        numbers, self.classes = Counter(judge.cluster.class_of), sorted({g.device for g in groups})
        self.have = np.array([float(numbers[k]) for k in self.classes])
        self.uses = np.array([[group.degree * (group.device == k) for group in groups]
                              for k in self.classes], dtype=float)
        self.few = [np.array(list(itertools.combinations_with_replacement(range(len(groups)), n)))
                    for n in range(2, min(FEW_STAGES, self.num_blocks) + 1)]
        self.few_uses = np.hstack([self.uses] + [self.uses[:, own].sum(axis=2) for own in self.few])

    def least_s(self, high: float) -> float:
        """No plan takes less. It is looked for up to where a plan is known."""
        low = self.judge.ideal_s(self.groups)
        for _ in range(HALVINGS if high < np.inf else 0):
            middle = (low + high) / 2
            if self.most_rows(middle - self.judge.everyone_s) < self.judge.num_rows:
                low = middle
            else:
                high = middle
        return low

    def most_rows(self, seconds: float) -> float:
        """No plan does more by then."""
        sizes = [sized for sized in self._sizes if sized.once_s <= seconds]
        if self._more_rows_s <= seconds or not sizes:
            return np.inf if sizes else 0.0
        values = np.max([self._few(sized, seconds) for sized in sizes], axis=0)
        prices = np.maximum(knapsack_prices(values, self.few_uses, self.have), TINY)
        prices = prices * max(1.0, (values / (prices @ self.few_uses)).max())
        for sized in sizes:
            while not self._covered(sized, seconds, prices):
                prices = prices * 1.005
        return float(prices @ self.have)

    def _few(self, sized: Sized, seconds: float) -> Array:
        """Rows of each group alone, and of each short pipeline."""
        found = [sized.rows * np.floor(seconds / sized.whole_s)]
        for own in self.few:
            speeds = -np.sort(-sized.speeds[own], axis=1)
            count = np.floor(seconds * speeds.sum(axis=1) / sized.rows)
            for _ in range(own.shape[1]):  # each of them takes off less than one micro-batch
                late = (1 - sized.phi / np.maximum(count, 1.0))[:, None] ** np.arange(own.shape[1])
                over = count * sized.rows > seconds * (speeds * late).sum(axis=1) * (1 + 1e-9)
                count = np.maximum(count - over, 0.0)
            found.append(sized.rows * count)
        return np.concatenate(found)

    def _covered(self, sized: Sized, seconds: float, prices: Array) -> bool:
        """Whether no longer pipeline does more than it costs: for some worth of a row, its stages
        cost less than they are worth by no more than that worth is above one."""
        costs, cut = prices @ self.uses, FEW_STAGES + 1
        most = int(seconds * self.num_blocks * sized.speeds.max() / sized.rows)
        for fewer, count in itertools.pairwise(_steps(most) if self.num_blocks >= cut else []):
            late = (1 - sized.phi / count) ** np.arange(self.num_blocks)
            rows = seconds * sized.speeds[:, None] * late
            for worth in WORTH:
                left = (costs[:, None] - worth * rows).min(axis=0)
                over = (worth - 1) * (fewer + 1) * sized.rows
                if over + left[:cut].sum() + np.minimum(left[cut:], 0.0).sum() >= -1e-9:
                    break
            else:
                return False
        return True

    @cached_property
    def _sizes(self) -> list[Sized]:
        counts = range(1, min(MOST_ROWS, self.judge.num_rows) + 1)
        blocks = [self._blocks(rows) for rows in counts]
        work = np.array([[own.forward + own.backward for own in row] for row in blocks])
        parts = (work / work.sum(axis=2, keepdims=True)).min(axis=(0, 1))
        parts = parts / parts.sum()  # of each block, in all the work
        found = []
        for rows, row, own in zip(counts, blocks, np.maximum(work, TINY), strict=True):
            speeds = (rows * parts / own).max(axis=1)
            phi = min(1.0, float((np.array([least.forward for least in row]) / own).min()))
            alone_s = self._alone_s(rows, own)
            found.append(Sized(rows, speeds, alone_s, phi, self._once_s(rows, row, alone_s.min())))
        return found

    def _once_s(self, rows: int, blocks: Sequence[Least], alone_s: float) -> float:
        """A single micro-batch, and the update: on one group, or on the best number of stages, each
        block where it is quickest. Each stage but the last sends over the network, or has a block
        on a group that is slower, but leaves a neighbour room."""
        update_s = self._update_s(self.judge.num_rows - rows + 1)  # others may have a row each
        found = alone_s + update_s
        if self.num_blocks == 1:
            return found
        parts = ([own.forward for own in blocks], [own.input for own in blocks])
        once = Once(np.min(parts[1], axis=0),
                    np.min([own.backward - own.input for own in blocks], axis=0))
        chain_s = float(np.min(parts[0], axis=0).sum() + once.input.sum())
        sends = np.array([self._sends_s(group, rows) for group in self.groups])
        send_s, back_s = (sums_before(np.sort((own[:, None] + part - np.min(part, axis=0)).min(
            axis=0))) for own, part in zip(sends.T, parts, strict=True))
        for last in range(1, self.num_blocks):
            begun_s = chain_s + send_s[last] + back_s[last]
            if begun_s >= found:
                break
            late_s, _ = ramped(once, last + 1, (back_s[last] - back_s[last::-1]).tolist())
            found = min(found, begun_s + late_s + update_s / (last + 1))
        return found

    def _update_s(self, dp: int) -> float:
        """Of all blocks, by no more replicas than these."""
        dp = min(dp, self.judge.cluster.num_devices)
        params = {group: self.judge.tables.params(group.option) for group in self.groups}
        overs = {group: self.judge.tables.profile.overheads(group.device) for group in self.groups}
        return float(np.min([own.trained * overs[group].update_s_per_byte / dp
                             + own.number * overs[group].update_s_per_tensor
                             for group, own in params.items()], axis=0).sum())

    def _sends_s(self, group: Group, rows: int) -> tuple[float, float]:
        """The least of a message to the next stage and back, wherever that is."""
        found = [self.judge.messages((group, group), places, rows) for places in self._lines[group]]
        ahead, back = (min((own[k][0] for own in found), default=0.0) for k in (0, 1))
        return ahead, back

    @cached_property
    def _lines(self) -> dict[Group, Placement]:
        """Of each group: the places of a pair on each distinct line to a neighbour. Nodes of a
        class are in one zone, so the first speaks for all."""
        cluster, found = self.judge.cluster, dict[Group, Placement]()
        for group in self.groups:
            first = cluster.class_of.index(group.device)
            node, near = cluster.node_of[first], first + group.degree
            others = [start for other, start in enumerate(cluster.start_of) if other != node]
            if near < cluster.num_devices and cluster.node_of[near] == node:
                others.append(near)
            distinct = {id(self.judge.profile.curve("send", (first, other))): other
                        for other in others}
            found[group] = tuple(((first,), (other,)) for other in distinct.values())
        return found

    @cached_property
    def _more_rows_s(self) -> float:
        """The same of any micro-batch that is larger."""
        more = [rows for rows in self.judge.row_counts if rows > MOST_ROWS]
        return _chain_s([own for rows in [MOST_ROWS, *more] for own in self._blocks(rows)]
                        ) if more else np.inf

    def _blocks(self, rows: int) -> list[Least]:
        return [self.judge.tables.quickest(group.option, rows, self.judge.bounds.recompute,
                                           group.device) for group in self.groups]

    def _alone_s(self, rows: int, work: Array) -> Array:
        """Where activations find no room, they are computed again, or not at all."""
        judge, tables, found = self.judge, self.judge.tables, work.sum(axis=1)
        for k, (device, option, _) in enumerate(self.groups):
            kept = tables.blocks(option, rows, judge.bounds.recompute, device).kept.sum()
            if kept + tables.profile.overheads(device).fixed_bytes > judge.room_bytes[device]:
                found[k] = np.inf
                if judge.limits.recompute is None:
                    again = [tables.quickest(option, rows, recompute, device)
                             for recompute in tables.recomputes[1:]]
                    found[k] = min((own.forward + own.backward).sum() for own in again)
        return found


def _chain_s(blocks: Sequence[Least]) -> float:
    """Each block forward, and what the stage before waits for, where it is quickest."""
    return float(np.min([own.forward + own.input for own in blocks], axis=0).sum())


def _steps(most: int) -> list[int]:
    """From none to most, ever further apart."""
    found = [0]
    while found[-1] < most:
        found.append(min(most, found[-1] + 1 + found[-1] // 8))
    return found
