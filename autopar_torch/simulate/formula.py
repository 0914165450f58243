"""The closed formula of a pipeline: when every position ends if nobody shares anything.

Every end is the largest sum of durations along a chain of actions that wait for each other. Once a
pipeline has filled up, each further micro-batch moves every end on by the same time; from there the
formula goes on in one stride. It gives what the engine gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .. import schedule as schedules
from .lanes import Step, program

Seconds = Sequence[float]  # per stage
EQUAL = 1e-12  # relative difference of strides that are equal but for rounding


class Pipeline(NamedTuple):
    """Seconds per micro-batch of every stage. A message goes to the neighbour of its stage.

    1F1B uses both kinds of backward: in two parts once a stage has done its forwards, but on the
    first one.
    """

    forward: Seconds
    backward: Seconds
    input: Seconds
    weight: Seconds
    send: Seconds  # forward, to the next stage; of the last one: unused
    back: Seconds  # backward, to the stage before; of the first one: unused


def ends(name: str, pipe: Pipeline, num_micro_batches: int, virtual: int = 1) -> list[float]:
    """The end of every position's last action."""
    count, positions = num_micro_batches, len(pipe.forward) // virtual
    if positions == 1:
        return [count * (sum(pipe.forward) + sum(pipe.backward))]
    if name == "1f1b" and virtual == 1:
        return _one_f_one_b(pipe, count)
    if name == "gpipe":
        return _gpipe(pipe, count)
    work = [*pipe.forward, *pipe.backward, *pipe.input, *pipe.weight]
    delays = [0.0, *pipe.send, *pipe.back]
    steps = program(name, positions, virtual, count)
    clock, done = [0.0] * positions, [0.0]
    _run(steps.first, work, delays, clock, done)
    left = (count - steps.least) // steps.period
    while left > 0:
        before, reach = list(clock), max(len(steps.window), steps.lookback)
        earlier = done[-reach:]
        _run(steps.window, work, delays, clock, done)
        left -= 1
        stride = _stride([*before, *earlier], [*clock, *done[-reach:]])
        if stride is not None:
            clock = [end + left * stride for end in clock]
            done = [end + left * stride for end in done[-reach - len(steps.rest) :]]
            left = 0
    _run(steps.rest, work, delays, clock, done)
    return clock


def _run(steps: Sequence[Step], work: Seconds, delays: Seconds, clock: list[float],
         done: list[float]) -> None:  # fmt: skip
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
    """What is to come depends on these ends by sums and maxima alone: where a period moved all of
    them by the same time, the next one will."""
    stride = after[0] - before[0]
    close = EQUAL * after[0]
    for a, b in zip(before, after, strict=True):
        if abs(b - a - stride) > close:
            return None
    return stride


def _gpipe(pipe: Pipeline, count: int) -> list[float]:
    """Equal jobs through a line: the way of the first, then one after another at the slowest."""
    last = len(pipe.forward) - 1
    turn = sum(pipe.forward) + sum(pipe.send[:last]) + (count - 1) * max(pipe.forward)
    found, slowest = [], 0.0
    for s in range(last, -1, -1):
        turn += pipe.backward[s] + (pipe.back[s + 1] if s < last else 0.0)
        slowest = max(slowest, pipe.backward[s])
        found.append(turn + (count - 1) * slowest)
    return found[::-1]


def _one_f_one_b(pipe: Pipeline, count: int) -> list[float]:
    """1F1B in waves: all actions of a wave depend on earlier waves only.

    Wave of F(s, j): s + 2j. Wave of B(s, j): 2j + 2p - 1 - s. F(s, j) waits for F(s-1, j) and for
    B(s, j-p+s), B(s, j) for B(s+1, j) and F(s, j+p-s-1): all of them lie in earlier waves.
    """
    last = len(pipe.forward) - 1
    forward, backward, send, back = pipe.forward, pipe.backward, pipe.send, pipe.back
    free = [0.0] * (last + 1)  # when each stage can start its next action
    came_f, came_b = [0.0] * (last + 2), [0.0] * (last + 2)  # latest arrivals; b is shifted by one
    wave, end_wave = 0, 2 * count + 2 * last + 1
    state: list[float] = []
    while wave < end_wave:
        for s in range(max(wave % 2, wave - 2 * count + 2), min(last, wave) + 1, 2):
            start = came_f[s] if came_f[s] > free[s] else free[s]
            free[s] = end = start + forward[s]
            came_f[s + 1] = end + send[s]
        first = 2 * last + 1 - wave  # stages whose j is not negative
        start_s = first if first >= 0 else first % 2
        end_s = min(last, first + 2 * count - 2)
        for s in range(start_s, end_s + 1, 2):
            start = came_b[s + 1] if came_b[s + 1] > free[s] else free[s]
            free[s] = end = start + backward[s]
            came_b[s] = end + back[s]
        for s in range(start_s or 2, min(end_s, wave + 1 - 2 * count) + 1, 2):  # forwards are done
            end = free[s] - backward[s] + pipe.input[s]
            came_b[s] = end + back[s]
            free[s] = end + pipe.weight[s]
        wave += 1
        if wave > 2 * last + 1 and wave % 8 in (0, 2) and wave < 2 * count - 2:
            now = [*free, *came_f[1:], *came_b[:-1]]
            stride = _stride(state, now) if wave % 8 == 2 and state else None
            state = now
            if stride is not None:
                jump = (2 * count - 2 - wave) // 2
                free, came_f, came_b = ([end + jump * stride for end in ends]
                                        for ends in (free, came_f, came_b))  # fmt: skip
                wave += 2 * jump
    return free


@lru_cache(maxsize=256)
def built(name: str, position_of: tuple[int, ...], count: int) -> schedules.Schedule:
    """Schedules are made once."""
    return schedules.build(name, position_of, count)
