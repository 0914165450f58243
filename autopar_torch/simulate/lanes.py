"""The schedules that no closed form gives, as steps to add up: what `schedule.build` plays, played
on counters, once per shape.

A long pipeline repeats itself, so its steps are a beginning, a window that is repeated, and an end,
whatever the number of micro-batches. A test holds that the lists are those of `build`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from ..schedule import Action, Op

OPS = (Op.F, Op.B, Op.I, Op.W)
F, B, I, W = range(4)  # noqa: E741
UNITS = (1, 2, 1, 1)
Step = tuple[int, int, int, int]  # position, op and stage, how far back what it needs, message
Played = list[tuple[int, int, int, int]]  # position, op, stage, micro-batch, by time


class Program(NamedTuple):
    """Steps of `least` micro-batches; every repeat of the window makes `period` more."""

    first: tuple[Step, ...]
    window: tuple[Step, ...]
    rest: tuple[Step, ...]
    least: int
    period: int
    lookback: int  # no step of the window needs anything further back


def program(name: str, num_positions: int, virtual: int, count: int) -> Program:
    """The steps of a schedule: with a window where there are more micro-batches than it needs."""
    period = num_positions if virtual > 1 else 1
    least = _least(num_positions, virtual)
    if count > least and (count - least) % period == 0:
        found = _windowed(name, num_positions, virtual, least, period)
        if found.window:
            return found
    return Program(_steps(name, num_positions, virtual, count), (), (), count, period, 0)


def _least(num_positions: int, virtual: int) -> int:
    """Micro-batches after which a clock of unit times shows two equal periods."""
    return (virtual + 3) * num_positions if virtual > 1 else 2 * num_positions + 6


@lru_cache(maxsize=256)
def _windowed(name: str, num_positions: int, virtual: int, least: int, period: int) -> Program:
    steps = _steps(name, num_positions, virtual, least)
    per_batch = 3 if name == "zero_bubble" else 2
    size = per_batch * num_positions * virtual * period
    begins = [i for i, (_, what, _, _) in enumerate(steps) if what == 0]
    start = begins[least - 2 * period]
    first, second = steps[start : start + size], steps[start - size : start]
    if first != second:
        return Program(steps, (), (), least, period, 0)
    lookback = max(back for _, _, back, _ in first)
    return Program(steps[:start], first, steps[start:], least, period, lookback)


@lru_cache(maxsize=256)
def _steps(name: str, num_positions: int, virtual: int, count: int) -> tuple[Step, ...]:
    """What was played, with what each step waits for."""
    stages = num_positions * virtual
    number: dict[tuple[int, int, int], int] = {}
    steps: list[Step] = []
    for position, op, stage, j in played(name, num_positions, virtual, count):
        source, message = None, 0
        if op == F and stage:
            source, message = number[F, stage - 1, j], stage
        elif op in (B, I) and stage < stages - 1:
            source, message = number[op, stage + 1, j], stages + stage + 2
        back = 0 if source is None else len(steps) - source
        number[op, stage, j] = len(steps)
        steps.append((position, op * stages + stage, back, message))
    return tuple(steps)


def lanes(name: str, num_positions: int, virtual: int, count: int) -> list[list[Action]]:
    """Per position: its computations in order."""
    made: list[list[Action]] = [[] for _ in range(num_positions)]
    for position, op, stage, j in played(name, num_positions, virtual, count):
        made[position].append(Action(stage, OPS[op], j))
    return made


# --- the clock ------------------------------------------------------------------------------------

Pick = Callable[[int, int], tuple[int, int, int] | None]  # (position, slack) -> op, stage, j


def played(name: str, num_positions: int, virtual: int, count: int) -> Played:
    """Every position does at every moment what the rule says, in units of time."""
    ended = [[0] * (num_positions * virtual) for _ in OPS]
    pick = (_interleaved(num_positions, virtual, count, ended) if name == "interleaved"
            else _zero_bubble(num_positions, count, ended))  # fmt: skip
    todo = num_positions * virtual * count * (3 if name == "zero_bubble" else 2)
    made: Played = []
    ends: dict[int, list[tuple[int, int, int]]] = {}  # moment -> what ends then
    free = list(range(num_positions))
    clock = slack = 0
    while len(made) < todo:
        still = []
        for k in free:
            found = pick(k, slack)
            if found is None:
                still.append(k)
                continue
            op, stage, j = found
            made.append((k, op, stage, j))
            ends.setdefault(clock + UNITS[op], []).append((k, op, stage))
        if not ends:
            slack += 1
            continue
        clock += 1
        free = still
        for k, op, stage in ends.pop(clock, ()):
            ended[op][stage] += 1
            free.append(k)
        free.sort()
    return made


def _zero_bubble(num_positions: int, count: int, ended: list[list[int]]) -> Pick:
    """Forward if the limits allow, else the part that others wait for, else the weights."""
    begun = [[0] * num_positions for _ in OPS]
    (forward, _, inner, weight), last = begun, num_positions - 1
    done_f, _, done_i, done_w = ended

    def pick(k: int, slack: int) -> tuple[int, int, int] | None:
        f, i, w = forward[k], inner[k], weight[k]
        if (f < count and f - done_i[k] < num_positions - k + slack
                and f - done_w[k] < num_positions and (k == 0 or done_f[k - 1] > f)):  # fmt: skip
            forward[k] = f + 1
            return F, k, f
        if i < count and done_f[k] > i and (k == last or done_i[k + 1] > i):
            inner[k] = i + 1
            return I, k, i
        if w < done_i[k]:
            weight[k] = w + 1
            return W, k, w
        return None

    return pick


def _interleaved(num_positions: int, virtual: int, count: int, ended: list[list[int]]) -> Pick:
    """Forwards in a fixed order within a limit, else the first backward that can run."""
    group, last = num_positions, num_positions * virtual - 1
    order = [(chunk * group, j) for start in range(0, count, group) for chunk in range(virtual)
             for j in range(start, min(start + group, count))]  # fmt: skip
    taken, backwards = [0] * group, [0] * (last + 1)
    done_f, done_b = ended[F], ended[B]
    limits = [2 * (group - k - 1) + (virtual - 1) * group for k in range(group)]

    def pick(k: int, slack: int) -> tuple[int, int, int] | None:
        started = taken[k]
        if started < len(order):
            stage, j = order[started][0] + k, order[started][1]
            if ((stage == 0 or done_f[stage - 1] > j)
                    and started - sum(done_b[k::group]) <= limits[k] + slack):  # fmt: skip
                taken[k] = started + 1
                return F, stage, j
        best = None
        for stage in range(last - group + 1 + k, -1, -group):
            b = backwards[stage]
            if b < count and done_f[stage] > b and (stage == last or done_b[stage + 1] > b):
                key = (b // group, -stage)
                if best is None or key < best:
                    best = key
        if best is None:
            return None
        stage = -best[1]
        backwards[stage] += 1
        return B, stage, backwards[stage] - 1

    return pick
