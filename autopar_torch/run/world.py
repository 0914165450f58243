"""Process groups: one per set of ranks, made once, in the same order on every rank."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import math
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .. import errors, files
from ..errors import AutoparError, RunError
from ..plan import Stage
from ..shard.collectives import Axis, arrive, backend_of
from ..shard.holdings import axis_ranks, place_in
from . import ending, freed_pages, transport
from .lookout import PATIENCE, watching
from .meet import meet, one_node

TIMEOUT_S = 1800.0  # of process groups: the watch ends a wait long before
T = TypeVar("T")
_opened: dict[Any, Any] = {}  # groups of this process, by what they are for and their ranks


def start() -> tuple[int, int]:
    """(rank, world size); joins the processes that torchrun started, if any."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _join()
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _join() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend, own = "gloo", None
    if torch.cuda.is_available():  # where each rank is shown its own only, that is number 0
        number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        backend, own = "nccl", torch.device("cuda", number)
        torch.cuda.set_device(own)
    if one_node() and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other machine may reach the ranks
    store = meet(rank, size)
    with ending.opening():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size,
                                timeout=datetime.timedelta(seconds=TIMEOUT_S), device_id=own)
    atexit.register(_leave, dist.group.WORLD)


def _leave(group: dist.ProcessGroup | None) -> None:
    """Close the groups at the end of a script that did not fail: on a busy machine, threads of
    open groups can abort a process that ends."""
    if dist.group.WORLD is group and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class World:
    """This rank's place, and the groups it shares with others."""

    def __init__(self, rank: int, size: int, limit_s: float = 60.0) -> None:
        self.rank, self.size = rank, size
        self.watch = watching(rank, size, limit_s)
        self.doing = self.watch.doing
        self.timeout = datetime.timedelta(seconds=max(TIMEOUT_S, 2 * PATIENCE * limit_s))
        self.groups: dict[tuple[int, ...], Any] = {}
        self.channels: tuple[Any, Any] = (None, None)
        self.words: Any = None  # the group for tensors on CPUs (None: the usual one)
        self.aside: Any = None  # a group of all ranks for what is no part of a step
        if not torch.cuda.is_available():
            freed_pages.keep_freed_pages()
        if size > 1:
            self.groups[tuple(range(size))] = dist.group.WORLD
            if backend_of() == "nccl":
                self.open_channels()
                self.words = self._group("words", backend="gloo")
            self.aside = self._group("aside")
            transport.run_gloo_threads_as_batch()

    @contextlib.contextmanager
    def meeting(self, name: str) -> Iterator[None]:
        """A call that all ranks must make, but scripts sometimes make on one rank alone. So ranks
        meet first, in a group of its own: in that of a step, Gloo would abort the process."""
        with self.doing(name):
            if self.size > 1:
                dist.all_reduce(torch.zeros(1, device=device()), group=self.aside)
            yield

    def open_channels(self) -> None:
        """NCCL runs what two ranks exchange in a group strictly in order: a receive that is posted
        early would keep back the message that the other side waits for. So each group here carries
        messages between two ranks one way only."""
        self.channels = self._group("there"), self._group("back")

    def _group(self, use: str, ranks: tuple[int, ...] | None = None,
               backend: str | None = None) -> Any:
        """One for all models of this process: they use it in the same order on every rank."""
        if _opened.get("all") is not dist.group.WORLD:
            _opened.clear()
            _opened["all"] = dist.group.WORLD
        key = use, ranks, self.timeout
        if key not in _opened:
            with ending.opening():
                _opened[key] = dist.new_group(
                    ranks and list(ranks), timeout=self.timeout, backend=backend)
        return _opened[key]

    def enter_channels(self, pairs: Iterable[tuple[int, int]]) -> None:
        """The first message between two ranks in a group makes both wait for each other: that
        happens here, in one order on all ranks, before any is posted early."""
        for source, target in sorted(set(pairs)) if self.channels != (None, None) else ():
            if self.rank in (source, target):
                here = torch.zeros(1, device=device())
                channel = self.channel(source, target)
                way = dist.isend if self.rank == source else dist.irecv
                cast(Any, way(here, target + source - self.rank, channel)).wait()

    def channel(self, source: int, target: int) -> Any:
        """The group for messages from one rank to another (None: the usual one)."""
        return self.channels[source > target]

    def make_groups(self, rank_sets: Iterable[tuple[int, ...]]) -> None:
        """Every rank must call this with the same sets."""
        for ranks in sorted(set(rank_sets)):
            if len(ranks) > 1 and ranks not in self.groups:
                self.groups[ranks] = self._group("mesh", ranks)
        transport.run_gloo_threads_as_batch()

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

    def make_mesh_groups(self, meshes: Iterable[tuple[int, ...]]) -> None:
        """Groups for meshes of neighbours, everywhere; every rank must call this."""
        for mesh in meshes:
            for start in range(0, self.size - math.prod(mesh) + 1, math.prod(mesh)):
                stage = _neighbours(mesh, start)
                self.make_groups(axis_ranks(stage, rank, axis) for rank in stage.devices
                                 for axis in range(len(mesh)))

    def mesh_axes(self, mesh: tuple[int, ...]) -> list[Axis] | None:
        """This rank's axes on a mesh of neighbours; None where they are too few."""
        stage = _neighbours(mesh, self.rank - self.rank % math.prod(mesh))
        return self.tensor_axes(stage) if stage.devices[-1] < self.size else None

    def gather(self, value: T) -> list[T]:
        """Each rank's value, in rank order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def everyones(self, value: T, kind: type[T]) -> list[T]:
        """Each rank's value, in rank order, sent as JSON: no rank runs what another one sent."""
        return [files.decode(data, kind) for data in self.exchange(files.encode(value))]

    def exchange(self, data: bytes) -> list[bytes]:
        """Each rank's bytes, in rank order."""
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)], device="cpu"), group=self.words)
        longest = max(1, int(max(lengths)))
        mine = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self.words)
        return [bytes(x.numpy())[: int(n)] for x, n in zip(found, lengths, strict=True)]

    def start_max(self, x: Tensor) -> list[Any]:
        """Works to wait for, after which x, on the CPU, is its maximum over all ranks."""
        if self.size == 1:
            return []
        return [dist.all_reduce(x, dist.ReduceOp.MAX, group=self.words, async_op=True)]

    def sum(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place; aside from the sums of a step."""
        arrive(self.start_sum(x, self.aside))
        return x

    def start_sum(self, x: Tensor, group: Any = None) -> list[Any]:
        """Works to wait for, after which x is its sum over all ranks."""
        return [dist.all_reduce(x, group=group, async_op=True)] if self.size > 1 else []

    def agree(self, data: bytes) -> bytes:
        """The bytes of rank 0 on every rank."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)], device="cpu")
        dist.broadcast(length, 0, group=self.words)
        buffer = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        if self.rank == 0:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, 0, group=self.words)
        return bytes(buffer.numpy())

    def told(self, value: T, kind: type[T]) -> T:
        """The value of rank 0 on every rank, sent as JSON."""
        return files.decode(self.agree(files.encode(value)), kind)

    def jointly(self, act: Callable[[], T]) -> T:
        """What `act` makes here; what goes wrong with it on any rank is raised on every rank,
        before anyone waits for the others."""
        made, error = None, None
        try:
            made = act()
        except AutoparError as found:
            error = found
        except Exception as found:  # whatever it is: the others must hear of it
            error = RunError(f"{type(found).__name__}: {found}")
            error.__cause__ = found
        said = error and (type(error).__name__, error.what, error.where, error.fix)
        for rank, data in enumerate(self.exchange(files.encode(said))):
            if told := json.loads(data):
                kind, what, where, fix = told
                raise error or vars(errors).get(kind, RunError)(
                    f"rank {rank} refused to go on: {what}", where=where, fix=fix)
        return cast(T, made)

    def by_first(self, kind: type[T], act: Callable[[], T]) -> T:
        """What `act` makes on rank 0, told to all as JSON; or an error on every rank."""
        made = self.jointly(lambda: None if self.rank else act())
        return self.told(cast(T, made), kind)


def _neighbours(mesh: tuple[int, ...], start: int) -> Stage:
    return Stage(tuple(range(start, start + math.prod(mesh))), mesh=mesh)
