"""Times of collectives and messages over their sizes, with the functions that training uses."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import add
from statistics import median
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..cluster import Cluster
from ..profile import Curve, CurveNeed, around, few
from ..shard.collectives import Axis, added, arrive, gather_pieces, start_scatter, start_sum
from ..shard.watch import between, stamp
from .overlap import Overlap, Probe, overlap, probe
from .samples import timed
from .stats import trimmed_mean, uncertainty

MOST_POINTS = 5
FLUSH = 1 << 22
T = TypeVar("T")
LATE = ("sum", "scatter")  # they end a step, when some ranks come later than others
WARM_UP = 2  # rounds that are not timed
PROBES, PROBE_BYTES = 12, 1 << 20  # exchanges beside computing, to see how they share a core
ROWS, WIDTH, DEPTH = 128, 192, 4  # of the layers that run before each message and collective


class Places(Protocol):
    """This rank's place among all, and its groups."""

    rank: int
    size: int

    def make_groups(self, rank_sets: Any) -> None: ...

    def axis(self, ranks: tuple[int, ...]) -> Axis | None: ...

    def sum(self, x: Tensor) -> Tensor: ...

    def gather(self, value: T) -> list[T]: ...

    def jointly(self, act: Callable[[], T]) -> T: ...


class Seen(NamedTuple):
    """What one rank measured of a line."""

    samples: dict[float, list[float]]  # seconds by size
    rests: dict[float, list[float]]  # seconds from its end to the end of a barrier, by size
    probes: list[Probe]
    held: list[float]  # part of a message's time in which it blocks sender and receiver


def barrier(places: Places) -> None:
    if places.size > 1:
        dist.barrier()


