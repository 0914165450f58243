"""Plan: which device does what. Replicas and stages are explicit; `uniform` makes the even case."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from . import files
from .errors import PlanError
from .limits import Bytes, Count, Delta, Index, Name, Rank, refuse
from .model import ModelGraph
from .units import ranges

MOST_MICRO_BATCHES = 2**16  # each is an entry of an action list
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Precision = Literal["float32", "bfloat16"]
# Of values that backward needs: False keeps all, True computes all of a block again, a number what
# frees the most bytes per second, until so much of the seconds of forward is spent again.
Recompute = bool | Annotated[float, Meta(gt=0.0, lt=1.0)]


class Sharding(Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """How one kind is split on a mesh: a strategy per op, a form per shared value (texts)."""

    kind: Name
    mesh: Annotated[tuple[Annotated[int, Meta(ge=2, le=2**20)], ...], Meta(min_length=1)]
    ops: dict[Name, Name]
    forms: dict[Name, Name]
    cost_s: Delta = 0.0
    kept_bytes: Bytes = 0
    is_proven: bool = True  # the cheapest of its chain by the prices it was chosen by

    @cached_property
    def key(self) -> str:
        """Equal for shardings that run the same program."""
        text = repr((self.mesh, sorted(self.ops.items()), sorted(self.forms.items())))
        mesh = "x".join(map(str, self.mesh))
        return f"{mesh}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class Stage(Struct, frozen=True, forbid_unknown_fields=True):
    """A range of blocks on a group of devices, arranged as a mesh of one or two tensor axes.

    `share`: how much of a parameter each device keeps under ZeRO, beside the others that cut it.
    """

    devices: Annotated[tuple[Rank, ...], Meta(min_length=1)]
    blocks: tuple[Index, Index] | None = None  # first, end; None: balanced when the plan is applied
    mesh: tuple[Count, ...] = ()  # sizes of the tensor axes; (): one axis of all devices
    recompute: Recompute = False
    # Per block: index into Plan.shardings, -1: whole.
    shardings: tuple[Annotated[int, Meta(ge=-1, le=2**31)], ...] | None = None
    share: tuple[Count, ...] = ()  # per device; (): one each

    @property
    def axes(self) -> tuple[int, ...]:
        return self.mesh or (len(self.devices),)

    def sharding(self, block: int) -> int:
        """The entry of `shardings` for a block of the model."""
        return -1 if self.shardings is None else self.shardings[block - (self.blocks or (0, 0))[0]]


class Replica(Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """One copy of the model: its stages in order, and how many micro-batches it takes.

    `rows`: its share of the rows of a batch, beside those of the others; None: as its share of the
    micro-batches, which then are equal everywhere.
    """

    stages: Annotated[tuple[Stage, ...], Meta(min_length=1)]
    num_micro_batches: Annotated[int, Meta(ge=1, le=MOST_MICRO_BATCHES)] = 1
    rows: Count | None = None

    @cached_property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """The distinct device groups, in order of first stage."""
        return tuple(dict.fromkeys(stage.devices for stage in self.stages))

    @cached_property
    def position_of(self) -> tuple[int, ...]:
        """Stage -> index of its device group."""
        return tuple(self.positions.index(stage.devices) for stage in self.stages)


IDLE = Replica(())  # of a device that has no part in a plan
BUCKET_BYTES = 25 * 2**20


class Plan(Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """The whole strategy; `check` tells whether it fits a world and a model.

    Gradients travel when `bucket_bytes` of them are there. Under bfloat16 they are added up over
    micro-batches in float32, unless `grad_dtype` says otherwise, and arrive as the parameters are.
    `compiled` names the kinds of blocks that run compiled while training.
    """

    replicas: Annotated[tuple[Replica, ...], Meta(min_length=1)]
    schedule: ScheduleName = "1f1b"
    zero: Annotated[int, Meta(ge=0, le=3)] = 0
    precision: Precision = "float32"
    shardings: tuple[Sharding, ...] = ()
    reason: Name = "given by the user"
    bucket_bytes: Annotated[int, Meta(ge=1, le=2**50)] = BUCKET_BYTES
    grad_dtype: Precision = "float32"
    compiled: tuple[Name, ...] = ()

    def __post_init__(self) -> None:
        shares = [replica.rows for replica in self.replicas]
        refuse(None in shares and any(shares), f"rows of the replicas are {shares}; give them for "
               "every replica, or for none")

    @cached_property
    def in_step(self) -> bool:
        """Whether all replicas run the same stages equally often."""
        shapes = {(r.num_micro_batches, r.position_of, *((s.blocks, s.axes) for s in r.stages))
                  for r in self.replicas}
        return len(shapes) == 1

    @property
    def keeps_bfloat16(self) -> bool:
        """Whether gradients are added up in bfloat16, and not in the type of their parameters."""
        return (self.precision, self.grad_dtype) == ("bfloat16", "bfloat16")

    def sharding(self, stage: Stage, block: int) -> Sharding | None:
        """How a block is split, None where it is whole."""
        number = stage.sharding(block)
        return self.shardings[number] if number >= 0 else None

    def whole(self, stage: Stage) -> bool:
        """Whether the input part of a split backward does all of it. Keeping values for a weight
        part would undo what recomputing saves; only zero-bubble keeps them."""
        return stage.recompute is True and self.schedule != "zero_bubble"

    @staticmethod
    def uniform(
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        num_micro_batches: int = 1,
        schedule: ScheduleName = "1f1b",
        virtual: int = 1,
        zero: int = 0,
        recompute: Recompute = False,
        precision: Precision = "float32",
        tp_mesh: tuple[int, ...] = (),
        bucket_bytes: int = BUCKET_BYTES,
        grad_dtype: Precision = "float32",
    ) -> Plan:
        """Equal replicas of equal stages; tensor groups are neighbours, then stages, then replicas.

        `num_micro_batches` is per replica, `virtual` the number of stages per pipeline position.
        """
        degrees = {"tp": tp, "pp": pp, "dp": dp, "num_micro_batches": num_micro_batches,
                   "virtual": virtual}
        for name, value in degrees.items():
            if value < 1:
                raise PlanError(f"{name} = {value}, but it must be at least 1", where="Plan")
        if tp_mesh and math.prod(tp_mesh) != tp:
            raise PlanError(f"tp_mesh {tp_mesh} does not multiply to tp = {tp}", where="Plan")

        def stage(replica: int, index: int) -> Stage:
            start = (replica * pp + index % pp) * tp
            return Stage(tuple(range(start, start + tp)), None, tuple(tp_mesh), recompute)

        replicas = tuple(
            Replica(tuple(stage(r, s) for s in range(pp * virtual)), num_micro_batches)
            for r in range(dp)
        )
        return Plan(replicas, schedule, zero, precision, bucket_bytes=bucket_bytes,
                    grad_dtype=grad_dtype)

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Tensor, pipeline and data: of the first replica, and how many replicas."""
        first = self.replicas[0]
        return len(first.stages[0].devices), len(first.positions), len(self.replicas)

    @property
    def devices(self) -> tuple[int, ...]:
        stages = (stage for replica in self.replicas for stage in replica.stages)
        return tuple(sorted({device for stage in stages for device in stage.devices}))

    def idle(self, num_devices: int = 0) -> tuple[int, ...]:
        """Devices, of so many, that have no part in the plan."""
        used = self.devices
        return tuple(sorted(set(range(max(num_devices, used[-1] + 1))) - set(used)))

    def replica_of(self, device: int) -> int | None:
        """The number of the replica that a device is in, if it is in one."""
        return next((r for r, replica in enumerate(self.replicas)
                     if any(device in group for group in replica.positions)), None)

    @property
    def num_micro_batches(self) -> int:
        return sum(replica.num_micro_batches for replica in self.replicas)

    def micro_batches(self, num_rows: int) -> list[list[tuple[int, int]]]:
        """Rows of every micro-batch of every replica; of a replica they differ by one at most.

        If all replicas take the same number of micro-batches, they still do so in a batch of fewer
        rows, as they communicate in each; a micro-batch without rows is left out.
        """
        counts = [replica.num_micro_batches for replica in self.replicas]
        shares = [replica.rows for replica in self.replicas]
        given = [share for share in shares if share is not None]
        owns = shared_out(num_rows, given) if given else [num_rows]
        if len(set(counts)) == 1:
            most = min(owns) if given else num_rows // len(counts)
            counts = [min(counts[0], max(1, most))] * len(counts)
        groups = zip(owns, counts if given else [sum(counts)], strict=True)
        sizes = [own // count + (i < own % count) for own, count in groups for i in range(count)]
        ends = list(itertools.accumulate(sizes))
        spans = iter(zip([0, *ends], ends, strict=False))
        return [[span for span in itertools.islice(spans, count) if span[1] > span[0]]
                for count in counts]

    def describe(self, num_devices: int = 0) -> str:
        """One line a person can read; stages that follow each other are joined by `-`. With the
        number of devices there are, it names those that idle."""
        shapes = ["-".join("x".join(map(str, stage.axes)) for stage in replica.stages)
                  + f" device(s), {replica.num_micro_batches} micro-batch(es)"
                  + (f", {replica.rows} share(s) of the rows" if replica.rows else "")
                  for replica in self.replicas]
        runs = [(text, len(list(run))) for text, run in itertools.groupby(shapes)]
        shape = " | ".join(f"{count} x {text}" if len(runs) > 1 < count else text
                           for text, count in runs)
        tail = f"{self.schedule}, zero {self.zero}, {self.precision}"
        if self.compiled:
            tail += f"; compiled: {', '.join(self.compiled)}"
        if idle := self.idle(num_devices):
            tail += f"; idle: {ranges(idle)}"
        return f"{len(self.replicas)} replica(s) of stages on {shape}; {tail} ({self.reason})"

    def save(self, path: str | os.PathLike[str]) -> None:
        files.save(self, path)


def shared_out(num_rows: int, shares: Sequence[int]) -> list[int]:
    """Rows in these shares, whole ones: what is left over goes to the largest fractions."""
    total = sum(shares)
    whole = [num_rows * share // total for share in shares]
    order = sorted(range(len(shares)), key=lambda r: (-(num_rows * shares[r] % total), r))
    for r in order[: num_rows - sum(whole)]:
        whole[r] += 1
    return whole


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan back, checked."""
    return files.load(path, Plan)


def as_plan(plan: Plan | str | os.PathLike[str] | None) -> Plan:
    """A plan, or that of a file, let in by one door."""
    if isinstance(plan, Plan):
        return files.checked(plan, Plan, "plan")
    if not isinstance(plan, (str, os.PathLike)):
        raise PlanError(f"{type(plan).__name__} is no plan", where="plan",
                        fix="give a Plan or the path of the file of one")
    return load_plan(plan)


def check(plan: Plan, world_size: int, there: str = "torchrun started") -> None:
    """Refuse a plan that cannot run on so many devices, before anything is communicated. Those
    that it does not name will idle."""
    if plan.devices[-1] >= world_size:
        raise PlanError(
            f"the plan names {len(plan.devices)} devices ({ranges(plan.devices)}), "
            f"but {there} {world_size} (0 to {world_size - 1})",
            where="Plan.replicas[*].stages[*].devices",
            fix=f"take {plan.devices[-1] + 1} (torchrun --nproc-per-node), or choose degrees whose "
            f"product tp x pp x dp is at most {world_size}",
        )
    owner: dict[int, tuple[int, tuple[int, ...]]] = {}
    for r, replica in enumerate(plan.replicas):
        meshes: dict[tuple[int, ...], tuple[int, ...]] = {}
        for s, stage in enumerate(replica.stages):
            _check_stage(stage, meshes, f"Plan.replicas[{r}].stages[{s}]")
        for group in replica.positions:
            for device in group:
                if owner.setdefault(device, (r, group)) != (r, group):
                    other, theirs = owner[device]
                    raise PlanError(
                        f"device {device} is in group {theirs} of replica {other} and in {group} "
                        f"of replica {r}", where=f"Plan.replicas[{r}]",
                        fix="give every device one group, in one replica",
                    )


def _check_stage(stage: Stage, meshes: dict[tuple[int, ...], tuple[int, ...]], where: str) -> None:
    """Stages on the same devices see them as one mesh: a program has one place on it."""
    devices, axes = stage.devices, stage.axes
    if len(set(devices)) != len(devices):
        raise PlanError(f"devices {devices} repeat", where=f"{where}.devices")
    if math.prod(axes) != len(devices) or len(axes) > 2 or min(axes) < 2 <= len(devices):
        raise PlanError(f"mesh {axes} does not arrange {len(devices)} devices on one or two axes "
                        "of at least two", where=f"{where}.mesh")
    if len(stage.share) not in (0, len(devices)):
        raise PlanError(f"{len(stage.share)} shares for {len(devices)} devices",
                        where=f"{where}.share", fix="give one per device, or none")
    if meshes.setdefault(devices, axes) != axes:
        raise PlanError(
            f"devices {devices} are a mesh of {axes}, and of {meshes[devices]} in an earlier stage",
            where=f"{where}.mesh", fix="give all stages on the same devices the same mesh",
        )


def fit(plan: Plan, graph: ModelGraph) -> Plan:
    """The plan with every stage border written down; refuse what the model cannot do."""
    replicas = tuple(_with_borders(replica, graph, r) for r, replica in enumerate(plan.replicas))
    for r, replica in enumerate(replicas):
        for s, stage in enumerate(replica.stages):
            _check_shardings(plan, stage, graph, f"Plan.replicas[{r}].stages[{s}].shardings")
    whole = msgspec.structs.replace(plan, replicas=replicas)
    check_rows(whole, graph)
    return whole


def check_rows(plan: Plan, graph: ModelGraph) -> None:
    """Refuse to share out rows that the model has to see together."""
    split = any(replica.num_micro_batches > 1 for replica in plan.replicas)
    if graph.writes and split and not graph.coupled:
        block = next(b.name for b in graph.blocks if b.kind in graph.writes)
        raise PlanError(f"{block} changes a buffer in forward, once a step, so micro-batches would "
                        "change it too often", where="Plan.replicas[*].num_micro_batches",
                        fix="use num_micro_batches=1")
    if (graph.coupled and split) or (graph.unjoined and plan.num_micro_batches > 1):
        raise PlanError(
            f"{', '.join(graph.coupled)} uses statistics of the whole batch, so sharing it out "
            f"would change the numbers: {graph.coupling()}",
            where="Plan.replicas[*].num_micro_batches",
            fix="use num_micro_batches=1" + (" and one replica (dp=1)" if graph.unjoined else "")
            + "; or make such a loss outside, of what the model returns; or put those layers in "
            "eval mode, and the model itself not (model.train(), then layer.eval()); or allow "
            'them, with constraints={"batch_statistics": "local"}, to look at the rows of one '
            "part, as DistributedDataParallel does",
        )


def peer_groups(plan: Plan, graph: ModelGraph,
                block: int) -> tuple[list[tuple[int, ...]], bool]:
    """The ranks that join statistics of batches in a block, if any do. If all replicas cut the
    block alike (then the second is True): those at one place, else all that have it."""
    if len(plan.replicas) == 1 or not graph.kind_of(block).couples_rows:
        return [], True
    stages = [next(s for s in replica.stages if s.blocks and s.blocks[0] <= block < s.blocks[1])
              for replica in plan.replicas]
    ways = {(s.axes, own.key if (own := plan.sharding(s, block)) else "") for s in stages}
    if len(ways) == 1:
        places = zip(*(stage.devices for stage in stages), strict=True)
        return [tuple(sorted(devices)) for devices in places], True
    return [tuple(sorted(device for stage in stages for device in stage.devices))], False


def peers(plan: Plan, graph: ModelGraph, block: int, rank: int) -> tuple[tuple[int, ...], bool]:
    """Those of them that a rank joins, if any."""
    found, alike = peer_groups(plan, graph, block)
    return next((ranks for ranks in found if rank in ranks), ()), alike


def _check_shardings(plan: Plan, stage: Stage, graph: ModelGraph, where: str) -> None:
    """Each block of a stage has a sharding of its kind, on the mesh of the stage."""
    first, last = stage.blocks or (0, 0)
    numbers = stage.shardings
    if numbers is None:
        return
    if len(numbers) != last - first:
        raise PlanError(f"{len(numbers)} shardings for {last - first} blocks ({first}:{last})",
                        where=where, fix="leave them out to have them found")
    for block, number in enumerate(numbers, first):
        if not -1 <= number < len(plan.shardings):
            raise PlanError(f"sharding {number} of block {block}, but there are "
                            f"{len(plan.shardings)}", where=where)
        own = plan.shardings[number] if number >= 0 else None
        if own and (own.kind, own.mesh) != (graph.blocks[block].kind, stage.axes):
            raise PlanError(
                f"block {block} is of {graph.blocks[block].kind} on {stage.axes}, its sharding "
                f"{number} of {own.kind} on {own.mesh}",
                where=where, fix="leave them out to have them found",
            )


def _with_borders(replica: Replica, graph: ModelGraph, index: int) -> Replica:
    num_blocks, num_stages = len(graph.blocks), len(replica.stages)
    where = f"Plan.replicas[{index}].stages"
    if num_stages > num_blocks:
        raise PlanError(
            f"{num_stages} stages, but the model has only {num_blocks} blocks to share out",
            where=where, fix=f"use at most {num_blocks} stages (pp x virtual)",
        )
    given = [stage.blocks for stage in replica.stages]
    if any(blocks is None for blocks in given):
        if any(blocks is not None for blocks in given):
            raise PlanError("give the blocks of every stage, or of none", where=where)
        given = list(balance(tuple(_weight(graph, b) for b in range(num_blocks)), num_stages))
    end = 0
    for s, blocks in enumerate(given):
        first, last = blocks or (0, 0)
        if first != end or last <= first:
            raise PlanError(f"blocks {first}:{last} do not continue at {end}, or are empty",
                            where=f"{where}[{s}].blocks")
        end = last
    if end != num_blocks:
        raise PlanError(f"the stages end at block {end}, the model at {num_blocks}", where=where,
                        fix="is it the plan of another model? else cover every block")
    stages = (msgspec.structs.replace(s, blocks=b)
              for s, b in zip(replica.stages, given, strict=True))
    return msgspec.structs.replace(replica, stages=tuple(stages))


def _weight(graph: ModelGraph, block: int) -> float:
    kind = graph.kind_of(block)
    return kind.flops_per_row + 100.0 * kind.num_ops


@lru_cache(maxsize=64)  # replicas are mostly alike
def balance(weights: tuple[float, ...], num_parts: int) -> list[tuple[int, int]]:
    """Contiguous parts whose heaviest is as light as can be (exact dynamic program)."""
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    count = len(weights)
    best = [[math.inf] * (count + 1) for _ in range(num_parts + 1)]
    cut = [[0] * (count + 1) for _ in range(num_parts + 1)]
    best[0][0] = 0.0
    for part in range(1, num_parts + 1):
        for end in range(part, count + 1):
            for start in range(part - 1, end):
                cost = max(best[part - 1][start], total[end] - total[start])
                if cost < best[part][end]:
                    best[part][end], cut[part][end] = cost, start
    borders, end = [], count
    for part in range(num_parts, 0, -1):
        borders.append((cut[part][end], end))
        end = cut[part][end]
    return borders[::-1]
