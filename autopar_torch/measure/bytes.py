"""Tensor bytes of this process: what lives, and the most that lived at once."""

from __future__ import annotations

import bisect
import gc
import itertools
import os
import time
from dataclasses import dataclass, field
from typing import Any, Self

import torch


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


@dataclass
class TensorBytes:
    """Counts what is allocated inside the `with`; `mark` notes moments to ask about later.

    The profiler misses releases by threads of Gloo, so a storage that is never released is left
    out. So whatever is to be counted must be released before the end.
    """

    moments: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)  # of every change
    alive: list[int] = field(default_factory=list)  # bytes from there on

    def __enter__(self) -> Self:
        gc.collect()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes to the user's screen otherwise
        activities = [torch.profiler.ProfilerActivity.CPU]
        self.prof = torch.profiler.profile(activities=activities, profile_memory=True)
        self.prof.__enter__()
        return self

    def mark(self) -> int:
        self.moments.append(time.time_ns())
        return len(self.moments) - 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.prof.__exit__(kind, error, trace)
        if kind is None:
            sure = [(one.begin, one.end, one.size) for one in recorded(self.prof) if one.end]
            changes = sorted([(begin, size) for begin, _, size in sure]
                             + [(end, -size) for _, end, size in sure])
            self.times = [when for when, _ in changes]
            self.alive = list(itertools.accumulate(size for _, size in changes))

    def _place(self, mark: int) -> int:
        """How many changes came before a moment."""
        return bisect.bisect_right(self.times, self.moments[mark])

    def at(self, mark: int) -> int:
        """Bytes alive at a moment, of what was allocated since the beginning."""
        place = self._place(mark)
        return self.alive[place - 1] if place else 0

    def peak(self, start: int, end: int) -> int:
        """The most that was alive between two moments."""
        return max([self.at(start), *self.alive[self._place(start) : self._place(end)]])


class AllocatorBytes:
    """The same on a GPU, as its allocator says; `peak` is asked for marks one after the other."""

    def __enter__(self) -> Self:
        self.seen: list[tuple[int, int]] = []  # at each mark: bytes, and the most since the last
        torch.cuda.reset_peak_memory_stats()
        return self

    def mark(self) -> int:
        self.seen.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
        torch.cuda.reset_peak_memory_stats()
        return len(self.seen) - 1

    def __exit__(self, *_: object) -> None:
        pass

    def at(self, mark: int) -> int:
        return self.seen[mark][0]

    def peak(self, start: int, end: int) -> int:
        return max(self.at(start), *(most for _, most in self.seen[start + 1 : end + 1]))


Counting = TensorBytes | AllocatorBytes


def counting(device: torch.device) -> Counting:
    return TensorBytes() if device.type == "cpu" else AllocatorBytes()
