"""When every position of a schedule ends if ranks share nothing: its lists, added up.

Every end is the largest sum of durations along a chain of actions that wait for each other. A long
schedule repeats itself, so its steps are a beginning, a window that is repeated, and an end; and
once a repeat has moved every end on by the same time, the rest of them do too. It gives what the
engine gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..schedule import Action, Op, order

PerStage = Sequence[float]  # seconds
OPS = (Op.F, Op.B, Op.I, Op.W)
WORKS = 8  # kinds of work in a `Pipeline`
EQUAL = 1e-12  # relative difference of strides that are equal but for rounding
Step = tuple[int, int, int, int]  # position, op and stage, steps back to what it needs, message


class Pipeline(NamedTuple):
    """Seconds per micro-batch of every stage. A message goes to the neighbour of its stage.

    The first micro-batch finds no gradients to add to, the last one packs them; where there is
    only one, it is the last.
    """

    forward: PerStage
    backward: PerStage
    input: PerStage
    weight: PerStage
    first_backward: PerStage
    first_weight: PerStage
    last_backward: PerStage
    last_weight: PerStage
    send: PerStage  # forward, to the next stage; of the last one: unused
    back: PerStage  # backward, to the stage before; of the first one: unused


class Steps(NamedTuple):
    """The steps of `least` micro-batches in parts. Parts 1, 3, ... are windows: repeating each of
    them once more adds `period` micro-batches."""

    parts: tuple[tuple[Step, ...], ...]
    least: int
    period: int
    reach: int  # no step needs anything further back, and no window is longer
    ends: tuple[int, ...]  # per stage: how far from the end its last step is


def walk(name: str, position_of: tuple[int, ...], pipe: Pipeline, num_micro_batches: int,
         starts: Sequence[float] = ()) -> list[float]:
    """The end of every stage's last backward; positions begin at `starts`, else at 0."""
    work = [seconds for row in pipe[:WORKS] for seconds in row]
    delays = [0.0, *pipe.send, *pipe.back]
    steps = steps_of(name, position_of, num_micro_batches)
    repeats = (num_micro_batches - steps.least) // steps.period
    clock, done = list(starts) or [0.0] * (max(position_of) + 1), [0.0] * steps.reach
    for index, part in enumerate(steps.parts):
        _run(part, work, delays, clock, done)
        if index % 2:
            _repeat(part, repeats, work, delays, clock, done, steps.reach)
    return [done[-back] for back in steps.ends]


def _repeat(window: Sequence[Step], times: int, work: PerStage, delays: PerStage,
            clock: list[float], done: list[float], reach: int) -> None:
    """Run a window `times` more; in one stride as soon as it moves all ends by the same time."""
    while times > 0:
        before, earlier = list(clock), done[-reach:]
        _run(window, work, delays, clock, done)
        times -= 1
        stride = _stride([*before, *earlier], [*clock, *done[-reach:]])
        if stride is not None:
            clock[:] = [end + times * stride for end in clock]
            done[:] = [end + times * stride for end in done[-reach:]]
            return


def _run(steps: Sequence[Step], work: PerStage, delays: PerStage, clock: list[float],
         done: list[float]) -> None:
    """Each step starts when its position is free and what it needs has come."""
    add = done.append
    for position, what, back, message in steps:
        start = clock[position]
        if back:
            came = done[-back] + delays[message]
            if came > start:
                start = came
        clock[position] = end = start + work[what]
        add(end)


def _stride(before: Sequence[float], after: Sequence[float]) -> float | None:
    """The time by which a window moved all ends, if it is the same for all. Later ends are sums and
    maxima of these, so then the next window moves them by the same time."""
    stride = after[0] - before[0]
    close = EQUAL * after[0]
    for a, b in zip(before, after, strict=True):
        if abs(b - a - stride) > close:
            return None
    return stride


def steps_of(name: str, position_of: tuple[int, ...], count: int) -> Steps:
    """The steps of a schedule: in windows where there are more micro-batches than they need."""
    num_positions = max(position_of) + 1
    virtual = len(position_of) // num_positions
    period = num_positions if virtual > 1 else 1
    least = (virtual + 4) * num_positions if virtual > 1 else 2 * num_positions + 6
    repeats = count > least and (count - least) % period == 0
    if repeats and (found := _windowed(name, position_of, least, period)):
        return found
    steps = _steps(name, position_of, count)
    return Steps((steps,), count, period, _reach(steps), _ends(steps, len(position_of)))


@lru_cache(maxsize=256)
def _windowed(name: str, position_of: tuple[int, ...], least: int, period: int) -> Steps | None:
    """The steps, if each phase has two equal periods in a row. GPipe has two phases: F and B."""
    steps, stages = _steps(name, position_of, least), len(position_of)
    cuts = [0]
    forwards, backwards = {0}, {row * stages - 1 for row in (2, 5, 7)}
    for begin in (forwards, backwards) if name == "gpipe" else (forwards,):
        begins = [i for i, (_, what, _, _) in enumerate(steps) if what in begin]
        start, after = begins[least - 3 * period], begins[least - 2 * period]
        if steps[start:after] != steps[after : 2 * after - start]:
            return None
        cuts += [start, after]
    parts = tuple(steps[a:b] for a, b in pairwise([*cuts, len(steps)]))
    reach = max(_reach(steps), *map(len, parts[1::2]))
    return Steps(parts, least, period, reach, _ends(parts[-1], stages))


def _ends(steps: Sequence[Step], stages: int) -> tuple[int, ...]:
    last = {what % stages: len(steps) - i for i, (_, what, _, _) in enumerate(steps)}
    return tuple(last[stage] for stage in range(stages))


def _reach(steps: Sequence[Step]) -> int:
    return max((back for _, _, back, _ in steps), default=1) or 1


@lru_cache(maxsize=256)
def _steps(name: str, position_of: tuple[int, ...], count: int) -> tuple[Step, ...]:
    """The steps in order, each with the one that it waits for."""
    stages = len(position_of)
    number: dict[Action, int] = {}
    steps: list[Step] = []
    for action in order(name, position_of, count):
        needed, message = _needed(action, position_of)
        back = 0 if needed is None else len(steps) - number[needed]
        number[action] = len(steps)
        if action.op is Op.I:  # it makes what the stage before waits for, as a whole backward does
            number[action._replace(op=Op.B)] = len(steps)
        what = _work(action, count) * stages + action.stage
        steps.append((position_of[action.stage], what, back, message))
    return tuple(steps)


def _work(action: Action, count: int) -> int:
    """The number of the `Pipeline` field with the seconds of an action."""
    if action.op in (Op.F, Op.I) or 0 < action.micro_batch < count - 1:
        return OPS.index(action.op)
    return 4 + 2 * (action.micro_batch == count - 1) + (action.op is Op.W)


def _needed(action: Action, position_of: Sequence[int]) -> tuple[Action | None, int]:
    """What comes from another stage, and the place of its message among all delays (0: none)."""
    stage, op, stages = action.stage, action.op, len(position_of)
    step = 1 if op in (Op.B, Op.I) else -1
    other = stage + step
    if op is Op.W or not 0 <= other < stages:
        return None, 0
    source = Action(other, Op.F if op is Op.F else Op.B, action.micro_batch)
    message = stage if op is Op.F else stages + stage + 2
    return source, 0 if position_of[other] == position_of[stage] else message
