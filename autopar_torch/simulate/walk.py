"""When each position of a schedule ends if nobody shares anything: one pass over its lists."""

from __future__ import annotations

from collections.abc import Callable

from ..schedule import Action, Op, Schedule

_RECEIVES, _SENDS = (Op.RECV_F, Op.RECV_B), (Op.SEND_F, Op.SEND_B)


def walk(schedule: Schedule, seconds: Callable[[Action], float]) -> list[float]:
    """The end of every position's list. `seconds` of a send is the time its message takes."""
    clock = [0.0] * len(schedule.actions)
    arrives: dict[Action, float] = {}
    index = [0] * len(clock)
    moved = True
    while moved:
        moved = False
        for position, lane in enumerate(schedule.actions):
            while index[position] < len(lane):
                action = lane[index[position]]
                if action.op in _RECEIVES:
                    sent = arrives.pop(action.other_end(), None)
                    if sent is None:
                        break
                    clock[position] = max(clock[position], sent)
                elif action.op in _SENDS:
                    arrives[action] = clock[position] + seconds(action)
                else:
                    clock[position] += seconds(action)
                index[position] += 1
                moved = True
    return clock
