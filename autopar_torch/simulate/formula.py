"""The closed formula of a pipeline: when every stage ends if nobody shares anything.

1F1B has a recurrence of its own, any other schedule walks its action lists; both give what the
engine gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .. import schedule as schedules
from ..schedule import Action, Op
from .walk import walk

Seconds = Sequence[float]  # per stage


class Pipeline(NamedTuple):
    """Seconds per micro-batch of every stage. A message goes to the neighbour of its stage."""

    forward: Seconds
    backward: Seconds
    input: Seconds
    weight: Seconds
    send: Seconds  # forward, to the next stage; of the last one: unused
    back: Seconds  # backward, to the stage before; of the first one: unused


def ends(name: str, pipe: Pipeline, num_micro_batches: int, virtual: int = 1) -> list[float]:
    """The end of every position's last action."""
    count = num_micro_batches
    if len(pipe.forward) == virtual:
        return [count * (sum(pipe.forward) + sum(pipe.backward))]
    if name == "1f1b" and virtual == 1:
        return _one_f_one_b(pipe, count)
    work = {Op.F: pipe.forward, Op.B: pipe.backward, Op.I: pipe.input, Op.W: pipe.weight,
            Op.SEND_F: pipe.send, Op.SEND_B: pipe.back}  # fmt: skip

    def seconds(action: Action) -> float:
        return work[action.op][action.stage] if action.op in work else 0.0

    positions = len(pipe.forward) // virtual
    return walk(built(name, tuple(range(positions)) * virtual, count), seconds)


def _one_f_one_b(pipe: Pipeline, count: int) -> list[float]:
    """1F1B in waves: all actions of a wave depend on earlier waves only.

    Wave of F(s, j): s + 2j. Wave of B(s, j): 2j + 2p - 1 - s. F(s, j) waits for F(s-1, j) and for
    B(s, j-p+s), B(s, j) for B(s+1, j) and F(s, j+p-s-1): all of them lie in earlier waves.
    """
    last = len(pipe.forward) - 1
    free = [0.0] * (last + 1)  # when each stage can start its next action
    came_f, came_b = [0.0] * (last + 2), [0.0] * (last + 2)  # latest arrivals; b is shifted by one
    for wave in range(2 * count + 2 * last + 1):
        for s in range(max(wave % 2, wave - 2 * count + 2), min(last, wave) + 1, 2):
            end = max(free[s], came_f[s]) + pipe.forward[s]
            free[s], came_f[s + 1] = end, end + pipe.send[s]
        first = 2 * last + 1 - wave  # stages whose j is not negative
        start = max(first, 0) if first >= 0 else (first % 2)
        for s in range(start, min(last, first + 2 * count - 2) + 1, 2):
            end = max(free[s], came_b[s + 1]) + pipe.backward[s]
            free[s], came_b[s] = end, end + pipe.back[s]
    return free


@lru_cache(maxsize=256)
def built(name: str, position_of: tuple[int, ...], count: int) -> schedules.Schedule:
    """Schedules are made once."""
    return schedules.build(name, position_of, count)
