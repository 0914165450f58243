"""Runs a schedule's action list on this rank: one action after the other, messages in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan import Replica
from ..schedule import AHEAD, Action, Op, Schedule
from ..shard.collectives import backend_of
from .pace import Stopwatch
from .params import Reducer
from .record import Recorder, Silent
from .stage import StageRunner, Values
from .world import World

PrologueOf = Callable[[int], dict[str, Any]]  # micro-batch -> prologue values
# micro-batch -> outputs, if this rank computes them
ShareOutputs = Callable[[dict[int, Values]], None]
_TAGS = 4096  # values per message, so that every message has a tag of its own
_NEXT = 3  # actions: up to the receive after a computation


def receivers(replica: Replica, stage: int, other: int, rank: int) -> list[int]:
    """Ranks of another stage that get this rank's values (several if they are more)."""
    mine, theirs = replica.stages[stage].devices, replica.stages[other].devices
    return [d for i, d in enumerate(theirs) if i % len(mine) == mine.index(rank)]


def neighbours(replica: Replica) -> list[tuple[int, int]]:
    """Every (sender, receiver) of a replica."""
    borders = list(itertools.pairwise(range(len(replica.stages))))
    return [
        (rank, other)
        for a, b in [*borders, *((b, a) for a, b in borders)]
        for rank in replica.stages[a].devices
        for other in receivers(replica, a, b, rank)
    ]


class Mail:
    """Values between stages: sends go on in the background, receives are posted early."""

    def __init__(self, world: World, replica: Replica, device: torch.device) -> None:
        self.world, self.rank = world, world.rank
        self.replica, self.device = replica, device
        self.sent: dict[Action, list[tuple[Any, Tensor]]] = {}
        self.posted: dict[Action, tuple[list[Any], Values]] = {}
        self.tagged = dist.is_initialized() and backend_of() == "gloo"
        # What waits for a message keeps a stream of a GPU.
        self.ahead = AHEAD if self.tagged else _NEXT

    def peer(self, stage: int, other: int) -> int:
        """The rank of another stage that this rank exchanges values with."""
        mine, theirs = self.replica.stages[stage].devices, self.replica.stages[other].devices
        return theirs[mine.index(self.rank) % len(theirs)]

    def send(self, action: Action, other: int, values: Values) -> None:
        for rank in receivers(self.replica, action.stage, other, self.rank):
            for k, value in enumerate(values.values()):
                data = value.contiguous()
                channel = self.world.channel(self.rank, rank)
                work = dist.isend(data, rank, channel, tag=self._tag(other, action, k))
                self.sent.setdefault(action, []).append((work, data))

    def post(self, action: Action, other: int, empty: Callable[[], Values]) -> None:
        """Have the values of a receive written as soon as they come."""
        if action in self.posted:
            return
        values, rank = empty(), self.peer(action.stage, other)
        channel = self.world.channel(rank, self.rank)
        works = [dist.irecv(value, rank, channel, tag=self._tag(action.stage, action, k))
                 for k, value in enumerate(values.values())]
        self.posted[action] = (works, values)

    def take(self, action: Action) -> Values:
        works, values = self.posted.pop(action)
        for work in works:
            cast(Any, work).wait()
        return values

    def let_go(self, arrived: Iterable[Action]) -> None:
        """Free what was sent, once it is known to have come."""
        for action in arrived:
            for work, _ in self.sent.pop(action, []):
                work.wait()

    def finish(self) -> None:
        self.let_go(list(self.sent))

    def _tag(self, receiver: int, action: Action, k: int) -> int:
        if not self.tagged:
            return 0
        backward = action.op in (Op.SEND_B, Op.RECV_B)
        return ((action.micro_batch * 256 + receiver) * 2 + backward) * _TAGS + k


