"""What each position runs, in which order: a pipeline schedule as lists of actions.

A *position* is one device group of the pipeline; it may hold several virtual stages. `build` plays
the pipeline with unit times, each kind of schedule being one rule that says when an action may
start. So a list comes from a run that finished: it cannot deadlock. `proof.py` shows the same
of any list, also of one that is not made here.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from autopar_torch.errors import ScheduleError

AHEAD = 6  # actions, a round of 1F1B: a receive is posted at most so early


class Op(StrEnum):
    """What a position can be told to do for one stage and one micro-batch."""

    F = "F"  # forward
    B = "B"  # the whole backward
    I = "I"  # noqa: E741  the part of the backward that the previous stage waits for
    W = "W"  # the part that makes the gradients of the weights
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"  # the gradients of a stage, summed over its replicas


# transfer -> (distance to the other stage, what the other stage does)
_ENDS = {
    Op.SEND_F: (+1, Op.RECV_F),
    Op.RECV_F: (-1, Op.SEND_F),
    Op.SEND_B: (-1, Op.RECV_B),
    Op.RECV_B: (+1, Op.SEND_B),
}
SENDS = {Op.F: Op.SEND_F, Op.B: Op.SEND_B, Op.I: Op.SEND_B}
RECEIVES = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}
_UNIT_TIME = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}
_TEXT = re.compile(rf"([0-9]+)({'|'.join(sorted(Op, key=len, reverse=True))})([0-9]*)")


class Action(NamedTuple):
    """One step of one position, written `2F0`, `3SEND_F1`, `2REDUCE`."""

    stage: int
    op: Op
    micro_batch: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.op is Op.REDUCE else self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form; nothing but exactly that form is taken."""
        if match := _TEXT.fullmatch(text):
            action = cls(int(match[1]), Op(match[2]), int(match[3] or 0))
            if str(action) == text:
                return action
        raise ScheduleError(f"{text!r} is no action", fix="write it like 2F0, 3SEND_F1 or 2REDUCE")

    def other_end(self) -> Action:
        """The receive that a send feeds, or the send that a receive waits for."""
        step, op = _ENDS[self.op]
        return Action(self.stage + step, op, self.micro_batch)


@dataclass(frozen=True)
class Schedule:
    """One list of actions per position, and the position of every stage."""

    actions: tuple[tuple[Action, ...], ...]
    position_of: tuple[int, ...]

    def text(self) -> str:
        """One line per position, its actions joined by commas."""
        return "\n".join(",".join(map(str, actions)) for actions in self.actions)

    @cached_property
    def acknowledged(self) -> dict[Action, list[Action]]:
        """Receive -> earlier sends of its position that have arrived by then: the other side took
        them before it sent this."""
        taken: dict[Action, list[Action]] = {}
        for actions in self.actions:
            sends: defaultdict[int, list[Action]] = defaultdict(list)  # of each peer, taken here
            for action in actions:
                if action.op in (Op.RECV_F, Op.RECV_B):
                    sent = action.other_end()
                    sends[self.position_of[sent.stage]].append(sent)
                elif action.op in (Op.SEND_F, Op.SEND_B):
                    receive = action.other_end()
                    taken[receive] = sends.pop(self.position_of[receive.stage], [])
        return taken

    @classmethod
    def parse(cls, text: str, position_of: Sequence[int]) -> Schedule:
        """Read the text form; positions without a line have nothing to do."""
        lines, count = text.splitlines(), num_positions(position_of)
        if len(lines) > count:
            raise ScheduleError(f"{len(lines)} lines of actions for {count} positions")
        lines += [""] * (count - len(lines))
        lists = (tuple(Action.parse(word) for word in line.split(",") if word) for line in lines)
        return cls(tuple(lists), tuple(position_of))


def num_positions(position_of: Sequence[int]) -> int:
    count = max(position_of, default=-1) + 1
    if not count or set(position_of) != set(range(count)):
        raise ScheduleError(
            f"the stages are on positions {list(position_of)}",
            fix="number the positions 0, 1, ... and give each at least one stage",
        )
    return count


# --- the rules: when may an action start? ---------------------------------------------------------


