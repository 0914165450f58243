"""Replay a history of nodes and links: the best plan for each state, and policies side by side.

All nodes are equal but for their factors. A plan takes the nodes that are as fast as some level, or
fewer of them, with equal shares: it runs as fast as the slowest of its nodes and links. Factors
count in steps of a tenth. (Unequal shares, which may be better where some nodes are slow, are not
looked at.)
"""

from __future__ import annotations

import itertools
import math
import time
from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from .. import progress
from ..cluster import Cluster
from ..errors import PlanError, SearchError
from ..history import History
from ..limits import Amount, Count, Fraction, Name, Seconds
from ..plan import Plan
from ..search.best import search
from ..search.reasons import Case
from ..search.replay import Course, Outcome, replayed
from ..search.space import Constraints
from ..search.tables import Array
from ..simulate.network import lookup
from ..trace import Traced
from . import offline

LEVEL = 0.1  # what factors are rounded to: downwards, but for what noise takes off
NOISE = 0.05
FEWER = (1, 2, 8, 32)  # plans are looked at for the most nodes that these divide
BYTES_PER_PARAM = 16  # Adam in mixed precision: master, two moments, leaf and gradient


class Moving(Struct, frozen=True, forbid_unknown_fields=True):
    """What a move costs, beside the bytes that travel; each figure with its source."""

    restart_s: Seconds = 35.0  # where nodes come or go: Parcae measured 28.8 to 42.9 s
    regroup_s: Seconds = 6.6  # else: a rendezvous, as Parcae measured it
    checkpoint_s: Seconds = 600.0  # between two of them: assumed; writing them is taken as free
    link_share: Fraction = 0.5  # of a link's rate that state travels at: assumed


class Replay(Struct, frozen=True, forbid_unknown_fields=True):
    """What became of each policy, the oracle last; and how much had to be planned."""

    outcomes: tuple[Outcome, ...]
    num_devices: Count
    num_segments: Count
    num_plans: Count
    seconds: Amount
    source: Name


class Level(NamedTuple):
    """The slowest link and device that a plan has to do with."""

    link: float
    speed: float


class Kept(NamedTuple):
    """A plan that was the best in some state: its nodes, and how it uses them."""

    nodes: frozenset[int]
    plan: int  # in `Planner.plans`


FULL = Level(1.0, 1.0)
State = tuple[tuple[float, float], ...]


def level(factor: float) -> float:
    return max(LEVEL, math.floor((factor + NOISE) / LEVEL + 1e-9) * LEVEL) if factor else 0.0