class Line:
    """One kind of communication among the ranks of one group, at several sizes."""

    def __init__(self, op: str, ranks: tuple[int, ...], sizes: Sequence[float], places: Places,
                 device: torch.device, uneven: bool) -> None:
        self.op, self.ranks, self.device, self.uneven = op, ranks, device, uneven
        self.sizes = self.wanted = few(sorted(set(sizes)), MOST_POINTS)
        self.axis = places.axis(ranks) if places.rank in ranks else None
        self.seen = Seen(defaultdict(list), defaultdict(list), [], [])
        self.other = computing(device)

    def refine(self, sizes: Iterable[float]) -> None:
        wanted = {point for size in sizes for point in around(size, self.sizes)}
        self.wanted = sorted(wanted)

    def round(self) -> None:
        if self.axis is None:
            return
        for size in self.wanted:
            torch.ones(FLUSH, device=self.device)  # clears the cache, as a block does
            dist.barrier(group=self.axis.group)
            if self.op == "send":
                self._message(size, self.axis)
            else:
                self._collective(size, self.axis)
            done = stamp()
            dist.barrier(group=self.axis.group)
            self.seen.rests[size].append(between(done, stamp()))

    def probe(self) -> None:
        """Measure how this communication and computing share a core."""
        if self.axis is not None and len(self.seen.probes) < PROBES:
            size = min(self.sizes[-1], PROBE_BYTES)
            self.seen.probes.append(probe(self.op, size, self.axis, self.device))

    def _collective(self, size: float, axis: Axis) -> None:
        """Time one collective. Ranks compute before it, as in training. If `uneven`, one rank after
        the other comes late: a rank that slept meanwhile receives a long message more slowly."""
        work = self._work(size, axis)
        self.other()
        if self.uneven and len(self.seen.samples[size]) % axis.parts == axis.index:
            self.other()
        self.seen.samples[size].append(timed(work))

    def own(self, size: float) -> list[float]:
        """Samples in which this rank came last, and so did not wait."""
        if self.axis is None or not self.uneven:
            return self.seen.samples[size]
        return self.seen.samples[size][self.axis.index :: self.axis.parts]

    def _message(self, size: float, axis: Axis) -> None:
        sent = torch.ones(max(1, int(size) // 4), device=self.device)
        both = [_to_and_fro(sent, axis, first, self.other) for first in (0, 1)]
        seconds, posting = both[axis.index]
        self.seen.samples[size].append(seconds)
        self.seen.held.append(min(1.0, posting / max(seconds, 1e-9)))

    def _work(self, size: float, axis: Axis) -> Callable[[], object]:
        count = max(1, int(size) // 4)
        parts = axis.parts
        match self.op:
            case "sum":
                flat = torch.ones(count, device=self.device)
                return lambda: arrive(start_sum(flat, axis))
            case "gather":
                piece = torch.ones(max(1, count // parts), device=self.device)
                return lambda: gather_pieces(piece, axis)
            case _:
                rows = torch.ones((parts, max(1, count // parts)), device=self.device)
                return lambda: _scatter(rows, axis)


def _scatter(flat: Tensor, axis: Axis) -> None:
    """As a bucket of ZeRO does it."""
    got, works = start_scatter(flat, axis)
    arrive(works)
    added(got.unbind())


def _to_and_fro(sent: Tensor, axis: Axis, first: int,
                other: Callable[[], None]) -> tuple[float, float]:
    """Send a message there and one of the same size back. Returns the seconds of one way, as rank
    `first` measures them, and the seconds in which posting a send and a receive blocks this rank.

    A receiver waits for its message. A sender computes before it sends, so that its caches hold
    other things, as in training; it sends along how long that took, to be taken off the time. On a
    CPU receives are posted before that.
    """
    got, peer = torch.empty_like(sent), axis.ranks[1 - axis.index]
    starts, coming = axis.index == first, None
    other()
    begun_s = time.perf_counter()
    if sent.device.type == "cpu":
        coming = dist.irecv(got, peer, group=axis.group)
    asking_s = time.perf_counter() - begun_s
    start = stamp()
    if not starts:
        _arrived(coming, got, peer, axis)
    begin = stamp()
    other()
    sent[0] = between(begin, stamp())
    begun_s = time.perf_counter()
    gone: Any = dist.isend(sent, peer, group=axis.group)
    busy_s = asking_s + time.perf_counter() - begun_s
    if starts:
        _arrived(coming, got, peer, axis)
    seconds = between(start, stamp())
    gone.wait()
    return max(0.0, seconds - float(sent[0]) - float(got[0])) / 2, busy_s / 2


def computing(device: torch.device, rows: int = ROWS) -> Callable[[], None]:
    """Forward and backward of some layers."""
    with device:
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH),
                  nn.LayerNorm(WIDTH)]
        block, x = nn.Sequential(*layers * DEPTH), torch.ones(rows, WIDTH)
    return lambda: block(x).sum().backward()


def _arrived(coming: Any, got: Tensor, other: int, axis: Axis) -> None:
    work: Any = coming or dist.irecv(got, other, group=axis.group)
    work.wait()


def _each(line: Line, seen: Sequence[Seen], size: float) -> list[float]:
    """Seconds of every exchange. Each rank has messages of its own. A collective lasts from when
    its last rank comes to it until the last rank is done, which may be another one."""
    columns = [own.samples[size] for own in seen]
    if line.op == "send":
        return [x for own in columns for x in own]
    rests = [own.rests[size] for own in seen]
    rows = zip(zip(*columns, strict=True), zip(*rests, strict=True), strict=True)
    return [min(map(add, own, rest)) - min(rest) for own, rest in rows]


def _curve(key: tuple[str, str], line: Line, seen: Sequence[Seen]) -> Curve:
    points = tuple((size, trimmed_mean(_each(line, seen, size))) for size in line.sizes)
    probes = [x for own in seen for x in own.probes]
    both = overlap(probes) if probes else Overlap(0.0, 1.0)
    held = [x for own in seen for x in own.held]
    return Curve(*key, points, both.core, median(held) if held else 0.0, both.speed)


class Lines:
    """All communication that some plans need, one group of each kind."""

    def __init__(self, needs: Sequence[CurveNeed], cluster: Cluster, places: Places,
                 device: torch.device, late: Collection[str] = LATE) -> None:
        groups: dict[tuple[str, str], tuple[tuple[int, ...], set[float]]] = {}
        for need in sorted(needs, key=lambda n: (n.op, n.ranks)):
            ranks = tuple(sorted(need.ranks))
            key = (need.op, cluster.place(ranks))
            groups.setdefault(key, (ranks, set()))[1].add(max(4.0, need.num_bytes))
        places.make_groups(ranks for ranks, _ in groups.values())
        self.places, self.cluster = places, cluster
        self.lines = {key: Line(key[0], ranks, list(sizes), places, device, key[0] in late)
                      for key, (ranks, sizes) in sorted(groups.items())}

    def refine(self, needs: Sequence[CurveNeed]) -> None:
        """From now on a round measures only what these need."""
        asked: dict[tuple[str, str], set[float]] = {}
        for need in needs:
            asked.setdefault((need.op, self.cluster.place(need.ranks)), set()).add(need.num_bytes)
        for key, line in self.lines.items():
            line.refine(asked.get(key, ()))

    def round(self) -> None:
        """Measure one line after the other; all other ranks are idle."""
        for line in self.lines.values():
            if line.wanted:
                line.round()
                barrier(self.places)
                line.probe()
                barrier(self.places)

    def warm_up(self) -> None:
        """Rounds whose times are thrown away."""
        for _ in range(WARM_UP):
            self.round()
        for line in self.lines.values():
            for times in (line.seen.samples, line.seen.rests, line.seen.held):
                times.clear()

    def result(self) -> tuple[Curve, ...]:
        """The same on all ranks, which must all call this."""
        everyone = self.places.gather({key: line.seen for key, line in self.lines.items()})
        return tuple(_curve(key, line, [everyone[rank][key] for rank in line.ranks])
                     for key, line in self.lines.items())

    def errors(self) -> dict[str, float]:
        """How uncertain the time of every message is in which this rank takes part."""
        return {f"{op} of {size:.0f} bytes among {group} cores": uncertainty(line.own(size))
                for (op, group), line in self.lines.items() if line.axis
                for size in line.wanted}
