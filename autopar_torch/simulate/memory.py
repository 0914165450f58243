"""Bytes of every rank at the worst moment of a step, and what they are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from msgspec.structs import replace

from ..plan import Replica
from ..schedule import AHEAD, Action, Op, Schedule
from ..timeline import Memory
from .costs import Bucket, Costs, RankCost
from .tasks import schedule_of

STATES = 2  # an Adam keeps two moments of every parameter


def peaks(costs: Costs, num_rows: int, states: int = STATES) -> tuple[Memory, ...]:
    """Per device of the cluster."""
    rows = costs.plan.micro_batches(num_rows)
    found: dict[int, Memory] = {}
    for r, replica in costs.replicas():
        counts = [end - start for start, end in rows[r]]
        schedule = schedule_of(costs, replica, len(counts))
        for lane in schedule.actions:
            found |= _position(costs, r, replica, schedule, lane, counts, states)
    return tuple(found.get(costs.representatives[rank], _idle(costs, rank))
                 for rank in costs.everyone)


def _idle(costs: Costs, rank: int) -> Memory:
    return Memory(fixed=int(costs.overheads(rank).fixed_bytes))


@dataclass(frozen=True)
class _Part:
    """One stage on one rank."""

    stage: int
    first: int  # its first block
    came_bytes: float  # values that arrive, per micro-batch; as many bytes of gradients go back
    left_bytes: float  # values that leave, likewise
    by_rows: dict[int, RankCost]

    @cached_property
    def any(self) -> RankCost:
        return next(iter(self.by_rows.values()))

    @cached_property
    def buckets(self) -> list[_Sent]:
        return [_Sent(self.stage, k, b) for k, b in enumerate(self.any.buckets) if len(b.ranks) > 1]


class _Sent(NamedTuple):
    """A bucket, and its place among those of its stage."""

    stage: int
    place: int
    bucket: Bucket

    @property
    def held_bytes(self) -> float:
        """Bytes of the message, twice with ZeRO, which receives as much as it sends."""
        return self.bucket.num_bytes * (2 if self.bucket.op == "scatter" else 1)


def _position(costs: Costs, index: int, replica: Replica, schedule: Schedule,
              lane: Sequence[Action], counts: Sequence[int],
              states: int) -> dict[int, Memory]:
    """All ranks of one device group run the same list."""
    stages = sorted({action.stage for action in lane})
    found, came_back = {}, schedule.acknowledged
    for place, rank in enumerate(costs.leading(replica.stages[stages[0]].devices)):
        parts = {}
        for s in stages:
            by_rows = {n: costs.stage(index, s, n).ranks[place] for n in counts or [1]}
            border = costs.stage(index, s, (counts or [1])[0])
            parts[s] = _Part(s, (replica.stages[s].blocks or (0, 0))[0], border.back_bytes,
                             border.send_bytes, by_rows)
        found[rank] = _rank(costs, rank, parts, lane, came_back, counts, states)
    return found


def _rank(costs: Costs, rank: int, parts: dict[int, _Part], lane: Sequence[Action],
          came_back: Mapping[Action, list[Action]], counts: Sequence[int],
          states: int) -> Memory:
    """The list as run/executor.py runs it, with the reducer of run/params.py."""
    own = [part.any for part in parts.values()]
    fixed = Memory(params=int(sum(c.param_bytes for c in own)),
                   optimizer=int(states * sum(c.owned_bytes for c in own)),
                   fixed=_idle(costs, rank).fixed)
    tally = _Tally(fixed, parts.values())
    last = {action.stage: action for action in lane if action.op in (Op.B, Op.W)}
    received = list(accumulate((_received_bytes(parts, action) for action in lane), initial=0.0))
    for index, action in enumerate(lane):
        part = parts[action.stage]
        tally.posted = received[min(index + AHEAD, len(lane))] - received[index + 1]
        if action.op is Op.SEND_B:
            tally.kept += part.came_bytes
        for sent in came_back.get(action, ()):
            tally.kept -= part.came_bytes if sent.op is Op.SEND_B else 0.0
        if action.op not in (Op.F, Op.B, Op.I, Op.W):
            continue
        cost = part.by_rows[counts[action.micro_batch]]
        if action.op is Op.F:
            tally.forward(part, cost)
        elif action.op is Op.W:
            tally.weights(part, cost, action == last[action.stage])
        else:
            tally.backward(part, cost, action.op is Op.I, action == last[action.stage])
        if costs.plan.zero >= 2 and action.op in (Op.B, Op.W):
            early = [sent for sent in part.buckets if sent.bucket.same_schedule]
            for bucket in early:
                tally.send(bucket)
                tally.add(bucket)
            tally.expect(part, early)
    rest = [sent for part in parts.values() for sent in part.buckets
            if costs.plan.zero < 2 or not sent.bucket.same_schedule]
    for bucket in rest:
        tally.send(bucket)
    for bucket in rest:
        tally.add(bucket)
    alone = [b for c in own for b in c.buckets if len(b.ranks) == 1]
    tally.grads += sum(b.num_bytes - b.kept_bytes for b in alone)  # as the parameters are
    tally.see(max((2 * c.largest_bytes for c in own), default=0.0))  # the update
    return tally.most


def _received_bytes(parts: Mapping[int, _Part], action: Action) -> float:
    part = parts[action.stage]
    return {Op.RECV_F: part.came_bytes, Op.RECV_B: part.left_bytes}.get(action.op, 0.0)


class _Tally:
    """What a rank holds as it goes through its list, and the largest state seen so far."""

    def __init__(self, fixed: Memory, parts: Iterable[_Part]) -> None:
        self.fixed, self.most = fixed, fixed
        self.size = self.kept = self.grads = self.messages = self.sums = 0.0
        self.posted = 0.0  # bytes of receives that are posted and have not come
        self.coming = {(p.stage, k): size for p in parts for k, size in enumerate(p.any.grads)}
        self.sent: set[_Sent] = set()
        self.summed: set[_Sent] = set()

    def see(self, working: float = 0.0, buffers: float = 0.0) -> None:
        grads, buffers = max(0.0, self.grads) + self.sums, self.messages + buffers + self.posted
        if grads + self.kept + working + buffers > self.size:
            self.size = grads + self.kept + working + buffers
            self.most = replace(self.fixed, grads=int(grads), activations=int(self.kept),
                                working=int(working), buffers=int(buffers))

    def forward(self, part: _Part, cost: RankCost) -> None:
        self.kept += part.came_bytes
        for block in cost.blocks:
            self.see(block.forward_bytes)
            self.kept += block.kept_bytes

    def backward(self, part: _Part, cost: RankCost, split: bool, last: bool) -> None:
        """Free kept values block by block, from the last, and add gradients; those of the last
        micro-batch leave at once. A split backward keeps a stash for its weight part."""
        for k, block in reversed(list(enumerate(cost.blocks))):
            self.see(block.input_bytes if split else block.backward_bytes)
            if k + 1 == len(cost.blocks):  # what left, and its gradients, stay to the end
                self.kept += 2 * part.left_bytes
            self.kept += (block.stash_bytes if split else 0.0) - block.kept_bytes
            if not (split and block.weight.compute_s):
                self._come(part, k)
            self._complete(part, k, last)
        self.kept -= part.came_bytes + 2 * part.left_bytes

    def weights(self, part: _Part, cost: RankCost, last: bool) -> None:
        self.see(cost.largest_bytes)
        for k, block in reversed(list(enumerate(cost.blocks))):
            self._come(part, k)
            self.kept -= block.stash_bytes
            self._complete(part, k, last)

    def _complete(self, part: _Part, k: int, last: bool) -> None:
        """Send the buckets that the last gradients of a block complete."""
        for sent in part.buckets if last else ():
            if sent.bucket.block == part.first + k:
                self.send(sent)

    def _come(self, part: _Part, k: int) -> None:
        """The first gradients of a block stay; later ones are added to them."""
        self.grads += self.coming.pop((part.stage, k), 0.0)
        self.see()

    def expect(self, part: _Part, gone: Sequence[_Sent]) -> None:
        """Gradients that were sent are allocated anew by the next backward."""
        left = sum(sent.bucket.kept_bytes for sent in gone)
        scale = min(1.0, left / part.any.grad_bytes) if left else 0.0
        self.coming |= {(part.stage, k): scale * size for k, size in enumerate(part.any.grads)}

    def send(self, sent: _Sent) -> None:
        """Pack and send: for a moment the message lies beside the gradients in it."""
        if sent in self.sent:
            return
        self.sent.add(sent)
        self.see(buffers=sent.bucket.num_bytes)
        self.grads -= sent.bucket.kept_bytes
        self.messages += sent.held_bytes
        self.see()

    def add(self, sent: _Sent) -> None:
        """The sum arrives, and is added to an earlier one if there is one."""
        bucket = sent.bucket
        share = bucket.num_bytes / len(bucket.ranks) if bucket.op == "scatter" else 0.0
        self.see(buffers=share)
        self.sent.discard(sent)
        self.messages -= sent.held_bytes
        if sent not in self.summed:
            self.summed.add(sent)
            self.sums += share or bucket.num_bytes
