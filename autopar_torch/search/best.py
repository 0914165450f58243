"""Best-first search: candidates by increasing lower bound, until no bound can beat the best."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Annotated, NamedTuple, cast

import numpy as np
from msgspec import Meta, Struct

from ..errors import SearchError
from ..limits import Amount, Index, Seconds
from ..model import ModelGraph
from ..plan import Plan
from ..profile import Lookup
from .borders import FreeCuts, cuts, even
from .bounds import ROUNDING, Bounded
from .cut_bounds import lower_bounds
from .evaluate import Found, Pricer
from .out_of_memory import nothing_fits
from .space import SAFETY, Candidate, Candidates, Constraints, Option, as_plan, candidates
from .tables import Array, Tables

KEPT = 8  # plans, the best among them
FIRST = 512  # candidates whose memory is bounded first; then twice as many each time
MOST_OFF = 1.4  # degrees predicted so much slower than the fastest are tried last
NEAR = 16  # candidates that are looked at for the nearest miss


class Choice(Struct, frozen=True, forbid_unknown_fields=True):
    """One plan of the result."""

    plan: Plan
    step_s: Seconds
    memory_bytes: Amount


def varied(choices: Sequence[Choice], count: int) -> list[Choice]:
    """The first `count` choices, reordered: the best plan of each (tp, pp, dp) comes before any
    second one of the same degrees, as an error in measuring is one of all plans of these degrees.
    Degrees whose best plan is far behind are not moved ahead.
    """
    heads: dict[tuple[int, int, int], Choice] = {}
    for choice in choices:
        if choice.step_s <= MOST_OFF * choices[0].step_s:
            heads.setdefault(choice.plan.degrees, choice)
    first = list(heads.values())
    return [*first, *(c for c in choices if c not in first)][:count]


class Result(Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest plan, the next ones, and how many candidates each rule discarded."""

    choices: Annotated[tuple[Choice, ...], Meta(min_length=1)]  # the fastest first
    considered: Index
    discarded: dict[str, Index]  # rule -> candidates
    priced: Index  # candidates with borders
    # 0: proven; else how much faster a plan could be that was not looked at.
    gap: Annotated[float, Meta(ge=0.0, le=1.0)]
    seconds: Seconds
    measured: tuple[Seconds, ...] = ()  # real steps of the first plans, if they were confirmed
    num_devices: Index = 0  # that there are: what a plan does not name idles

    @property
    def best(self) -> Choice:
        return self.choices[0]

    @property
    def others(self) -> tuple[Choice, ...]:
        return self.choices[1:]

    @property
    def plan(self) -> Plan:
        return self.best.plan

    @property
    def step_s(self) -> float:
        return self.best.step_s

    @property
    def memory_bytes(self) -> float:
        return self.best.memory_bytes

    @property
    def how_exact(self) -> str:
        rules = ", ".join(f"{n} by {rule}" for rule, n in self.discarded.items())
        proof = "proven fastest" if not self.gap else f"stopped early, gap at most {self.gap:.1%}"
        if not all(sharding.is_proven for sharding in self.plan.shardings):
            proof += ", with a sharding that need not be the cheapest"
        return (f"{proof}: of {self.considered} candidates dropped {rules or 'none'}; "
                f"{self.priced} cuts into stages priced")


def search(graph: ModelGraph, options: Sequence[Option], profile: Lookup, num_rows: int,
           limits: Constraints | None = None, *, exhaustive: bool = False,
           time_limit_s: float = 0.0, kept: int = KEPT,
           devices: Sequence[int] | None = None, most_step_s: float = np.inf) -> Result:
    """The fastest plan of equal replicas that fits; with `exhaustive` by looking at every one.
    It uses all devices, or all of those that are given, and no step of it takes more than so long.
    """
    start, limits = time.perf_counter(), limits or Constraints()
    cluster = profile.profile.cluster
    tables = Tables(options, graph, profile, limits.precision, limits.grad_dtype, devices)
    num_devices = len(tables.devices)
    found = candidates(options, graph, num_devices, num_rows, limits, tables.recomputes)
    if not found:
        raise SearchError(
            f"no plan for {num_devices} devices and {num_rows} rows meets the constraints"
            + limits.unmet(num_devices, num_rows, len(graph.blocks)),
            where="constraints", fix="leave tp, pp, dp, zero, schedule or num_micro_batches open, "
            "or give more rows",
        )
    capacity_bytes = limits.capacity_bytes(cluster, devices)
    hunt = _Hunt(tables, found, num_rows, capacity_bytes / SAFETY, kept, most_step_s, exhaustive)
    hunt.run(exhaustive, start + time_limit_s if time_limit_s else None)
    if not hunt.best and most_step_s < np.inf:
        raise SearchError(f"no step takes {most_step_s:.3g} s or less", where="most_step_s",
                          fix="allow more")
    if not hunt.best:
        raise nothing_fits(tables, hunt.near(), num_rows, capacity_bytes, limits)
    choices = tuple(
        Choice(as_plan(f.candidate, f.borders, options, limits.precision,
                       bucket_bytes=tables.bucket_bytes(f.candidate),
                       grad_dtype=limits.grad_dtype, devices=devices),
               f.step_s, f.memory_bytes)
        for f in hunt.best
    )
    return Result(choices, len(found), dict(hunt.discarded), hunt.priced, hunt.gap,
                  time.perf_counter() - start, num_devices=cluster.num_devices)


class _Cuts(NamedTuple):
    """A candidate that waits to be priced: its cuts and their bounds."""

    pricer: Pricer
    cuts: list[tuple[int, ...]]
    lower_bounds: Array


