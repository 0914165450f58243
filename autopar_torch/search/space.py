"""The space of plans: what a candidate says, and every candidate that the structure allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal, NamedTuple, overload

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from ..cluster import Cluster
from ..limits import Count, Rank, refuse
from ..model import ModelGraph
from ..plan import (
    BUCKET_BYTES,
    MOST_MICRO_BATCHES,
    Plan,
    Precision,
    Recompute,
    Replica,
    ScheduleName,
    Sharding,
    Stage,
)

SAFETY = 1.04  # a plan must fit with its predicted bytes times this, as these are inexact


class Option(Struct, frozen=True, forbid_unknown_fields=True):
    """One way to split the whole chain on a mesh: a sharding per block (None: whole)."""

    mesh: tuple[Rank, ...]
    shardings: tuple[Sharding | None, ...]

    def __post_init__(self) -> None:
        own = {sharding.mesh for sharding in self.shardings if sharding is not None}
        refuse(not own <= {self.mesh}, f"shardings on {sorted(own)} for a mesh of {self.mesh}")

    @property
    def degree(self) -> int:
        return math.prod(self.mesh)


class Constraints(Struct, frozen=True, forbid_unknown_fields=True):
    """What the user pins or forbids; None leaves it open."""

    tp: Count | None = None
    pp: Count | None = None
    dp: Count | None = None
    zero: Literal[0, 1, 2, 3] | None = None
    num_micro_batches: Count | None = None
    schedule: ScheduleName | None = None
    recompute: Recompute | None = None
    max_virtual: Annotated[int, Meta(ge=1, le=64)] = 2
    precision: Precision = "float32"
    grad_dtype: Precision = "float32"  # type in which gradients are added up under bfloat16
    # Per device, instead of what the device has.
    memory_bytes: Annotated[int, Meta(ge=1, le=2**50)] | None = None
    # Linears whose blocks move (PrimePar); "always" needs tensor groups with an axis of n x n.
    rings: Literal["free", "never", "always"] = "free"
    # "local": ops that look at the whole batch may look at the rows of a replica and micro-batch.
    batch_statistics: Literal["global", "local"] = "global"

    def zeros(self, dp: int) -> list[int]:
        """ZeRO stages that may be tried; a single replica has no use for them."""
        return [zero for zero in ((0, 1, 2, 3) if dp > 1 else (0,)) if self.zero in (None, zero)]

    def unmet(self, num_devices: int, num_rows: int, num_blocks: int) -> str:
        """Why no plan at all is as pinned, if numbers alone say it."""
        pins = {name: n for name in ("tp", "pp", "dp") if (n := getattr(self, name))}
        parts = (self.dp or 1) * (self.num_micro_batches or 1)
        if num_devices % math.prod(pins.values()):
            text = " x ".join(f"{name}={n}" for name, n in pins.items())
            return f": {text} does not divide the devices"
        if parts > num_rows:
            return f": {parts} micro-batches, of all replicas, need as many rows"
        return f": there are {num_blocks} blocks" if (self.pp or 1) > num_blocks else ""

    def capacity_bytes(self, cluster: Cluster, devices: Iterable[int] | None = None) -> int:
        """Bytes that a plan may take on each of these devices, else on every one."""
        known = cluster.devices
        found = known if devices is None else [known[rank] for rank in devices]
        return self.memory_bytes or min(device.memory_bytes for device in found)


class Candidate(NamedTuple):
    """A plan but for its stage borders."""

    option: int
    pp: int
    dp: int
    micro_batches: int  # per replica
    schedule: ScheduleName
    virtual: int
    zero: int
    recompute: Recompute

    def stages(self) -> int:
        return self.pp * self.virtual

    def rows(self, num_rows: int) -> int:
        """Rows of the largest micro-batch, as all ranks wait for the one that has it."""
        return -(-num_rows // (self.dp * self.micro_batches))

    def num_split(self, stage: int) -> int:
        """How many backwards of a stage the schedule splits in two."""
        if self.schedule == "zero_bubble":
            return self.micro_batches
        return min(self.micro_batches, self.pp - stage) if self.schedule == "1f1b" and stage else 0


SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "zero_bubble", "interleaved")
RECOMPUTES: tuple[Recompute, ...] = (False, 0.1, 0.4, True)  # parts: elementwise, with attention


def recompute_text(recompute: Recompute) -> str:
    """In words, where there is any."""
    return "recompute" if recompute is True else f"recompute {recompute:g}"


class Candidates(Sequence[Candidate]):
    """All candidates as rows of numbers; indexing makes a `Candidate` of one row. The last number
    is the place of what recomputes among `recomputes`."""

    def __init__(self, rows: NDArray[np.int64], recomputes: Sequence[Recompute]) -> None:
        self.rows, self.recomputes = rows, recomputes

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> Candidate: ...
    @overload
    def __getitem__(self, i: slice | NDArray[np.int64]) -> Candidates: ...
    def __getitem__(self, i: int | slice | NDArray[np.int64]) -> Candidate | Candidates:
        if not isinstance(i, (int, np.integer)):
            return Candidates(self.rows[i], self.recomputes)
        option, pp, dp, count, code, virtual, zero, again = self.rows[i].tolist()
        return Candidate(option, pp, dp, count, SCHEDULES[code], virtual, zero,
                         self.recomputes[again])


def candidates(options: Sequence[Option], graph: ModelGraph, num_devices: int, num_rows: int,
               limits: Constraints, recomputes: Sequence[Recompute] = RECOMPUTES) -> Candidates:
    """Everything that fits the number of devices, blocks and rows."""
    recomputes = recomputes if limits.recompute is None else (limits.recompute,)
    coupled = bool(graph.coupled or graph.writes)
    heads: list[tuple[int, ...]] = []
    for index, option in enumerate(options):
        rest, odd = divmod(num_devices, option.degree)
        if odd or not _allows(limits.tp, option.degree):
            continue
        for pp in divisors(rest):
            if not _allows(limits.pp, pp) or pp > len(graph.blocks):
                continue
            dp = rest // pp
            if _allows(limits.dp, dp) and dp <= num_rows:
                heads += _inner(index, pp, dp, num_rows, len(graph.blocks), coupled, limits)
    rows = np.array(heads, dtype=np.int64).reshape(-1, 6)
    return Candidates(_with_tails(rows, limits, len(recomputes)), recomputes)


def _inner(index: int, pp: int, dp: int, num_rows: int, num_blocks: int, coupled: bool,
           limits: Constraints) -> Iterator[tuple[int, ...]]:
    """Micro-batches and schedules of one shape."""
    for count in [1] if coupled else _counts(dp, num_rows):
        if _allows(limits.num_micro_batches, count):
            for schedule, virtual in _schedules(pp, count, num_blocks, limits):
                yield index, pp, dp, count, SCHEDULES.index(schedule), virtual


def _counts(dp: int, num_rows: int) -> list[int]:
    """Numbers of micro-batches per replica. If rows do not divide evenly: only numbers for which
    the first replica has none but largest micro-batches, as these are what is priced."""
    if num_rows % dp == 0:
        return [m for m in divisors(num_rows // dp) if m <= MOST_MICRO_BATCHES]
    doubled = [1 << k for k in range(min(num_rows // dp, MOST_MICRO_BATCHES).bit_length())]
    return [m for m in doubled if (num_rows % (dp * m) or m) >= m]


def _with_tails(heads: NDArray[np.int64], limits: Constraints,
                num_recomputes: int) -> NDArray[np.int64]:
    """Combine each with every ZeRO stage and recompute; a single replica has no use for ZeRO."""
    alone, many = ([(zero, again) for zero in limits.zeros(dp) for again in range(num_recomputes)]
                   for dp in (1, 2))
    tails = np.array([*alone, *many], dtype=np.int64).reshape(-1, 2)
    single = heads[:, 2] == 1
    lengths = np.where(single, len(alone), len(many))
    rows = heads.repeat(lengths, axis=0)
    begin = lengths.cumsum() - lengths - ~single * len(alone)
    place = np.arange(len(rows)) - begin.repeat(lengths)
    return np.hstack([rows, tails[place]])


def _schedules(pp: int, count: int, num_blocks: int,
               limits: Constraints) -> Iterator[tuple[ScheduleName, int]]:
    if pp == 1:
        yield "1f1b", 1
        return
    for name in SCHEDULES:
        if not _allows(limits.schedule, name):
            continue
        if name != "interleaved":
            yield name, 1
            continue
        for virtual in range(2, limits.max_virtual + 1):
            if pp * virtual <= num_blocks and count % pp == 0:
                yield name, virtual


def divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def _allows(pinned: object, value: object) -> bool:
    return pinned is None or pinned == value


def as_plan(candidate: Candidate, borders: Sequence[int], options: Sequence[Option],
            precision: Precision = "float32", reason: str = "found by search",
            bucket_bytes: int = BUCKET_BYTES,
            grad_dtype: Precision = "float32",
            devices: Sequence[int] | None = None) -> Plan:
    """The candidate written out: devices of a tensor group are neighbours, then stages."""
    ranks = devices or range(candidate.pp * candidate.dp * options[candidate.option].degree)
    option = options[candidate.option]
    tp, pp = option.degree, candidate.pp
    table, numbers = _numbered(option)

    def stage(replica: int, s: int) -> Stage:
        start = (replica * pp + s % pp) * tp
        return Stage(tuple(ranks[start : start + tp]), ranges[s], mesh, candidate.recompute, own[s])

    ranges = [(borders[s], borders[s + 1]) for s in range(candidate.stages())]
    own = [tuple(numbers[a:b]) if tp > 1 else None for a, b in ranges]
    mesh = option.mesh if tp > 1 else ()

    replicas = tuple(
        Replica(tuple(stage(r, s) for s in range(candidate.stages())), candidate.micro_batches)
        for r in range(candidate.dp)
    )
    return Plan(
        replicas, candidate.schedule, candidate.zero, precision, tuple(table), reason, bucket_bytes,
        grad_dtype,
    )


def _numbered(option: Option) -> tuple[list[Sharding], list[int]]:
    """The distinct shardings, and the number of each block's (-1: whole)."""
    table: list[Sharding] = []
    known: dict[int, int] = {}  # blocks share shardings, so most are known by identity
    for sharding in option.shardings:
        if id(sharding) not in known:
            if sharding is not None and sharding not in table:
                table.append(sharding)
            known[id(sharding)] = -1 if sharding is None else table.index(sharding)
    return table, [known[id(sharding)] for sharding in option.shardings]