class Planner:
    """Best plans by number of nodes and level, and what others take there; all of it kept."""

    def __init__(self, traced: Traced, num_rows: int, cluster: Cluster,
                 limits: Constraints) -> None:
        if not cluster.equal or cluster.changes:
            raise PlanError("a history is replayed on equal nodes without changes of their own",
                            where="cluster", fix="give equal nodes, like 128x8xA100-80")
        self.traced, self.num_rows, self.cluster, self.limits = traced, num_rows, cluster, limits
        self.per_node = len(cluster.nodes[0])
        self._options = offline.assumed(traced, num_rows, cluster, limits).options
        self._cases: dict[tuple[int, Level], Case] = {}
        self._levels: dict[Level, Case] = {}
        self.plans: list[Plan] = []
        self._best: dict[tuple[int, Level], tuple[int, float] | None] = {}
        self._step_s: dict[tuple[int, Level], float] = {}

    def _exactly(self, count: int, at: Level) -> tuple[int, float] | None:
        """The fastest plan of so many nodes, if one fits."""
        if (count, at) not in self._best:
            case = self._case(count, at)
            try:
                found = search(case.graph, case.options, lookup(case.profile), self.num_rows,
                               self.limits, kept=1)
                self._best[count, at] = self._number(found.plan), found.step_s
            except SearchError:  # too little memory, or no degrees that fit
                self._best[count, at] = None
        return self._best[count, at]

    def _number(self, plan: Plan) -> int:
        if plan not in self.plans:
            self.plans.append(plan)
        return self.plans.index(plan)

    def num_nodes(self, number: int) -> int:
        return len(self.plans[number].devices) // self.per_node

    def step_s(self, number: int, at: Level) -> float:
        """What a step of a plan takes at a level."""
        if (number, at) not in self._step_s:
            case = self._case(self.num_nodes(number), at)
            pricer, borders = case.pricer(self.plans[number])
            self._step_s[number, at] = pricer.price(borders).step_s
        return self._step_s[number, at]

    def _case(self, count: int, at: Level) -> Case:
        """The search for so many nodes: with prices of this level."""
        if at not in self._levels:
            device = self.cluster.nodes[0][0]
            slowed = replace(device, speed=device.speed * at.speed)
            cluster = replace(self.cluster, nodes=((slowed,) * self.per_node,) * len(
                self.cluster.nodes)).with_network(at.link)
            profile = offline.priced(self.traced, self.num_rows, cluster, self.limits,
                                     self._options)
            self._levels[at] = Case(self.traced.graph, self._options, profile, self.num_rows,
                                    self.limits)
        if (count, at) not in self._cases:
            case = self._levels[at]
            whole = case.profile.cluster
            profile = replace(case.profile, cluster=replace(whole, nodes=whole.nodes[:count]))
            self._cases[count, at] = Case(case.graph, case.options, profile, case.num_rows,
                                          case.limits)
        return self._cases[count, at]

    def for_state(self, state: State) -> Kept | None:
        """The best plan: which nodes it leaves out, and how it uses the others."""
        levels = [Level(level(link), level(speed)) for link, speed in state]
        there = {at for at in levels if at.speed}
        able = {at: [n for n, own in enumerate(levels) if own.link >= at.link
                     and own.speed >= at.speed]
                for at in itertools.starmap(Level, itertools.product(
                    {at.link for at in there}, {at.speed for at in there}))}
        tried = {(len(own) // n * n, at) for at, own in able.items() for n in FEWER
                 if len(own) >= n}
        best: tuple[float, Level, int] | None = None
        for least_s, count, at in sorted((self._least_s(n, FULL), n, at) for n, at in tried):
            if best and least_s >= best[0]:
                break  # no other can be faster
            parts = (at._replace(link=1.0), at._replace(speed=1.0))
            if best and any(self._least_s(count, part) >= best[0] for part in parts):
                continue
            found = self._exactly(count, at)
            if found and (not best or found[1] < best[0]):
                best = found[1], at, found[0]
        return best and Kept(frozenset(able[best[1]][: self.num_nodes(best[2])]), best[2])

    def _least_s(self, count: int, at: Level) -> float:
        """The seconds of a step, which it also takes where something else is slow as well."""
        found = self._exactly(count, at)
        return found[1] if found else math.inf

    @cached_property
    def state_bytes(self) -> float:
        """Parameters, optimizer state and gradients of the whole model."""
        return float(BYTES_PER_PARAM * sum(
            math.prod(info.shape) for info in self.traced.graph.params.values()))


def replay(traced: Traced, num_rows: int, cluster: Cluster, limits: Constraints,
           history: History, moving: Moving | None = None) -> Replay:
    """Every policy on this history, on the first nodes of a cluster."""
    start = time.perf_counter()
    count, per_node = len(cluster.nodes), history.devices_per_node
    if count < history.num_nodes or len(cluster.nodes[0]) != per_node:
        raise PlanError(
            f"the history is of {history.num_nodes} nodes of {per_node} devices, the cluster has "
            f"{count} of {len(cluster.nodes[0])}", where="cluster", fix="give as many and as large")
    planner = Planner(traced, num_rows, replace(cluster, nodes=cluster.nodes[: history.num_nodes]),
                      limits)
    made, num_plans = course(planner, history, moving or Moving())
    return Replay(tuple(replayed(made)), history.num_nodes * per_node, len(made.best), num_plans,
                  time.perf_counter() - start, history.source)


def course(planner: Planner, history: History, moving: Moving) -> tuple[Course, int]:
    """What policies depend on, and how many plans were kept."""
    states = [(at_s, tuple((level(a), level(b)) for a, b in own)) for at_s, own in history.states()]
    states = [own for k, own in enumerate(states) if not k or own[1] != states[k - 1][1]]
    distinct = {state: planner.for_state(state) for _, state in progress.counted(
        "planning for what the machines are like", states)}
    kept = list(dict.fromkeys(own for own in distinct.values() if own))
    if not kept:
        raise SearchError("no plan fits at any time", where="changes", fix="add nodes or memory")
    states = list(itertools.dropwhile(lambda own: distinct[own[1]] is None, states))
    number = {own: p for p, own in enumerate(kept)}
    factors = np.array([own for _, own in states])  # segment, node, link or speed
    least = np.stack([factors[:, sorted(own.nodes)].min(axis=1) for own in kept])  # by plan
    steps = np.array([[1 / planner.step_s(own.plan, Level(*map(float, at))) if at.all() else 0.0
                       for at in column] for own, column in zip(kept, least, strict=True)])
    best = [number[own] if (own := distinct[state]) else 0 for _, state in states]
    starts = np.array([*(at_s for at_s, _ in states), history.end_s]) - states[0][0]
    fixed_s, transfer_s = _prices(planner, kept, moving)

    def price_s(k: int) -> Array:
        link = np.where(steps[:, k] > 0, least[:, k, 0], np.nan)
        found = fixed_s + transfer_s / link
        return np.where(np.isnan(found), np.inf, found)

    return Course(starts, steps, np.array(best), price_s, planner.num_rows,
                  moving.checkpoint_s), len(kept)


def _prices(planner: Planner, kept: list[Kept], moving: Moving) -> tuple[Array, Array]:
    """Plan by plan: seconds of a move, and those of its bytes at the full rate of a link. A device
    fetches all of its new state, unless the degrees stay and it has it."""
    rate = planner.cluster.across.bytes_per_s * moving.link_share
    fixed_s = np.array([[moving.regroup_s if a.nodes == b.nodes else moving.restart_s
                         for b in kept] for a in kept])
    split = [planner.plans[own.plan].degrees[:2] for own in kept]  # tensor, pipeline
    fetched = [planner.state_bytes / math.prod(own) for own in split]
    has_all = np.array([[split[i] == split[j] and b.nodes <= a.nodes for j, b in enumerate(kept)]
                        for i, a in enumerate(kept)])
    return fixed_s, np.where(has_all, 0.0, np.array(fetched) / rate)


__all__ = ["Moving", "Replay", "replay"]
