"""Policies side by side on one history: which plan is in use when, and what that is worth.

Time is cut into segments in which nothing changes. A plan that lacks a node makes no steps, so
every policy must leave it, for the plan that is the best then. While moving nothing is trained.
What was trained since the last checkpoint is lost with a node of the plan in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..limits import Amount, Index, Name
from ..policy import Other, Regret
from .tables import Array

SLOW, DEAD_BAND = 1.2, 0.3  # of the threshold: times the best, and so much more after a move
ALIKE = 1e-9


class Outcome(Struct, frozen=True, forbid_unknown_fields=True):
    """What became of a run under one policy."""

    policy: Name
    samples: Amount
    share: float  # of the samples if every move were free
    moves: Index
    downtime_s: float  # moving, or waiting for nodes
    lost_s: float  # training that was done in vain


class Course(NamedTuple):
    """All that policies depend on. Segments are counted by k, plans by p or q."""

    starts_s: Array  # of the segments, and the end of the last
    steps_per_s: Array  # [p, k], 0 where a plan cannot run
    best: NDArray[np.int64]  # [k]: the plan that is the fastest of all
    price_s: Callable[[int], Array]  # of a segment: [p, q], inf where a plan cannot be moved to
    num_rows: int  # of a step
    checkpoint_s: float

    def steps(self) -> Array:
        """[p, k]: steps until the start of a segment, if a plan were always in use."""
        own = self.steps_per_s * np.diff(self.starts_s)
        return np.concatenate([np.zeros((len(own), 1)), own.cumsum(axis=1)], axis=1)

    def fastest(self) -> Array:
        """[k]: steps per second of the best plan."""
        return self.steps_per_s[self.best, np.arange(len(self.best))]


Rule = Callable[["_Run", int], tuple[int | None, float]]  # a plan to move to, until when to go on


class _Run:
    """A run under a policy, from the best plan of the first segment on."""

    def __init__(self, course: Course, rule: Rule) -> None:
        self.course, self.rule = course, rule
        self.now_s, self.plan, self.since_s = 0.0, int(course.best[0]), 0.0
        self.steps = self.downtime_s = self.lost_s = 0.0
        self.moves = 0
        self.regret, self.has_moved = Regret(), False

    def outcome(self, name: str, free: float) -> Outcome:
        course, k = self.course, 0
        while k < len(course.best):
            k = self._segment(k)
        return _told(name, self.steps * course.num_rows, free, self.moves, self.downtime_s,
                     self.lost_s)

    def _segment(self, k: int) -> int:
        """Up to the end of a segment, or a move; the segment that follows."""
        course, end_s = self.course, float(self.course.starts_s[k + 1])
        speed = course.steps_per_s[self.plan]
        if speed[k] == 0 and k and speed[k - 1] > 0 and self.now_s == course.starts_s[k]:
            self._lose(float(speed[k - 1]))
        while self.now_s < end_s:
            new, until_s = self.rule(self, k) if speed[k] else (int(course.best[k]), end_s)
            if not course.fastest()[k]:  # there is nothing to move to
                new = None
            if new is not None and new != self.plan:
                self._move(k, new)
                return int(np.searchsorted(course.starts_s, self.now_s, side="right")) - 1
            until_s = min(until_s, end_s)
            self.steps += speed[k] * (until_s - self.now_s)
            self.downtime_s += (until_s - self.now_s) * (speed[k] == 0)
            self.now_s = until_s
        return k + 1

    def _move(self, k: int, new: int) -> None:
        price_s = float(self.course.price_s(k)[self.plan, new])
        self.regret = self.regret.moved(str(self.plan), str(new), price_s)
        end_s = min(self.now_s + price_s, float(self.course.starts_s[-1]))
        self.downtime_s += end_s - self.now_s
        self.now_s = self.since_s = end_s
        self.plan, self.moves, self.has_moved = new, self.moves + 1, True

    def _lose(self, steps_per_s: float) -> None:
        """A node of the plan in use was lost: what came after the last checkpoint is gone."""
        done_s = self.now_s - max(self.since_s, self.now_s - self.now_s % self.course.checkpoint_s)
        self.lost_s += done_s
        self.steps = max(0.0, self.steps - steps_per_s * done_s)


# --- policies -------------------------------------------------------------------------------------


def stay(run: _Run, k: int) -> tuple[int | None, float]:
    """Move only where the plan in use cannot run."""
    return None, np.inf


def at_once(run: _Run, k: int) -> tuple[int | None, float]:
    """Always be in the best plan."""
    best = int(run.course.best[k])
    own, fastest = run.course.steps_per_s[[run.plan, best], k]
    return (best if fastest > own * (1 + ALIKE) else None), np.inf


def threshold(run: _Run, k: int) -> tuple[int | None, float]:
    """Move where steps are so many times as long; once moved, only where they are even longer,
    until the plan in use was the best again."""
    best = int(run.course.best[k])
    own, fastest = run.course.steps_per_s[[run.plan, best], k]
    run.has_moved = run.has_moved and fastest > own * (1 + ALIKE)
    slow = fastest / own >= SLOW + DEAD_BAND * run.has_moved
    return (best if slow else None), np.inf


def regret(run: _Run, k: int) -> tuple[int | None, float]:
    """Move to a plan when the regret of not being in it is its price (policy.py). What is seen is
    seconds, of which a plan loses a part: none if it is the best, all if it cannot run."""
    course = run.course
    prices, lost = course.price_s(k)[run.plan], 1 - course.steps_per_s[:, k] / course.fastest()[k]
    known = {int(q) for q in course.best[: k + 1]} - {run.plan}
    others = {str(q): Other(float(lost[q]), float(prices[q])) for q in known
              if np.isfinite(prices[q])}
    own = float(lost[run.plan])
    run.regret = run.regret.seen(own, others, 0.0)  # new plans, and prices of now
    new = run.regret.chosen(own, others)
    if new is not None:
        return int(new), run.now_s
    end_s = float(course.starts_s[k + 1])
    until_s = min(end_s, run.now_s + run.regret.steps_left(own, others) * (1 + ALIKE) + ALIKE)
    run.regret = run.regret.seen(own, others, until_s - run.now_s)
    return None, until_s


POLICIES: dict[str, Rule] = {"stay": stay, "at once": at_once, "threshold": threshold,
                             "regret": regret}


def replayed(course: Course) -> list[Outcome]:
    """Every policy, and the best that moves could have done."""
    free = float((course.fastest() * np.diff(course.starts_s)).sum()) * course.num_rows
    found = [_Run(course, rule).outcome(name, free) for name, rule in POLICIES.items()]
    return [*found, oracle(course, free)]


def oracle(course: Course, free: float) -> Outcome:
    """The most samples that any moves at starts of segments give, all changes being known: so
    nothing is lost, as a checkpoint is made in time. A dynamic program over segments and plans."""
    starts, steps, (plans, count) = course.starts_s, course.steps(), course.steps_per_s.shape
    value = np.full((count + 1, plans), -np.inf)
    value[0, course.best[0]] = 0.0
    before = np.full((count + 1, plans, 2), -1, dtype=np.int64)  # segment and plan
    for k in range(count):
        own, prices = value[k], course.price_s(k)
        _better(value, before, np.full(plans, k + 1), np.arange(plans),
                own + steps[:, k + 1] - steps[:, k], k, np.arange(plans))
        ready = starts[k] + prices
        after = np.maximum(k + 1, np.searchsorted(starts, np.minimum(ready, starts[-1])))
        part = np.where(ready < starts[-1], starts[after] - ready, 0.0)
        speed = np.take_along_axis(course.steps_per_s, np.maximum(after - 1, 0).T, axis=1).T
        gains = np.where(np.isfinite(prices), own[:, None] + part * speed, -np.inf)
        np.fill_diagonal(gains, -np.inf)
        for late in np.unique(after[np.isfinite(gains)]):
            column = np.where(after == late, gains, -np.inf)
            _better(value, before, np.full(plans, late), np.arange(plans), column.max(axis=0), k,
                    column.argmax(axis=0))
    plan, k, moves, downtime_s = int(value[-1].argmax()), count, 0, 0.0
    while k > 0:
        less, old = (int(x) for x in before[k, plan])
        if old != plan:
            moves += 1
            downtime_s += min(float(course.price_s(less)[old, plan]), starts[-1] - starts[less])
        else:
            downtime_s += (starts[k] - starts[less]) * (course.steps_per_s[plan, less] == 0)
        k, plan = less, old
    return _told("oracle", value[-1].max() * course.num_rows, free, moves, downtime_s, 0.0)


def _told(policy: str, samples: float, free: float, moves: int, downtime_s: float,
          lost_s: float) -> Outcome:
    share = float(samples) / free if free else 0.0
    return Outcome(policy, float(samples), share, moves, float(downtime_s), float(lost_s))


def _better(value: Array, before: NDArray[np.int64], rows: NDArray[np.int64],
            plans: NDArray[np.int64], found: Array, k: int, old: NDArray[np.int64]) -> None:
    """Keep what is more than was known."""
    more = found > value[rows, plans]
    value[rows[more], plans[more]] = found[more]
    before[rows[more], plans[more]] = np.stack([np.full(more.sum(), k), old[more]], axis=1)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Policies side by side."""
    rows = [f"{'policy':10} {'of free moves':>13} {'of oracle':>9} {'moves':>6} {'downtime':>10} "
            f"{'lost work':>10}"]
    most = outcomes[-1].samples or 1.0
    return rows + [f"{o.policy:10} {o.share:13.1%} {o.samples / most:9.1%} {o.moves:6} "
                   f"{o.downtime_s:8.0f} s {o.lost_s:8.0f} s" for o in outcomes]
