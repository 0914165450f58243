"""A plan's action lists as tasks of the fluid engine: who computes, who exchanges, who waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .. import schedule as schedules
from ..plan import Replica
from ..profile import Curve
from ..schedule import Action, Op
from ..timeline import COMM, COMPUTE
from .costs import BlockWork, Bucket, Costs, RankCost, Work
from .fluid import Task
from .jitter import SampledStep

_PART = {Op.F: "forward", Op.B: "backward", Op.I: "input", Op.W: "weight"}


def schedule_of(costs: Costs, replica: Replica, num_micro_batches: int) -> schedules.Schedule:
    return schedules.build(costs.plan.schedule, replica.position_of, num_micro_batches)


class Load(NamedTuple):
    """`core`: part of a core that an exchange takes; `beside`: its speed beside computing."""

    core: float
    beside: float = 1.0


def _load(curve: Curve) -> Load:
    return Load(curve.core, curve.beside)


class StepTasks:
    """Tasks of one training step; `tasks` is complete after `build`."""

    def __init__(self, costs: Costs, num_rows: int, sampled: SampledStep) -> None:
        self.costs, self.sampled, self.cluster = costs, sampled, costs.profile.profile.cluster
        self.rows = costs.plan.micro_batches(num_rows)
        self.tasks: list[Task] = []
        self.last: dict[int, int] = {}  # rank -> its latest task in order
        # (replica, send, target) -> its task, and how long it holds up the target
        self.moved: dict[tuple[int, Action, int], tuple[int, float]] = {}
        self.ended: dict[tuple[int, int], int] = {}  # (rank, block) -> end of its last backward
        self.reduced: dict[int, list[int]] = {}  # rank -> reductions it waits for
        self.joined: dict[tuple[tuple[int, ...], int], int] = {}  # (team, turn) -> task
        self.num_joined: Counter[tuple[int, tuple[int, ...]]] = Counter()  # of a rank in a team

    def build(self) -> list[Task]:
        self._begin()
        for r, replica in self.costs.replicas():
            self._replica(r, replica)
        self._reduce()
        self._finish()
        return self.tasks

    # --- adding tasks ---------------------------------------------------------------------------

    def _compute(self, rank: int, name: str, seconds: float) -> None:
        if seconds > 0:
            core = {f"core {self.cluster.core(rank)}": 1.0}
            before = (self.last[rank],) if rank in self.last else ()
            own_s = seconds * self.sampled.slowdown[rank]
            self.last[rank] = self._add(Task(name, own_s, core, before, (rank,), COMPUTE))

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _exchange(self, ranks: Sequence[int], name: str, seconds: float, load: Load,
                  after: Sequence[int], one_way: bool = False) -> int:
        """Add an exchange among ranks; the caller says what waits for it. `one_way`: a message,
        whose sender has used its core already, to hand it over."""
        needs: dict[str, float] = {}
        leading = self.costs.leading(ranks)
        for rank in leading[1:] if one_way else leading:
            key = f"core {self.cluster.core(rank)}"
            needs[key] = min(1.0, needs.get(key, 0.0) + load.core)
        needs |= self._ways(ranks, one_way)
        task = Task(name, seconds, needs, tuple(after), tuple(leading), COMM, load.beside)
        return self._add(task)

    def _ways(self, ranks: Sequence[int], one_way: bool) -> dict[str, float]:
        """Ways out of devices and into them; a message takes one of each, a collective all."""
        away = len({self.cluster.node_of[rank] for rank in ranks}) > 1
        if not (away or self.cluster.shares):
            return {}
        leading = self.costs.leading(ranks)
        out, into = (leading[:1], leading[1:]) if one_way else (leading, leading)
        found: dict[str, float] = {}
        for rank, way in (*((rank, "out") for rank in out), *((rank, "in") for rank in into)):
            for name, part in self.costs.profile.ways(rank, ranks, away).items():
                found[f"{name} {way}"] = max(part, found.get(f"{name} {way}", 0.0))
        return found

    def _together(self, ranks: Sequence[int], name: str, op: str, num_bytes: float) -> None:
        """A collective that all its ranks wait for."""
        curve = self.costs.profile.curve(op, ranks)
        self._joint(ranks, name, curve.seconds(num_bytes), _load(curve))

    def _joint(self, ranks: Sequence[int], name: str, seconds: float, load: Load) -> None:
        if seconds > 0:
            after = [self.last[rank] for rank in ranks if rank in self.last]
            task = self._exchange(ranks, name, seconds, load, after)
            self.last |= dict.fromkeys(self.costs.leading(ranks), task)

    def _join(self, rank: int, team: tuple[int, ...], name: str, seconds: float,
              load: Load) -> None:
        """A collective that each rank reaches by its own list of actions: the first rank there
        adds the task, the others make it wait for them too."""
        key = (team, self.num_joined[rank, team])
        self.num_joined[rank, team] += 1
        if key not in self.joined:
            self.joined[key] = self._exchange(team, name, seconds, load, ())
        place = self.joined[key]
        if rank in self.last:
            task = self.tasks[place]
            self.tasks[place] = replace(task, after=(*task.after, self.last[rank]))
        self.last[rank] = place

    # --- the parts of a step --------------------------------------------------------------------

    def _begin(self) -> None:
        """Take the batch; gather what ZeRO does not gather per use."""
        for rank in self.costs.leading(self.costs.plan.devices):
            self._compute(rank, "batch", self.costs.overheads(rank).step_s)
        gathers = {gather for cost in self._all_ranks() for gather in cost.gathers}
        for ranks, size in sorted(gathers):
            self._together(ranks, "gather", "gather", size)
            for rank in self.costs.leading(ranks):
                self._compute(rank, "unpack", size * self.costs.overheads(rank).fill_s_per_byte)

    def _rank_costs(self) -> list[RankCost]:
        return [cost for r, replica in self.costs.replicas()
                for s in range(len(replica.stages)) if self.rows[r]
                for cost in self.costs.stage(r, s, _rows(self.rows[r][0])).ranks]

    def _replica(self, index: int, replica: Replica) -> None:
        schedule = schedule_of(self.costs, replica, len(self.rows[index]))
        lanes = [list(lane) for lane in schedule.actions]
        finals = {_last_backward(lane, stage) for lane in schedule.actions
                  for stage in range(len(replica.stages))} - {None}
        while any(lanes):
            for lane in lanes:
                while lane and self._can_start(index, replica, lane[0]):
                    self._action(index, replica, lane.pop(0), finals)

    def _can_start(self, index: int, replica: Replica, action: Action) -> bool:
        if action.op not in (Op.RECV_F, Op.RECV_B):
            return True
        ranks = self.costs.leading(replica.stages[action.stage].devices)
        return all((index, action.other_end(), rank) in self.moved for rank in ranks)

    def _action(self, index: int, replica: Replica, action: Action,
                finals: set[Action | None]) -> None:
        match action.op:
            case Op.RECV_F | Op.RECV_B:
                self._receive(index, replica, action)
            case Op.SEND_F | Op.SEND_B:
                self._send(index, replica, action)
            case Op.REDUCE:
                pass
            case _:
                self._run(index, replica, action, action in finals)

    def _receive(self, index: int, replica: Replica, action: Action) -> None:
        for rank in self.costs.leading(replica.stages[action.stage].devices):
            sent, held_s = self.moved[index, action.other_end(), rank]
            after = tuple({sent, self.last.get(rank, sent)})
            self.last[rank] = self._add(Task(str(action), 0.0, {}, after, (rank,), COMM))
            self._compute(rank, str(action), held_s)

    def _send(self, index: int, replica: Replica, action: Action) -> None:
        """Send in the background: the sender posts and goes on, the receiver waits for it."""
        cost = self.costs.stage(index, action.stage, _rows(self.rows[index][action.micro_batch]))
        size = cost.send_bytes if action.op is Op.SEND_F else cost.back_bytes
        here = replica.stages[action.stage].devices
        there = self.costs.leading(replica.stages[action.other_end().stage].devices)
        for i, target in enumerate(there):
            source = here[i % len(here)]
            curve = self.costs.profile.curve("send", (source, target))
            seconds = curve.seconds(size)
            held_s = seconds * curve.held
            self._compute(source, str(action), held_s)
            after = [self.last[source]] if source in self.last else []
            task = self._exchange((source, target), str(action), seconds - held_s, _load(curve),
                                  after, one_way=True)
            self.moved[index, action, target] = task, held_s

    def _run(self, index: int, replica: Replica, action: Action, final: bool) -> None:
        """Computation of a stage; its last backward goes block by block, as gradients appear."""
        rows = _rows(self.rows[index][action.micro_batch])
        cost = self.costs.stage(index, action.stage, rows)
        stage, name, what = replica.stages[action.stage], str(action), _PART[action.op]
        blocks = range(*(stage.blocks or (0, 0)))
        apart = final or self.costs.plan.zero == 3
        order = blocks if action.op is Op.F else list(reversed(blocks))
        groups = [[b] for b in order] if apart else [list(order)]
        first = action.stage == replica.position_of.index(replica.position_of[action.stage])
        self._before(cost.ranks, action, name, first)
        for group in groups:
            self._gather(cost.ranks, action.op, group, blocks.start)
            factors = self.sampled.factors(stage.devices[0], len(group))
            for rank_cost in cost.ranks:
                own = [rank_cost.blocks[b - blocks.start] for b in group]
                works = [f * getattr(b, what).compute_s for f, b in zip(factors, own, strict=True)]
                added = sum(block.added_s for block in own)
                more = added if action.op is Op.B and action.micro_batch else 0.0
                self._compute(rank_cost.rank, name, sum(works) + more)
            self._joint(stage.devices, name, _exchanged_s(cost.ranks, what, group, blocks.start),
                        Load(self.costs.profile.exchange_core(stage.devices)))
            if final and self.costs.plan.zero == 3:
                self._sum_now(cost.ranks, group[0])
            if final:
                self._pack(cost.ranks, group[0])
                self.ended |= {(rank, group[0]): self.last[rank] for rank in stage.devices
                               if rank in self.last}

        if action.op in (Op.B, Op.W) and not final and self.costs.plan.zero >= 2:
            self._sum_now(cost.ranks)

    def _gather(self, ranks: Sequence[RankCost], op: Op, group: Sequence[int], first: int) -> None:
        """ZeRO 3: parameters of a block come together before it runs."""
        for cost in ranks if op is not Op.W else ():
            for block in group:
                for team, size in cost.blocks[block - first].gathers:
                    curve = self.costs.profile.curve("gather", team)
                    self._join(cost.rank, team, "gather", curve.seconds(size), _load(curve))

    def _sum_now(self, ranks: Sequence[RankCost], block: int | None = None) -> None:
        """Sums that this rank waits for: of all buckets whose ranks share a schedule, or of those
        complete with a block.

        ZeRO 2 and 3 keep no whole gradients from one micro-batch to the next; and messages between
        two ranks go one after another, so what ZeRO 3 gathers next waits for what it sent before.
        """
        for cost in ranks:
            for bucket in cost.buckets:
                if bucket.same_schedule and block in (None, bucket.block):
                    curve = self.costs.profile.curve(bucket.op, bucket.ranks)
                    seconds = curve.seconds(bucket.num_bytes) + self._packing_s(cost.rank, bucket)
                    self._join(cost.rank, bucket.ranks, "scatter", seconds, _load(curve))

    def _summed_beside(self, bucket: Bucket) -> bool:
        """Whether the backward goes on while a bucket is summed."""
        return len(bucket.ranks) > 1 and not (bucket.same_schedule and self.costs.plan.zero == 3)

    def _pack(self, ranks: Sequence[RankCost], block: int) -> None:
        """The backward stops while the buckets that a block completes are packed."""
        for cost in ranks:
            for bucket in cost.buckets:
                if bucket.block == block and self._summed_beside(bucket):
                    self._compute(cost.rank, "pack", self._packing_s(cost.rank, bucket))

    def _packing_s(self, rank: int, bucket: Bucket) -> float:
        return bucket.num_bytes * self.costs.overheads(rank).packing(bucket.op)

    def _before(self, ranks: Sequence[RankCost], action: Action, name: str, first: bool) -> None:
        """What runs before an action. `first`: its stage is the first of its position, and
        prepares the micro-batch for the others."""
        for cost in ranks:
            extra, over = 0.0, self.costs.overheads(cost.rank)
            if action.op is Op.F:
                extra = over.action_s + over.micro_batch_s * first
            elif action.op in (Op.B, Op.W) and action.micro_batch:
                extra = cost.added_bytes * over.add_s_per_byte
            self._compute(cost.rank, name, extra)

    def _reduce(self) -> None:
        """Sum each bucket as soon as all ranks of its team have its gradients; a team sums one
        bucket after another."""
        streams: dict[tuple[int, ...], int] = {}
        for cost in self._all_ranks():
            for bucket in cost.buckets:
                if self._summed_beside(bucket) and min(bucket.ranks) == cost.rank:
                    self._bucket(bucket, streams)

    def _all_ranks(self) -> list[RankCost]:
        """Each rank once, with the buckets of all its stages, those of later stages first, and a
        gather per team."""
        found: dict[int, RankCost] = {}
        for cost in self._rank_costs():
            if cost.rank in found:
                old = found[cost.rank]
                merged = tuple(dict.fromkeys((*cost.buckets, *old.buckets)))
                sizes = dict(old.gathers)
                for team, size in cost.gathers:
                    sizes[team] = sizes.get(team, 0.0) + size
                cost = RankCost(cost.rank, old.blocks + cost.blocks, merged,
                                tuple(sorted(sizes.items())),
                                old.param_bytes + cost.param_bytes,
                                old.grads + cost.grads,
                                old.added_bytes + cost.added_bytes,
                                old.owned_bytes + cost.owned_bytes,
                                max(old.largest_bytes, cost.largest_bytes),
                                old.num_tensors + cost.num_tensors)
            found[cost.rank] = cost
        return [found[rank] for rank in sorted(found)]

    def _bucket(self, bucket: Bucket, streams: dict[tuple[int, ...], int]) -> None:
        ready = [self.ended.get((rank, bucket.block), self.last.get(rank)) for rank in bucket.ranks]
        after = {task for task in ready if task is not None}
        after |= {streams[bucket.ranks]} if bucket.ranks in streams else set()
        curve = self.costs.profile.curve(bucket.op, bucket.ranks)
        seconds = curve.seconds(bucket.num_bytes)
        task = self._exchange(bucket.ranks, "reduce", seconds, _load(curve), sorted(after))
        streams[bucket.ranks] = task
        for rank in self.costs.leading(bucket.ranks):
            self.reduced.setdefault(rank, []).append(task)

    def _finish(self) -> None:
        """Each rank waits for its sums and the loss, then its optimizer runs."""
        for rank, sums in self.reduced.items():
            after = (*sums, *([self.last[rank]] if rank in self.last else []))
            self.last[rank] = self._add(Task("wait", 0.0, {}, after, (rank,), COMM))
        if len(self.costs.everyone) > 1:
            self._together(tuple(self.costs.everyone), "loss", "sum", 4.0)
        for cost in self._all_ranks():
            over = self.costs.overheads(cost.rank)
            update = (cost.owned_bytes * over.update_s_per_byte
                      + cost.num_tensors * over.update_s_per_tensor)
            self._compute(cost.rank, "update", update)


def _rows(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _last_backward(lane: Sequence[Action], stage: int) -> Action | None:
    found = [a for a in lane if a.stage == stage and a.op in (Op.B, Op.W)]
    return found[-1] if found else None


def _exchanged_s(ranks: Sequence[RankCost], what: str, group: Sequence[int],
                 first: int) -> float:
    """Seconds of exchange in some blocks, on the rank that has least of it: the slowest one, for
    which the others wait."""
    works: list[list[Work]] = [[_work(cost.blocks[b - first], what) for b in group]
                               for cost in ranks]
    return min(sum(w.comm_s for w in own) for own in works)


def _work(block: BlockWork, what: str) -> Work:
    work: Work = getattr(block, what)
    return work
