"""Process groups: one per set of ranks, made once, in the same order on every rank."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RunError
from ..plan import Stage
from ..shard.collectives import Axis, arrive
from ..shard.holdings import axis_ranks, place_in
from . import heap, transport

TIMEOUT_S = 300
T = TypeVar("T")


def start() -> tuple[int, int]:
    """(rank, world size); joins the processes that torchrun started, if any."""
    if not dist.is_available():
        return 0, 1
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=TIMEOUT_S))
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class World:
    """This rank's place, and the groups it shares with others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.groups: dict[tuple[int, ...], Any] = {}
        self.lanes: tuple[Any, Any] = (None, None)
        self.words: Any = None  # the group of what is said between CPUs (None: the usual one)
        if not torch.cuda.is_available():
            heap.keep()
        if size > 1:
            self.groups[tuple(range(size))] = dist.group.WORLD
            if dist.get_backend() == "nccl":
                self.open_lanes()
                timeout = datetime.timedelta(seconds=TIMEOUT_S)
                self.words = dist.new_group(backend="gloo", timeout=timeout)
            transport.make_polite()

    def open_lanes(self) -> None:
        """NCCL runs what two ranks exchange in a group strictly in order: a receive that is posted
        early would keep back the message that the other side waits for. So each group here carries
        messages between two ranks one way only."""
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        self.lanes = dist.new_group(timeout=timeout), dist.new_group(timeout=timeout)

    def enter_lanes(self, pairs: Iterable[tuple[int, int]]) -> None:
        """The first message between two ranks in a group makes both wait for each other: that
        happens here, in one order on all ranks, before any is posted early."""
        for source, target in sorted(set(pairs)) if self.lanes != (None, None) else ():
            if self.rank in (source, target):
                here = torch.zeros(1, device=device())
                lane = self.lane(source, target)
                way = dist.isend if self.rank == source else dist.irecv
                cast(Any, way(here, target + source - self.rank, lane)).wait()

    def lane(self, source: int, target: int) -> Any:
        """The group for messages from one rank to another (None: the usual one)."""
        return self.lanes[source > target]

    def make_groups(self, rank_sets: Iterable[tuple[int, ...]]) -> None:
        """Every rank must call this with the same sets."""
        for ranks in sorted(set(rank_sets)):
            if len(ranks) > 1 and ranks not in self.groups:
                timeout = datetime.timedelta(seconds=TIMEOUT_S)
                self.groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        transport.make_polite()

    def axis(self, ranks: tuple[int, ...]) -> Axis | None:
        """The group of these ranks, None for this rank alone."""
        if len(ranks) == 1:
            return None
        return Axis(self.groups[ranks], len(ranks), ranks.index(self.rank), ranks)

    def tensor_axes(self, stage: Stage) -> list[Axis]:
        """One axis per dim of a stage's mesh; an axis of one rank has no group."""
        place = place_in(stage, self.rank)
        axes = []
        for i, parts in enumerate(stage.axes):
            ranks = axis_ranks(stage, self.rank, i)
            axes.append(self.axis(ranks) or Axis(None, parts, place[i], ranks))
        return axes

    def mesh_stage(self, mesh: tuple[int, ...]) -> Stage | None:
        """The neighbours that this rank forms such a mesh with, if there are enough."""
        count = math.prod(mesh)
        start = self.rank // count * count
        devices = tuple(range(start, start + count))
        return Stage(devices, mesh=mesh) if start + count <= self.size else None

    def make_mesh_groups(self, meshes: Iterable[tuple[int, ...]]) -> None:
        """Groups for meshes of neighbours, everywhere; every rank must call this."""
        for mesh in meshes:
            count = math.prod(mesh)
            for start in range(0, self.size - count + 1, count):
                stage = Stage(tuple(range(start, start + count)), mesh=mesh)
                self.make_groups(axis_ranks(stage, rank, axis) for rank in stage.devices
                                 for axis in range(len(mesh)))  # fmt: skip

    def mesh_axes(self, mesh: tuple[int, ...]) -> list[Axis] | None:
        """This rank's axes on a mesh of neighbours; None where they are too few."""
        stage = self.mesh_stage(mesh)
        return self.tensor_axes(stage) if stage else None

    def gather(self, value: T) -> list[T]:
        """Everyone's value, in rank order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def exchange(self, data: bytes) -> list[bytes]:
        """Everyone's bytes, in rank order; nobody runs what another rank sent."""
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.words)
        longest = int(max(lengths))
        mine = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self.words)
        return [bytes(x.numpy())[: int(n)] for x, n in zip(found, lengths, strict=True)]

    def start_max(self, x: Tensor) -> list[Any]:
        """What to wait for until x, on the CPU, is its maximum over all ranks."""
        if self.size == 1:
            return []
        return [dist.all_reduce(x, dist.ReduceOp.MAX, group=self.words, async_op=True)]

    def sum(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        arrive(self.start_sum(x))
        return x

    def start_sum(self, x: Tensor) -> list[Any]:
        """What to wait for until x is its sum over all ranks."""
        return [dist.all_reduce(x, async_op=True)] if self.size > 1 else []

    def agree(self, data: bytes) -> bytes:
        """Rank 0's bytes on every rank."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)], dtype=torch.int64, device=device())
        dist.broadcast(length, 0)
        buffer = torch.zeros(int(length), dtype=torch.uint8, device=device())
        if self.rank == 0:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, 0)
        return bytes(buffer.cpu().numpy())

    def together(self, error: Exception | None) -> None:
        """Raise on every rank what went wrong on any, before anyone waits for the others."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        flag = torch.tensor([0 if error is None else 1], device=device())
        dist.all_reduce(flag)
        if error is not None:
            raise error
        if int(flag):
            raise RunError(f"{int(flag)} other rank(s) refused to go on; see their messages",
                           where=f"rank {self.rank}")  # fmt: skip
