"""Proves of any lists of actions that they are complete and cannot deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from autopar_torch.errors import ScheduleError
from autopar_torch.schedule import RECEIVES, SENDS, Action, Op, Schedule, num_positions, transfer


def check(schedule: Schedule, num_micro_batches: int) -> None:
    """Raise a ScheduleError unless the lists are complete and each can run to its end."""
    if len(schedule.actions) != num_positions(schedule.position_of):
        raise ScheduleError(f"{len(schedule.actions)} lists of actions for other positions")
    _check_complete(schedule, num_micro_batches)
    _check_progress(schedule)
    _check_channels(schedule)


def _check_complete(schedule: Schedule, num_micro_batches: int) -> None:
    expected = _expected(schedule, num_micro_batches)
    for position, actions in enumerate(schedule.actions):
        found, where = Counter(actions), f"position {position}"
        for action in found:
            if expected.get(action) != position:
                raise ScheduleError(f"{action} does not belong here", where=where)
            if found[action] > 1:
                raise ScheduleError(f"{action} is there {found[action]} times", where=where)
        for action, home in expected.items():
            if home == position and action not in found:
                raise ScheduleError(f"{action} is missing", where=where)


def _expected(schedule: Schedule, num_micro_batches: int) -> dict[Action, int]:
    """Every action of a complete schedule -> its position.

    Whether they train, and which backwards they split in two, is read off the lists.
    """
    found = {action for actions in schedule.actions for action in actions}
    trains = any(action.op in (Op.B, Op.I, Op.W, Op.REDUCE) for action in found)
    expected: dict[Action, int] = {}
    places = schedule.position_of
    for stage, position in enumerate(places):
        for micro_batch in range(num_micro_batches):
            halves = [Action(stage, op, micro_batch) for op in (Op.I, Op.W)]
            backward = halves if found & set(halves) else [Action(stage, Op.B, micro_batch)]
            for action in (Action(stage, Op.F, micro_batch), *(backward if trains else [])):
                receive, send = (transfer(action, ops, places) for ops in (RECEIVES, SENDS))
                expected |= dict.fromkeys([*receive, action, *send], position)
        expected |= {Action(stage, Op.REDUCE): position} if trains else {}
    return expected


def _check_progress(schedule: Schedule) -> None:
    """Run the lists: a receive waits for its send, anything else must find what it needs."""
    done: set[Action] = set()
    next_index = [0] * len(schedule.actions)
    moved = True
    while moved:
        moved = False
        for position, actions in enumerate(schedule.actions):
            while next_index[position] < len(actions):
                action = actions[next_index[position]]
                if missing := _needs(action, schedule) - done:
                    if action.op in (Op.RECV_F, Op.RECV_B):
                        break
                    what = f"{action} comes before {min(missing)}, which it needs"
                    raise ScheduleError(what, where=f"position {position}")
                done |= _effects(action)
                next_index[position] += 1
                moved = True
    if any(index < len(own) for index, own in zip(next_index, schedule.actions, strict=True)):
        raise ScheduleError(f"deadlock: no position can go on\n{_grid(schedule, next_index)}")


def _effects(action: Action) -> set[Action]:
    """A whole backward counts as both of its halves, so that needs name halves only."""
    halves = (Op.I, Op.W) if action.op is Op.B else (action.op,)
    return {action._replace(op=op) for op in halves}


def _needs(action: Action, schedule: Schedule) -> set[Action]:
    """What must have been done first; only a receive needs something of another position."""
    stage, op, micro_batch = action
    if op in (Op.RECV_F, Op.RECV_B):
        return {action.other_end()}
    if op is Op.REDUCE:
        actions = schedule.actions[schedule.position_of[stage]]
        ends = (a for a in actions if a.stage == stage and a.op in (Op.B, Op.W))
        return {a._replace(op=Op.W) for a in ends}
    if op in (Op.SEND_F, Op.SEND_B, Op.W):
        return {Action(stage, Op.F if op is Op.SEND_F else Op.I, micro_batch)}
    before = {Action(stage, Op.F, micro_batch)} if op is not Op.F else set()
    return before | _input_of(action, schedule.position_of)


def _input_of(action: Action, position_of: Sequence[int]) -> set[Action]:
    """What brings a compute action its input: a receive, a neighbour here, or nothing."""
    if received := transfer(action, RECEIVES, position_of):
        return set(received)
    op, step = (Op.F, -1) if action.op is Op.F else (Op.I, +1)
    neighbour = Action(action.stage + step, op, action.micro_batch)
    return {neighbour} if 0 <= neighbour.stage < len(position_of) else set()


def _grid(schedule: Schedule, next_index: list[int]) -> str:
    """One line per position: what it would do next, and what it waits for."""
    lines = []
    for position, (index, actions) in enumerate(zip(next_index, schedule.actions, strict=True)):
        coming = ", ".join(map(str, actions[index : index + 4]))
        line = f"  position {position}: {coming or 'done'}"
        if index < len(actions):
            line += f"  <-- stuck, waits for {actions[index].other_end()}"
        lines.append(line)
    return "\n".join(lines)


def _check_channels(schedule: Schedule) -> None:
    """NCCL pairs the sends and receives between two positions by their order alone."""
    sends = _channels(schedule, (Op.SEND_F, Op.SEND_B))
    receives = _channels(schedule, (Op.RECV_F, Op.RECV_B))
    for (source, target), sent in sends.items():
        for send, receive in zip(sent, receives[target, source], strict=True):
            if send.other_end() != receive:
                what = f"{send} is sent where {receive} is received"
                raise ScheduleError(what, where=f"position {source} to position {target}")


def _channels(schedule: Schedule, ops: tuple[Op, ...]) -> dict[tuple[int, int], list[Action]]:
    """(position, the other one) -> its transfers of those kinds, in order."""
    channels: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for position, actions in enumerate(schedule.actions):
        for action in (action for action in actions if action.op in ops):
            channels[position, schedule.position_of[action.other_end().stage]].append(action)
    return channels
