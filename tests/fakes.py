"""A world of as many ranks as one likes, of which only rank 0 is here: torch's fake backend.

Collectives return at once: a gather gives every rank this rank's value, a sum this rank's part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend
from torch.utils._python_dispatch import TorchDispatchMode

from autopar_torch.run import lookout, world


@contextlib.contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """This process is rank 0 of so many; nobody watches over the others."""
    plain = world.watching
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    world.watching = lambda rank, _, limit_s: lookout.watching(0, 1, limit_s)
    try:
        yield
    finally:
        world.watching = plain
        dist.destroy_process_group()


class Recorder(TorchDispatchMode):
    """Which collectives and messages begin, and the ops between them, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    @property
    def exchanges(self) -> set[str]:
        return {name.removeprefix("c10d::") for name in self.ops if name.startswith("c10d::")}