class Executor:
    """One step of one rank's action list."""

    def __init__(self, stages: dict[int, StageRunner], replica: Replica, mail: Mail,
                 reducer: Reducer | None, recorder: Recorder | Stopwatch | Silent) -> None:
        self.stages, self.replica, self.mail, self.reducer = stages, replica, mail, reducer
        self.recorder = recorder
        self.values: dict[tuple[int, str, int], Values] = {}  # (stage, "F" or "B", micro-batch)
        self.results: dict[int, Values] = {}
        self.contexts: dict[int, dict[str, Any]] = {}
        # What each stage keeps for backward: another call may come before that.
        self.kept: dict[int, dict[int, tuple[Values, Values]]] = {s: {} for s in stages}

    def run(self, schedule: Schedule, position: int, rows: Sequence[tuple[int, int]],
            context: PrologueOf, train: bool, share: ShareOutputs) -> None:
        """`share` is called once, as soon as the outputs of all micro-batches are known."""
        self.schedule, self.rows, self.context, self.train = schedule, rows, context, train
        actions = schedule.actions[position]
        self.acknowledged = schedule.acknowledged
        last = {a.stage: a for a in actions if a.op in (Op.B, Op.W)}
        self.lasts = set(last.values())  # the last backward of every stage
        read_last = set({a.micro_batch: a for a in actions if a.op is Op.F}.values())
        known = _outputs_known(actions)
        for stage, runner in self.stages.items():
            runner.kept = self.kept[stage]
            runner.splits = {a.micro_batch for a in actions if a.op is Op.I and a.stage == stage}
        for index, action in enumerate(actions):
            if index == known:
                share(self.results)
            self._look_ahead(actions, index)
            receives = action.op in (Op.RECV_F, Op.RECV_B)
            with (self.recorder.exchanging if receives else self.recorder.computing)(str(action)):
                self._do(action)
            if action in read_last:  # backward keeps what it needs
                del self.contexts[action.micro_batch]
        if known == len(actions):
            share(self.results)
        with self.recorder.exchanging("sent"):
            self.mail.finish()
        for runner in self.stages.values():
            runner.kept = {}

    def _look_ahead(self, actions: Sequence[Action], index: int) -> None:
        """Post the receives that follow. With Gloo, a message that is sent before its receive is
        posted goes later, when a thread of the sender gets a core that computes by then."""
        for action in actions[index : index + self.mail.ahead]:
            if action.op in (Op.RECV_F, Op.RECV_B):
                other = action.stage + (-1 if action.op is Op.RECV_F else 1)
                self.mail.post(action, other, lambda a=action: self._empty(a))  # type: ignore[misc]

    def _empty(self, action: Action) -> Values:
        """Tensors for what will be received."""
        runner = self.stages[action.stage]
        start, end = self.rows[action.micro_batch]
        infos = runner.arriving if action.op is Op.RECV_F else {
            n: i for n, i in runner.leaving.items() if i.grad}
        return {
            name: torch.empty(runner.shape(name, info, end - start),
                              dtype=getattr(torch, info.dtype), device=runner.device)
            for name, info in infos.items()
        }

    def _do(self, action: Action) -> None:
        stage, op, mb = self.mail.world.watch.action = action
        if action in self.lasts:
            cast(Reducer, self.reducer).expect_last(self._final_names(action))
        match op:
            case Op.RECV_F | Op.RECV_B:
                if op is Op.RECV_F:
                    self._context(mb)  # while the message is on its way
                self.values[stage, "F" if op is Op.RECV_F else "B", mb] = self.mail.take(action)
                self.mail.let_go(self.acknowledged.get(action, ()))
            case Op.SEND_F:
                self.mail.send(action, stage + 1, self.values.pop((stage + 1, "F", mb)))
            case Op.SEND_B:
                self.mail.send(action, stage - 1, self.values.pop((stage - 1, "B", mb)))
            case Op.F:
                self._forward(stage, mb)
            case Op.B | Op.I:
                self._backward(action)
            case Op.W:
                self._weights(action)
            case Op.REDUCE:
                pass  # hooks start the sums; the step waits for all of them at its end

    def _context(self, mb: int) -> dict[str, Any]:
        if mb not in self.contexts:
            self.contexts[mb] = self.context(mb)
        return self.contexts[mb]

    def _forward(self, stage: int, mb: int) -> None:
        runner = self.stages[stage]
        start, end = self.rows[mb]
        context = self._context(mb)
        arrived = self.values.pop((stage, "F", mb)) if stage else {
            name: context[name] for name in runner.arriving}
        left = runner.forward(mb, end - start, arrived, context, self.train)
        if runner.outputs:
            self.results[mb] = left
        else:
            self.values[stage + 1, "F", mb] = left

    def _backward(self, action: Action) -> None:
        stage, op, mb = action
        runner, reducer = self.stages[stage], cast(Reducer, self.reducer)
        grads = self.values.pop((stage, "B", mb), None)
        run = runner.backward if op is Op.B else runner.backward_input
        back = run(mb, grads)
        if op is Op.B:
            reducer.after_backward(runner.params)
        self.values[stage - 1, "B", mb] = back  # before the first stage: of the batch

    def _weights(self, action: Action) -> None:
        runner, reducer = self.stages[action.stage], cast(Reducer, self.reducer)
        runner.backward_weight(action.micro_batch, reducer.arrived)
        reducer.after_backward(runner.params)

    def _final_names(self, action: Action) -> list[str]:
        """Parameters that no later action of this rank adds a gradient to."""
        others = [p for s, r in self.stages.items() if s != action.stage for p in r.params]
        return [p for p in self.stages[action.stage].params if p not in others]


def _outputs_known(actions: Sequence[Action]) -> int:
    """The place in the list by which the last stage has done all forwards: before the last backward
    of any stage, so before any sum of gradients, which may wait for ranks that wait themselves.
    """
    lasts = {a.stage: index for index, a in enumerate(actions) if a.op in (Op.B, Op.I)}
    return min(lasts.values(), default=len(actions))
