"""Tensor bytes of this process: what lives, and the most that lived at once."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn


@dataclass
class Storage:
    """One allocation: from when to when, where, how large."""

    begin: int
    address: int
    size: int
    end: int | None = None


def recorded(prof: torch.profiler.profile) -> list[Storage]:
    """Every storage allocated under the profiler; a release of an older one is ignored."""
    raw: Any = prof.profiler
    found, todo = [], list(raw.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo.extend(event.children)
        if isinstance(event.extra_fields, torch._C._profiler._ExtraFields_Allocation):
            found.append((event.start_time_ns, event.extra_fields))
    storages: list[Storage] = []
    alive: dict[int, Storage] = {}
    for when, fields in sorted(found, key=lambda item: item[0]):
        if fields.alloc_size > 0:
            alive[fields.ptr] = Storage(when, fields.ptr, fields.alloc_size)
            storages.append(alive[fields.ptr])
        elif old := alive.pop(fields.ptr, None):
            old.end = when
    return [one for one in storages if one.end or alive.get(one.address) is one]


def held_addresses(also: list[Tensor | None] | None = None) -> set[int]:
    """Where the storages lie that some Python tensor holds."""
    tensors = [t for t in (*gc.get_objects(), *(also or ())) if type(t) in (Tensor, nn.Parameter)]
    return {t.untyped_storage().data_ptr() for t in tensors if t.device.type == "cpu"}


@dataclass
class TensorBytes:
    """Counts what is allocated inside the `with`; `mark` notes moments to ask about later.

    Threads of Gloo release some storages unseen by the profiler: one that is never released and
    that no tensor held at the last `look` is left out.
    """

    moments: list[int] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    changes: list[tuple[int, int]] = field(default_factory=list)

    def __enter__(self) -> Self:
        gc.collect()
        activities = [torch.profiler.ProfilerActivity.CPU]
        self.prof = torch.profiler.profile(activities=activities, profile_memory=True)
        self.prof.__enter__()
        return self

    def look(self, also: list[Tensor | None] | None = None) -> None:
        self.held |= held_addresses(also)

    def mark(self) -> int:
        self.moments.append(time.time_ns())
        return len(self.moments) - 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.prof.__exit__(kind, error, trace)
        if kind is None:
            sure = [one for one in recorded(self.prof) if one.end or one.address in self.held]
            self.changes = sorted([(one.begin, one.size) for one in sure]
                                  + [(one.end, -one.size) for one in sure if one.end])  # fmt: skip

    def at(self, mark: int) -> int:
        """Bytes alive at a moment, of what was allocated since the beginning."""
        return sum(size for when, size in self.changes if when <= self.moments[mark])

    def peak(self, start: int, end: int) -> int:
        """The most that was alive between two moments."""
        total = peak = self.at(start)
        for when, size in self.changes:
            if self.moments[start] < when <= self.moments[end]:
                total += size
                peak = max(peak, total)
        return peak