class _Queue:
    """Candidates that may fit into memory, by increasing bound of time."""

    def __init__(self, bounded: Bounded, step: int) -> None:
        self.bounded, self.step = bounded, step
        self.order = np.argsort(bounded.seconds, kind="stable")
        self.known = self.killed = 0  # looked at; of these, dropped by the memory bound
        self.heap: list[tuple[float, int]] = []

    def push(self, bound: float, i: int) -> None:
        heapq.heappush(self.heap, (bound, i))

    def pop(self) -> tuple[float, int] | None:
        """The least bound and its candidate; None at the end."""
        while self.known < len(self.order) and (
            not self.heap or self.heap[0][0] >= self.bounded.seconds[self.order[self.known]]
        ):
            chosen = self.order[self.known : self.known + self.step]
            possible = self.bounded.possible(chosen)
            self.known += len(chosen)
            self.killed += len(chosen) - len(possible)
            self.heap += zip(self.bounded.seconds[possible].tolist(), possible.tolist(),
                             strict=True)
            heapq.heapify(self.heap)
            self.step *= 2
        return heapq.heappop(self.heap) if self.heap else None


class _Hunt:
    """The state of one search."""

    def __init__(self, tables: Tables, found: Candidates, num_rows: int, capacity_bytes: float,
                 kept: int, most_step_s: float, exhaustive: bool) -> None:
        self.tables, self.found, self.num_rows = tables, found, num_rows
        self.capacity_bytes, self.kept, self.most_step_s = capacity_bytes, kept, most_step_s
        self.bounded = Bounded(found, tables, num_rows, np.inf if exhaustive else capacity_bytes)
        self.best: list[Found] = []
        self.nearest: Found | None = None  # the candidate that comes nearest to fitting
        self.discarded: Counter[str] = Counter()
        self.priced = 0
        self.gap = 0.0

    def run(self, exhaustive: bool, deadline: float | None) -> None:
        """Candidates come back to the queue with the bound of their cuts before they are priced."""
        open_ = len(self.found)
        queue = _Queue(self.bounded, len(self.found) if exhaustive else FIRST)
        ready: dict[int, _Cuts] = {}
        while (following := queue.pop()) is not None:
            bound, i = following
            if not exhaustive and bound > self._limit() * ROUNDING:
                self.discarded["time bound"] += open_ - queue.killed
                break
            if deadline is not None and time.perf_counter() > deadline and self.best:
                self.gap = max(0.0, 1 - bound / self.best[0].step_s)
                break
            if i in ready:
                self._price(ready.pop(i), exhaustive)
                open_ -= 1
            elif (prepared := self._prepare(self.found[i])) is not None:
                ready[i] = prepared
                queue.push(max(bound, float(prepared.lower_bounds.min())), i)
            else:
                open_ -= 1
        if not exhaustive:
            self.discarded["memory bound"] += queue.killed

    def _limit(self) -> float:
        """The seconds below which a candidate is kept."""
        found = self.best[-1].step_s if len(self.best) == self.kept else np.inf
        return min(self.most_step_s, found)

    def _prepare(self, candidate: Candidate) -> _Cuts | None:
        """The cuts of a candidate, with their bounds."""
        pricer = Pricer(self.tables, candidate, self.num_rows)

        @cache
        def fits(stage: int, first: int, end: int) -> bool:
            return pricer.memory.peak(stage % candidate.pp, [(first, end)]) <= self.capacity_bytes

        def free() -> FreeCuts:
            return self.tables.free_cuts(pricer.work_key, *work, pricer.once)

        work = pricer.seconds, candidate.stages()
        tried = list(cuts(*work, fits, free))
        if tried:
            return _Cuts(pricer, tried, lower_bounds(pricer, tried))
        self.discarded["no cut fits"] += 1
        return None

    def _price(self, prepared: _Cuts, exhaustive: bool) -> None:
        """Price the cuts of a candidate, and keep the best that fits."""
        best, misses = None, 0
        for i in np.argsort(prepared.lower_bounds, kind="stable"):
            limit = self._limit() if best is None else min(self._limit(), best.step_s)
            if not exhaustive and prepared.lower_bounds[i] > limit * ROUNDING:
                break
            found = self._fitting(prepared.pricer, prepared.cuts[i])
            if found is None:
                misses += 1
            elif best is None or found.order < best.order:
                best = found
        if best is not None:
            self.best = sorted([*self.best, best], key=lambda f: f.order)[: self.kept]
        elif misses == len(prepared.cuts):
            self.discarded["memory"] += 1

    def _fitting(self, pricer: Pricer, cut: tuple[int, ...]) -> Found | None:
        """The price of a cut, None if it does not fit."""
        memory = pricer.peak(cut)
        if memory > self.capacity_bytes:
            self._miss(Found(float("inf"), memory, pricer.candidate, cut))
            return None
        self.priced += 1
        return pricer.price(cut, memory)

    def near(self) -> Found:
        """The candidate nearest to fitting, of those looked at and those of the least bounds."""
        order = np.argsort(self.bounded.memory_bytes, kind="stable")
        for i in order[:NEAR]:
            pricer = Pricer(self.tables, self.found[i], self.num_rows)
            cut = even(pricer.seconds, self.found[i].stages())
            self._miss(Found(float("inf"), pricer.peak(cut), self.found[i], cut))
        return cast(Found, self.nearest)

    def _miss(self, found: Found) -> None:
        if self.nearest is None or found.memory_bytes < self.nearest.memory_bytes:
            self.nearest = found
