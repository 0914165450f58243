"""The closed formula: when each action of a schedule ends if nobody shares anything.

One pass over the action lists, in max-plus arithmetic. Durations may be arrays: many candidates
with the same schedule are then walked together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..schedule import Action, Op, Schedule

Seconds = NDArray[np.float64]
Durations = Callable[[Action], Seconds]


def walk(schedule: Schedule, seconds: Durations) -> list[Seconds]:
    """The end of every position's list. `seconds` of a send is the time its message takes."""
    clock: list[Seconds] = [np.zeros(()) for _ in schedule.actions]
    arrives: dict[Action, Seconds] = {}
    index = [0] * len(clock)
    moved = True
    while moved:
        moved = False
        for position, lane in enumerate(schedule.actions):
            while index[position] < len(lane):
                action = lane[index[position]]
                if action.op in (Op.RECV_F, Op.RECV_B):
                    sent = arrives.pop(action.other_end(), None)
                    if sent is None:
                        break
                    clock[position] = np.maximum(clock[position], sent)
                elif action.op in (Op.SEND_F, Op.SEND_B):
                    arrives[action] = clock[position] + seconds(action)
                else:
                    clock[position] = clock[position] + seconds(action)
                index[position] += 1
                moved = True
    return clock