class _Progress:
    """How far every stage has come. A stage takes the micro-batches in order, so counters do."""

    def __init__(self, position_of: Sequence[int], num_micro_batches: int, ops: tuple[Op, ...]):
        self.num_micro_batches, self.ops = num_micro_batches, ops
        self.position_of = position_of
        self.stages: list[list[int]] = [[] for _ in range(num_positions(position_of))]
        for stage, position in enumerate(position_of):
            self.stages[position].append(stage)
        self.hops = _hops_to_end(position_of)
        self.slack = 0  # added to every limit; grows only where a rule would stop the pipeline
        self.started = {op: [0] * len(position_of) for op in ops}
        self.finished = {op: [0] * len(position_of) for op in ops}

    def upcoming(self, position: int) -> Iterator[Action]:
        """The next micro-batch of every stage and op here, whether it can run yet or not."""
        for stage in self.stages[position]:
            for op in self.ops:
                if (done := self.started[op][stage]) < self.num_micro_batches:
                    yield Action(stage, op, done)

    def ready(self, action: Action) -> bool:
        """Whether everything this action reads has been made."""
        stage, op, micro_batch = action
        if op is Op.F:
            return stage == 0 or self.finished[op][stage - 1] > micro_batch
        if op is Op.W:
            return self.finished[Op.I][stage] > micro_batch
        last = stage == len(self.position_of) - 1
        after = last or self.finished[op][stage + 1] > micro_batch
        return after and self.finished[Op.F][stage] > micro_batch

    def in_flight(self, stage: int, until: Op) -> int:
        return self.started[Op.F][stage] - self.finished[until][stage]


def _hops_to_end(position_of: Sequence[int]) -> list[int]:
    """Per stage: how many positions a micro-batch still visits, its own included."""
    rests = (position_of[stage:] for stage in range(len(position_of)))
    return [1 + sum(here != after for here, after in pairwise(rest)) for rest in rests]


def _gpipe(progress: _Progress, action: Action) -> bool:
    """All forwards of a position, then all backwards."""
    here = progress.stages[progress.position_of[action.stage]]
    count, forwards = progress.num_micro_batches, progress.started[Op.F]
    return action.op is Op.F or all(forwards[stage] == count for stage in here)


def _1f1b(progress: _Progress, action: Action) -> bool:
    """A stage keeps no more micro-batches than there are stages left to keep busy."""
    stage, op, _ = action
    limit = progress.hops[stage] + progress.slack
    return op is not Op.F or progress.in_flight(stage, progress.ops[1]) < limit


def _zero_bubble(progress: _Progress, action: Action) -> bool:
    """ZB-H1: 1F1B whose W wait for a bubble, while memory stays at the peak of 1F1B (stage 0's)."""
    outstanding = progress.in_flight(action.stage, Op.W)
    return _1f1b(progress, action) and (action.op is not Op.F or outstanding < progress.hops[0])


