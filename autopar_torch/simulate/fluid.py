"""The fluid engine: tasks that run together share what they need, max-min fair.

A task needs an amount of each of its resources to run at full speed. Whatever is wanted by more
than it has is shared so that the smallest share is as large as can be; a task that needs less than
that gets all it needs. A task that is slower beside computing goes no faster than that.
Capacities may change at given moments.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import ScheduleError
from ..timeline import COMPUTE

EPSILON = 1e-12


@dataclass(frozen=True)
class Task:
    """Work that takes `seconds` at full speed, after the tasks that it waits for."""

    name: str
    seconds: float
    needs: Mapping[str, float]  # resource -> amount at full speed
    after: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    stream: str = COMPUTE
    beside: float = 1.0  # its speed at most, while another task computes on what it needs


class Capacity(NamedTuple):
    """From `at_s` on, a resource has this amount (1: as much as when it was measured)."""

    at_s: float
    resource: str
    amount: float


@dataclass
class _State:
    """`free`: nobody shares anything, so that every end is known when its task starts (`due`).
    Else `left` says how many seconds of each task were left at the last event."""

    tasks: Sequence[Task]
    capacity: dict[str, float]
    waiting: list[int] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)  # task -> rate
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    load: dict[str, float] = field(default_factory=dict)  # what running tasks want of a resource
    over: set[str] = field(default_factory=set)  # resources of which more is wanted than there is
    slowed: int = 0  # running tasks that computing may slow down
    free: bool = True
    due: list[tuple[float, int]] = field(default_factory=list)  # a heap of (end, task)


def run(tasks: Sequence[Task], changes: Sequence[Capacity] = ()) -> list[tuple[float, float]]:
    """(start, end) of every task."""
    state = _prepare(tasks)
    events = sorted(changes)
    now = 0.0
    ready = [i for i, count in enumerate(state.waiting) if count == 0]
    while True:
        while events and events[0].at_s <= now + EPSILON:
            change = events.pop(0)
            state.capacity[change.resource] = change.amount
            _weigh(state, change.resource, 0.0)
        for i in ready:
            _begin(state, i, now)
        if not state.running:
            break
        _adapt(state, now)
        step = min(_until_an_end(state, now), events[0].at_s - now if events else math.inf)
        if math.isinf(step):
            stuck = ", ".join(tasks[i].name for i in list(state.running)[:4])
            raise ScheduleError(f"nothing can go on: {stuck} have no capacity left")
        now += step
        ready = [k for i in _advance(state, step, now) for k in _finish(state, i, now)]
    if any(math.isinf(end) for end in state.end):
        raise ScheduleError("some tasks wait for each other and never start")
    return list(zip(state.start, state.end, strict=True))


def _prepare(tasks: Sequence[Task]) -> _State:
    state = _State(tasks, {})
    state.waiting = [len(set(task.after)) for task in tasks]
    state.readers = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for before in set(task.after):
            state.readers[before].append(i)
    state.left = [task.seconds for task in tasks]
    state.start = [math.inf] * len(tasks)
    state.end = [math.inf] * len(tasks)
    return state


def _begin(state: _State, i: int, now: float) -> None:
    task = state.tasks[i]
    state.start[i], state.running[i] = now, 1.0
    state.slowed += task.beside < 1
    for resource, amount in task.needs.items():
        _weigh(state, resource, amount)
    if state.free:
        heapq.heappush(state.due, (now + task.seconds, i))


def _finish(state: _State, i: int, now: float) -> list[int]:
    """Returns the tasks that may start now."""
    task = state.tasks[i]
    del state.running[i]
    state.end[i] = now
    state.slowed -= task.beside < 1
    for resource, amount in task.needs.items():
        _weigh(state, resource, -amount)
    for reader in state.readers[i]:
        state.waiting[reader] -= 1
    return [reader for reader in state.readers[i] if state.waiting[reader] == 0]


def _weigh(state: _State, resource: str, more: float) -> None:
    load = state.load[resource] = state.load.get(resource, 0.0) + more
    if load > state.capacity.get(resource, 1.0) + EPSILON:
        state.over.add(resource)
    else:
        state.over.discard(resource)


def _adapt(state: _State, now: float) -> None:
    """Change between known ends (`due`) and work left (`left`), if sharing began or ended."""
    free = not state.over and not state.slowed
    if free and not state.free:
        state.running.update(dict.fromkeys(state.running, 1.0))
        state.due = [(now + state.left[i], i) for i in state.running]
        heapq.heapify(state.due)
    elif state.free and not free:
        for end, i in state.due:
            state.left[i] = max(0.0, end - now)
    state.free = free


def _until_an_end(state: _State, now: float) -> float:
    if state.free:
        return state.due[0][0] - now
    _share(state)
    return min(_time_left(state, i) for i in state.running)


def _time_left(state: _State, i: int) -> float:
    if state.left[i] <= EPSILON:
        return 0.0
    return state.left[i] / state.running[i] if state.running[i] > 0 else math.inf


def _advance(state: _State, step: float, now: float) -> list[int]:
    """Let time pass; returns the tasks that are done."""
    if state.free:
        done = []
        while state.due and state.due[0][0] <= now + EPSILON * max(1.0, now):
            done.append(heapq.heappop(state.due)[1])
        return done
    for i in state.running:
        state.left[i] -= state.running[i] * step
    return [i for i in state.running
            if state.left[i] <= EPSILON * max(1.0, state.tasks[i].seconds)]


def _share(state: _State) -> None:
    """Max-min fair rates: the shares of all tasks grow alike until a resource is full."""
    most = _most(state)
    load: dict[str, float] = {}
    for i in state.running:
        for resource, amount in state.tasks[i].needs.items():
            load[resource] = load.get(resource, 0.0) + amount * most[i]
    tight = {r for r, amount in load.items() if amount > state.capacity.get(r, 1.0) + EPSILON}
    state.running.update(most)
    if tight:
        _fill(state, tight, most)


def _most(state: _State) -> dict[int, float]:
    """The highest speed of every running task, if nothing is short: 1, or less beside computing."""
    most = dict.fromkeys(state.running, 1.0)
    slowed = [i for i in most if state.tasks[i].beside < 1]
    if slowed:
        computing = {r for i in most if state.tasks[i].stream == COMPUTE
                     for r in state.tasks[i].needs}
        most |= {i: state.tasks[i].beside for i in slowed
                 if not computing.isdisjoint(state.tasks[i].needs)}
    return most


def _fill(state: _State, tight: set[str], most: Mapping[int, float]) -> None:
    """Progressive filling over the tasks that touch a resource in short supply."""
    needs = {i: {r: a for r, a in state.tasks[i].needs.items() if r in tight and a > 0}
             for i in state.running}
    needs = {i: wanted for i, wanted in needs.items() if wanted}
    weight = {i: max(wanted.values()) for i, wanted in needs.items()}
    enough = {i: weight[i] * most[i] for i in needs}
    room = {r: state.capacity.get(r, 1.0) for r in tight}
    growing = set(needs)
    level = 0.0  # share that every growing task has of what it needs most
    while growing:
        speed = {r: sum(needs[i].get(r, 0.0) / weight[i] for i in growing) for r in tight}
        full = {r: level + room[r] / v for r, v in speed.items() if v > 0}
        limit = min(full.values(), default=math.inf)
        reached = min(min(enough[i] for i in growing), limit)
        for r, v in speed.items():
            room[r] -= v * (reached - level)
        level = reached
        spent = {r for r, at in full.items() if at <= level + EPSILON}
        for i in list(growing):
            if enough[i] <= level + EPSILON or spent & needs[i].keys():
                state.running[i] = min(most[i], level / weight[i])
                growing.discard(i)


__all__ = ["Capacity", "Task", "run"]
