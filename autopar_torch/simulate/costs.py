"""What every stage of a plan costs, read from a profile: the numbers that both simulators use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..model import ModelGraph, TensorInfo, item_bytes, leaf_type
from ..plan import Plan, Replica, Stage
from ..profile import BlockCost, Lookup, Overheads, program_key
from ..shard.holdings import all_holdings, value_shape
from ..shard.reduction import Share, buckets_of, shares_of


@dataclass(frozen=True)
class Work:
    """Computing, then exchanging within the stage, on every rank of it."""

    compute_s: float = 0.0
    comm_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.compute_s + other.compute_s, self.comm_s + other.comm_s)


@dataclass(frozen=True)
class BlockWork:
    """One block for one micro-batch."""

    forward: Work
    backward: Work  # recompute included
    input: Work
    weight: Work
    added_s: float  # more seconds of a backward that adds to gradients which are there already
    kept_bytes: float
    stash_bytes: float  # of that and of gradients: bytes kept for the weight part
    forward_bytes: float
    backward_bytes: float
    input_bytes: float
    gathers: tuple[tuple[tuple[int, ...], float], ...] = ()  # before it runs: (team, bytes)


@dataclass(frozen=True)
class Bucket:
    """Gradients in one message among a team: after which block it can start."""

    block: int
    ranks: tuple[int, ...]
    num_bytes: float
    op: str  # "sum" or "scatter"
    same_schedule: bool  # ZeRO 2 and 3 may sum it after every micro-batch
    kept_bytes: float  # of the gradients that it is packed from


@dataclass(frozen=True)
class RankCost:
    """One rank of one stage: its blocks in order, and what it holds."""

    rank: int
    blocks: tuple[BlockWork, ...]
    buckets: tuple[Bucket, ...]
    gathers: tuple[tuple[tuple[int, ...], float], ...]  # at the start of a step: (team, bytes)
    param_bytes: float
    grads: tuple[float, ...]  # bytes that come with the backward of each block
    added_bytes: float  # of these, bytes that are added to earlier gradients
    owned_bytes: float
    largest_bytes: float
    num_tensors: int

    @property
    def grad_bytes(self) -> float:
        return sum(self.grads)


@dataclass(frozen=True)
class StageCost:
    """One stage of one replica, per number of rows of a micro-batch."""

    ranks: tuple[RankCost, ...]
    send_bytes: float  # forward, per rank
    back_bytes: float  # what it sends back to the stage before


class Costs:
    """Costs of a plan; everything is looked up once per number of rows. Of equal ranks
    (`simulate/equal_ranks.py`) only the representative has costs."""

    def __init__(self, plan: Plan, graph: ModelGraph, profile: Lookup,
                 representatives: Mapping[int, int] | None = None) -> None:
        self.plan, self.graph, self.profile = plan, graph, profile
        self.everyone = range(profile.profile.cluster.num_devices)  # also who idles
        self.representatives = representatives or {rank: rank for rank in self.everyone}
        self.class_of = profile.profile.cluster.class_of
        self.holdings = all_holdings(plan, graph)
        self.shares = {rank: shares_of(plan, graph, rank, self.holdings)
                       for rank in self.leading(plan.devices)}
        self._stages: dict[tuple[int, int, int], StageCost] = {}

    def overheads(self, rank: int) -> Overheads:
        return self.profile.overheads(self.class_of[rank])

    def leading(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if self.representatives[rank] == rank]

    def replicas(self) -> list[tuple[int, Replica]]:
        """The replicas whose ranks are leaders, with their numbers."""
        return [(r, replica) for r, replica in enumerate(self.plan.replicas)
                if self.leading(replica.stages[0].devices)]

    def stage(self, replica: int, stage: int, rows: int) -> StageCost:
        key = (replica, stage, rows)
        if key not in self._stages:
            self._stages[key] = self._stage(*key)
        return self._stages[key]

    def _stage(self, replica: int, index: int, rows: int) -> StageCost:
        stage = self.plan.replicas[replica].stages[index]
        first, last = stage.blocks or (0, 0)
        num_blocks = len(self.graph.blocks)
        leaving = self.graph.crossing(last) if last < num_blocks else {}
        arriving = self.graph.crossing(first) if first else {}
        ranks = tuple(self._rank(stage, rank, rows) for rank in self.leading(stage.devices))
        back = {name: info for name, info in arriving.items() if info.grad}
        return StageCost(ranks, self._border(stage, leaving, rows),
                         self._border(stage, back, rows))

    def _border(self, stage: Stage, values: dict[str, TensorInfo], rows: int) -> float:
        shapes = ((value_shape(self.plan, self.graph, stage, name, info, rows), info.dtype)
                  for name, info in values.items())
        return float(sum(_bytes(*shape) for shape in shapes))

    def _rank(self, stage: Stage, rank: int, rows: int) -> RankCost:
        first, last = stage.blocks or (0, 0)
        shares = self.shares[rank]
        names = self.graph.params_of(first, last)
        mine = [shares[name] for name in names]
        blocks = tuple(self._block(stage, rank, b, rows) for b in range(first, last))
        groups = buckets_of(shares, self.graph, self.plan, names)
        trained = [s for s in mine if s.trained]
        copies = self.plan.precision == "bfloat16"
        return RankCost(
            rank, blocks,
            tuple(self._bucket(group, first, last) for group in groups),
            tuple(self._gathers([s for s in trained if s.zero and not self._per_use(s)])),
            param_bytes=sum(_held_bytes(s, copies, self._per_use(s)) for s in mine),
            grads=tuple(self._grads(shares, first, last)),
            added_bytes=sum(self._added(s) for s in trained),
            owned_bytes=float(sum(s.num_owned * item_bytes(s.dtype) for s in trained)),
            largest_bytes=max((s.num_local * item_bytes(s.dtype) for s in trained), default=0),
            num_tensors=len(trained),
        )

    def _grads(self, shares: Mapping[str, Share], first: int, last: int) -> list[float]:
        """Bytes by block. A gradient counts with the last block that reads its parameter."""
        latest = {
            name: b for b in range(first, last) for name in self.graph.blocks[b].params.values()
        }
        sizes = dict.fromkeys(range(first, last), 0.0)
        for name, block in latest.items():
            if shares[name].trained:
                sizes[block] += _local_bytes(shares[name]) * self._kept(shares[name])
        return list(sizes.values())

    def _kept(self, share: Share) -> float:
        """Bytes of a gradient as it is added up, per byte of it as it arrives."""
        least = item_bytes("bfloat16") if self.plan.keeps_bfloat16 else math.inf
        return min(1.0, least / item_bytes(share.dtype))

    def _added(self, share: Share) -> float:
        """Bytes that are added to: if ZeRO 2 or 3 sums at once, only a rank's own part stays."""
        at_once = self.plan.zero >= 2 and share.zero and share.same_schedule
        return _local_bytes(share) / (len(share.team.ranks) if at_once else 1)

    def _bucket(self, group: list[Share], first: int, last: int) -> Bucket:
        """A bucket is complete with its earliest block, as backward goes from last to first."""
        users = [u for s in group for u in self.graph.users(s.name) if first <= u < last]
        zero, ranks = group[0].zero, group[0].team.ranks
        size = sum(s.num_sent * item_bytes(s.dtype) for s in group) * (len(ranks) if zero else 1)
        return Bucket(min(users), ranks, float(size), "scatter" if zero else "sum",
                      group[0].same_schedule, size * self._kept(group[0]))

    def _per_use(self, share: Share) -> bool:
        return self.plan.zero == 3 and share.same_schedule

    def _block(self, stage: Stage, rank: int, index: int, rows: int) -> BlockWork:
        block = self.graph.blocks[index]
        recompute = not self.graph.kind_of(index).runs_once and stage.recompute
        key = program_key(self.plan.sharding(stage, index), recompute,
                          block.kind in self.plan.compiled)
        cost = self.profile.cost(block.kind, key, rows, self.class_of[rank])
        own = [self.shares[rank][name] for name in block.params.values()]
        used = [share for share in own if self._per_use(share)]
        gathers = tuple(self._gathers(used))
        filling = self.overheads(rank).fill_s_per_byte * sum(size for _, size in gathers)
        trained = [share for share in own if share.trained]
        whole = sum(map(_local_bytes, trained))
        added_s = cost.added_s * sum(map(self._added, trained)) / whole if whole else 0.0
        leaf_bytes = float(sum(share.num_local * self._leaf_item(share) for share in used))
        return block_work(cost, gathers, filling, leaf_bytes, added_s, self.plan.whole(stage))

    def _leaf_item(self, share: Share) -> int:
        return item_bytes(leaf_type(share.dtype, self.plan.precision))

    def _gathers(self, shares: Sequence[Share]) -> list[tuple[tuple[int, ...], float]]:
        """Bytes that ZeRO gathers, by team, in the type that forward reads."""
        sizes: dict[tuple[int, ...], float] = {}
        for share in shares:
            size = share.piece * self._leaf_item(share) * len(share.team.ranks)
            sizes[share.team.ranks] = sizes.get(share.team.ranks, 0.0) + size
        return sorted(sizes.items())


