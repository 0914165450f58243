"""When the lists of a schedule end if nobody shares anything: action by action."""

from __future__ import annotations

from collections.abc import Callable

from autopar_torch.schedule import Action, Op, Schedule

_RECEIVES, _SENDS = (Op.RECV_F, Op.RECV_B), (Op.SEND_F, Op.SEND_B)


def ends_of(schedule: Schedule, seconds: Callable[[Action], float]) -> list[float]:
    """The oracle of `walk`: the end of every position's list, sends and receives included.

    `seconds` of a send is the time its message takes.
    """
    clock = [0.0] * len(schedule.actions)
    arrives: dict[Action, float] = {}
    index = [0] * len(clock)
    moved = True
    while moved:
        moved = False
        for position, channel in enumerate(schedule.actions):
            while index[position] < len(channel):
                action = channel[index[position]]
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
