"""Timeline: when everything happened on every rank, simulated or measured alike."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from .limits import Bytes, Name, Rank, Seconds

COMPUTE, COMM, MEMORY = "compute", "comm", "memory"


class Span(Struct, frozen=True, forbid_unknown_fields=True):
    """Something that took from `start_s` to `end_s` on one stream of one rank."""

    rank: Rank
    stream: Name
    name: Name
    start_s: Seconds
    end_s: Seconds


class Parts(Struct, frozen=True):
    """A step decoupled: busy computing, busy communicating, and both at once."""

    compute_s: float
    comm_s: float
    overlap_s: float
    step_s: float

    @property
    def idle_s(self) -> float:
        return self.step_s - (self.compute_s + self.comm_s - self.overlap_s)


class Memory(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of one rank at its peak, and what they are made of."""

    params: Bytes = 0
    grads: Bytes = 0
    optimizer: Bytes = 0
    activations: Bytes = 0
    working: Bytes = 0
    buffers: Bytes = 0
    fixed: Bytes = 0

    @property
    def peak_bytes(self) -> int:
        return (self.params + self.grads + self.optimizer + self.activations + self.working
                + self.buffers + self.fixed)


class Timeline(Struct, frozen=True, forbid_unknown_fields=True):
    """One training step on all ranks. Of those that are `alike` the first one's spans stand for
    all; `of` has them by rank."""

    spans: tuple[Span, ...]
    step_s: Seconds
    memory: tuple[Memory, ...] = ()  # per rank
    source: Name = "simulated"
    alike: tuple[tuple[Rank, ...], ...] = ()

    def of(self, rank: int) -> list[Span]:
        """What a rank did."""
        first = next((ranks[0] for ranks in self.alike if rank in ranks), rank)
        return [replace(span, rank=rank) for span in self.spans if span.rank == first]

    def parts(self, rank: int) -> Parts:
        """How a rank spent the step."""
        mine = self.of(rank)
        compute = merged(s for s in mine if s.stream == COMPUTE)
        comm = merged(s for s in mine if s.stream == COMM)
        both = length(compute) + length(comm) - length(union([*compute, *comm]))
        return Parts(length(compute), length(comm), both, self.step_s)

    @property
    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans}.union(*self.alike))


Interval = tuple[float, float]


def merged(spans: Iterable[Span]) -> list[Interval]:
    """The intervals in which at least one of the spans is under way."""
    return union([(s.start_s, s.end_s) for s in spans])


def union(intervals: list[Interval]) -> list[Interval]:
    """The moments that lie in any of them."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: list[Interval]) -> float:
    """Seconds of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)
