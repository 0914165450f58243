"""Copies of a parameter stay equal: now and then their checksums are compared over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import RunError
from ..shard.collectives import arrive
from .agree import Facts, checksum, differences, digest
from .params import ParamStore
from .world import World

SECOND = 2  # the first step after the optimizer's first
_NOT_HERE = -(2**62)  # never the most


class Copy(NamedTuple):
    """A rank's part of a parameter; `part` is equal on ranks that hold the same elements."""

    name: str
    part: object
    tensor: Tensor


def held_copies(module: nn.Module, store: ParamStore | None) -> Iterator[Copy]:
    """Without a store, every rank has all."""
    if store is None:
        yield from (Copy(name, (), param) for name, param in module.named_parameters())
        return
    for name, held in store.held.items():
        if isinstance(held.tensor, nn.Parameter):
            rows = held.share.zero and held.share.own_rows()
            yield Copy(name, (held.boxes(), rows), held.part)


class Drift:
    """Looks before a step whether ranks that hold the same elements still have equal values."""

    def __init__(self, world: World, every: int) -> None:
        self.world, self.every = world, every if world.size > 1 else 0
        self.shared: list[int] | None = None  # parts that several ranks hold

    def check(self, step: int, copies: Callable[[], Iterable[Copy]]) -> None:
        """All ranks must call this, before the step communicates."""
        if not self.every or (step % self.every and step != SECOND):
            return
        own = {digest(c.name, c.part): c for c in copies() if c.tensor.numel()}
        if self.shared is None:
            everyone = self.world.everyones(list(own), list[int])
            count = Counter(part for parts in everyone for part in parts)
            self.shared = sorted(part for part, ranks in count.items() if ranks > 1)
        sums = {part: checksum(own[part].tensor) for part in self.shared if part in own}
        bounds = torch.tensor([[sign * sums[part] if part in sums else _NOT_HERE
                                for part in self.shared] for sign in (1, -1)], device="cpu")
        arrive(self.world.start_max(bounds))
        most, least = bounds.tolist()
        apart = [p for p, a, b in zip(self.shared, most, least, strict=True) if a != -b]
        if apart:
            first = {own[p].name: f"checksum {sums[p]:x}" for p in apart[:1] if p in own}
            self._refuse(step, len(apart), first)

    def _refuse(self, step: int, num_apart: int, first: Facts) -> None:
        name, _, held = differences(self.world, first)[0].partition(": ")
        raise RunError(
            f"before step {step} {name} is not the same on all ranks that hold it, as {num_apart} "
            f"of {len(self.shared or ())} shared parameters", where=held,
            fix="find what changed it on some ranks only: an update by hand, a load or an "
            "optimizer that one rank has alone, memory that fails; where devices round otherwise, "
            'guards={"drift_every": 0} turns this off',
        )