def block_work(cost: BlockCost, gathers: tuple[tuple[tuple[int, ...], float], ...],
               filling_s: float, gathered_bytes: float, added_s: float,
               whole: bool) -> BlockWork:
    """A block, with what is gathered for it: whole only while it runs, put together from as much
    that has arrived. With a `whole` backward nothing waits."""
    fill = Work(filling_s)
    input_bytes = 0.0 if whole else cost.input_bytes
    return BlockWork(
        Work(cost.forward_s, cost.comm_forward_s) + fill,
        Work(cost.backward_s, cost.comm_backward_s) + fill,
        Work(cost.backward_s if whole else cost.input_s, cost.comm_backward_s) + fill,
        Work(0.0 if whole else cost.weight_s),
        added_s=added_s,
        kept_bytes=cost.kept_bytes,
        stash_bytes=0.0 if whole else cost.stash_bytes or cost.kept_bytes,
        forward_bytes=gathered_bytes + max(gathered_bytes, cost.forward_bytes),
        backward_bytes=gathered_bytes + max(gathered_bytes, cost.backward_bytes),
        input_bytes=gathered_bytes + max(gathered_bytes, input_bytes or cost.backward_bytes),
        gathers=gathers,
    )


def _local_bytes(share: Share) -> int:
    return share.num_local * item_bytes(share.dtype)


def _bytes(shape: Sequence[int], dtype: str) -> float:
    return float(math.prod(shape) * item_bytes(dtype))


def _held_bytes(share: Share, copies: bool, per_use: bool) -> float:
    """Bytes of a parameter between steps: a rank's own part, and the leaf if that differs."""
    own = share.num_owned * item_bytes(share.dtype)
    if per_use:
        return own
    if share.zero:
        leaf = share.num_local * (2 if copies else item_bytes(share.dtype))
        return own + leaf
    return own + (share.num_local * 2 if copies and share.trained else 0)


__all__ = ["BlockWork", "Bucket", "Costs", "RankCost", "StageCost", "Work"]