def _interleaved(progress: _Progress, action: Action) -> bool:
    """Megatron: groups of p micro-batches through every stage here, warm-up limited."""
    if action.op is not Op.F:
        return True
    position, count = progress.position_of[action.stage], len(progress.stages)
    mine, until = progress.stages[position], progress.ops[1]
    warm_up = 2 * (count - position - 1) + (len(mine) - 1) * count
    if sum(progress.in_flight(stage, until) for stage in mine) > warm_up + progress.slack:
        return False
    # Overtaking would fill the limit with forwards whose backward needs the one overtaken.
    begun, own = progress.started[Op.F], (action.micro_batch // count, action.stage)
    return all((begun[stage] // count, stage) >= own or begun[stage] == progress.num_micro_batches
               for stage in mine)


def _preference(action: Action, group: int) -> tuple[int, int, int, int]:
    """The order among actions that may start: a position takes the one with the smallest key.

    Forwards feed the stages after this one, so a rule limits them and they go first; nothing waits
    for W. Then by group of micro-batches, and along the pipeline.
    """
    stage, op, micro_batch = action
    kind = {Op.F: 0, Op.W: 2}.get(op, 1)
    return kind, micro_batch // group, stage if op is Op.F else -stage, micro_batch


_Rule = Callable[[_Progress, Action], bool]
_RULES: dict[str, _Rule] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
}
NAMES = tuple(_RULES)


# --- build ----------------------------------------------------------------------------------------


def build(name: str, position_of: Sequence[int], num_micro_batches: int,
          backward: bool = True) -> Schedule:
    """The schedule of that name; without `backward` only forwards, as for evaluation."""
    return _built(name, tuple(position_of), num_micro_batches, backward)


@lru_cache(maxsize=256)
def _built(name: str, position_of: tuple[int, ...], num_micro_batches: int,
           backward: bool) -> Schedule:
    played = order(name, position_of, num_micro_batches, backward)
    compute: list[list[Action]] = [[] for _ in range(num_positions(position_of))]
    for action in played:
        compute[position_of[action.stage]].append(action)
    lists = _insert_transfers(compute, position_of)
    for stage in reversed(range(len(position_of)) if backward else ()):
        lists[position_of[stage]].append(Action(stage, Op.REDUCE))
    return Schedule(tuple(map(tuple, lists)), position_of)


def rest(schedule: Schedule) -> Schedule:
    """What follows when all forwards have been done."""
    done = (Op.F, Op.SEND_F, Op.RECV_F)
    return Schedule(tuple(tuple(a for a in own if a.op not in done) for own in schedule.actions),
                    schedule.position_of)


def order(name: str, position_of: Sequence[int], num_micro_batches: int,
          backward: bool = True) -> list[Action]:
    """What all positions compute, by the time at which it begins if all stages are equal."""
    if name not in _RULES:
        raise ScheduleError(f"no schedule is called {name!r}", fix=f"use one of {', '.join(NAMES)}")
    if num_micro_batches < 0:
        raise ScheduleError(f"{num_micro_batches} micro-batches")
    split = (Op.I, Op.W) if name == "zero_bubble" else (Op.B,)
    # Without backward nothing is kept, so nothing limits the forwards.
    rule, ops = (_RULES[name], (Op.F, *split)) if backward else (_gpipe, (Op.F,))
    progress = _Progress(position_of, num_micro_batches, ops)
    played = _play(progress, rule, len(progress.stages) if name == "interleaved" else 1)
    return _split_last_backwards(played, position_of) if name == "1f1b" and backward else played


def _play(progress: _Progress, rule: _Rule, group: int) -> list[Action]:
    """Run the pipeline on a clock and write down what begins."""
    played: list[Action] = []
    running: list[tuple[int, int, Action]] = []  # a heap of (end, position, action)
    idle, clock = list(range(len(progress.stages))), 0
    while True:
        still = []
        for position in idle:
            if action := _pick(progress, rule, group, position):
                progress.started[action.op][action.stage] += 1
                played.append(action)
                heapq.heappush(running, (clock + _UNIT_TIME[action.op], position, action))
            else:
                still.append(position)
        if not running:
            if not any(any(progress.upcoming(position)) for position in still):
                return played
            progress.slack += 1
            continue
        idle, clock = still, running[0][0]
        while running and running[0][0] == clock:
            _, position, action = heapq.heappop(running)
            progress.finished[action.op][action.stage] += 1
            idle.append(position)
        idle.sort()


def _pick(progress: _Progress, rule: _Rule, group: int, position: int) -> Action | None:
    best: Action | None = None
    for action in progress.upcoming(position):
        if progress.ready(action) and rule(progress, action):
            first = best is None or _preference(action, group) < _preference(best, group)
            best = action if first else best
    return best


def _split_last_backwards(played: list[Action], position_of: Sequence[int]) -> list[Action]:
    """While a pipeline drains, positions wait for those after them: so once a position has done its
    forwards, it first does of each backward what the one before waits for."""
    last = {position_of[a.stage]: index for index, a in enumerate(played) if a.op is Op.F}
    found: list[Action] = []
    for index, action in enumerate(played):
        splits = index > last[position_of[action.stage]] and transfer(action, SENDS, position_of)
        found += [action._replace(op=op) for op in (Op.I, Op.W)] if splits else [action]
    return found


def _insert_transfers(compute: list[list[Action]],
                      position_of: Sequence[int]) -> list[list[Action]]:
    """Each send right after what it sends, each receive right before what needs it, or sooner."""
    due = _receives_due(compute, position_of)
    lists: list[list[Action]] = []
    for position, actions in enumerate(compute):
        lists.append([])
        for index, action in enumerate(actions):
            lists[-1] += due[position, index]
            lists[-1] += [action, *transfer(action, SENDS, position_of)]
    return lists


def _receives_due(compute: list[list[Action]],
                  position_of: Sequence[int]) -> dict[tuple[int, int], list[Action]]:
    """(position, index of a compute action) -> what is received just before it.

    Receives follow the order of the sends: one that is needed late but was sent early moves before
    those sent after it. It never waits there, as they could not have come without it.
    """
    needed: dict[Action, int] = {}
    channels: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for position, actions in enumerate(compute):
        for index, action in enumerate(actions):
            needed |= dict.fromkeys(transfer(action, RECEIVES, position_of), index)
            for send in transfer(action, SENDS, position_of):
                receive = send.other_end()
                channels[position, position_of[receive.stage]].append(receive)
    due: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for (_, position), receives in channels.items():
        index = needed[receives[-1]]
        for receive in reversed(receives):
            index = min(index, needed[receive])
            due[position, index].insert(0, receive)
    return due


def transfer(action: Action, ops: dict[Op, Op], position_of: Sequence[int]) -> list[Action]:
    """The send or receive beside a compute action: none at the ends or within a position."""
    if action.op not in ops:
        return []
    beside = action._replace(op=ops[action.op])
    peer = beside.other_end().stage
    inside = 0 <= peer < len(position_of)
    return [beside] if inside and position_of[peer] != position_of[action.stage] else []
