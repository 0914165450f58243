"""Cluster: devices, links, and how they change; every number with its source."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, structs

from . import files
from .errors import PlanError
from .limits import (
    Amount,
    ByteRate,
    Bytes,
    Factor,
    Fraction,
    Latency,
    Name,
    Rank,
    Rate,
    Seconds,
    increase,
    refuse,
)


class Link(Struct, frozen=True, forbid_unknown_fields=True):
    """A way between devices: seconds before the first byte, bytes per second after it.

    `scatter`: how much slower a reduce-scatter is than an all-gather (Gloo sums on the CPU).
    """

    latency_s: Latency
    bytes_per_s: ByteRate
    scatter: Annotated[float, Meta(ge=1.0, le=1e3)] = 1.0


class Device(Struct, frozen=True, forbid_unknown_fields=True):
    """What one device can do."""

    name: Name
    flops_per_s: Rate
    memory_bytes_per_s: ByteRate
    memory_bytes: Annotated[int, Meta(ge=1, le=2**50)]
    source: Name = "datasheet"
    efficiency: tuple[tuple[Amount, Fraction], ...] = ()  # (FLOPs of a matmul, part of the peak)
    memory_efficiency: Fraction = 1.0
    launch_s: Latency = 0.0  # least time of an operator
    fixed_bytes: Bytes = 0  # taken before the first tensor
    peaks: tuple[tuple[Name, Rate], ...] = ()  # (precision, FLOP/s) where one has its own
    speed: Fraction = 1.0  # as probed: part of the speed of the fastest device that is named alike

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.efficiency]
        refuse(not increase([0.0, *sizes]), f"efficiency at {sizes} FLOPs, which must increase")
        names = [name for name, _ in self.peaks]
        refuse(len(set(names)) < len(names), f"peaks of {names}: one is there twice")

    def matmul_seconds(self, flops: float, precision: str = "") -> float:
        """Time of one matrix product; efficiency lies on lines over the logarithm of its size.

        A faster format gets through sooner, so it fills the device as a smaller product would.
        """
        peak = dict(self.peaks).get(precision, self.flops_per_s)
        size = flops * self.flops_per_s / peak
        return self.launch_s + flops / (peak * self._efficiency(size) * self.speed)

    def memory_seconds(self, num_bytes: float) -> float:
        """Time of an operator that only moves bytes."""
        return self.launch_s + num_bytes / (self.memory_bytes_per_s * self.memory_efficiency
                                            * self.speed)

    def _efficiency(self, flops: float) -> float:
        points = self.efficiency
        if not points:
            return 1.0
        if flops <= points[0][0]:
            return points[0][1]
        for (x0, y0), (x1, y1) in pairwise(points):
            if flops <= x1:
                return y0 + (y1 - y0) * math.log(flops / x0) / math.log(x1 / x0)
        return points[-1][1]


SLOWEST = 1e-6  # of a speed that is left


class Change(Struct, frozen=True, forbid_unknown_fields=True):
    """From `at_s` on, a resource runs at `factor` of its speed (0: gone). `name`: `core 3`, the
    core of a rank as `Cluster.core` numbers it, or `link 0`, which joins node 0 to the others."""

    at_s: Seconds
    name: Annotated[str, Meta(pattern=r"^(core|link) (0|[1-9][0-9]{0,8})$")]
    factor: Factor

    def __post_init__(self) -> None:
        refuse(0 < self.factor < SLOWEST, f"a factor of {self.factor}; say 0 if it is gone")


Node = Annotated[tuple[Device, ...], Meta(min_length=1)]


class Cluster(Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """Devices by node, in rank order; links inside a node and between nodes."""

    nodes: Annotated[tuple[Node, ...], Meta(min_length=1)]
    inside: Link
    across: Link
    changes: tuple[Change, ...] = ()
    cores: tuple[Rank, ...] = ()  # per rank: ranks with the same number share a core; (): none do

    def __post_init__(self) -> None:
        count = self.num_devices
        refuse(not self.nodes or not all(self.nodes), "a cluster without nodes, or an empty node")
        refuse(len(self.cores) not in (0, count), f"{len(self.cores)} cores for {count} devices")
        there = {f"link {node}" for node in range(len(self.nodes))}
        there |= {f"core {self.core(r)}" for r in range(count)} if self.changes else set()
        for change in self.changes:
            refuse(change.name not in there, f"a change of {change.name}, but there are "
                   f"{len(self.nodes)} nodes (link n) of {count} ranks (core n)")

    @property
    def num_devices(self) -> int:
        return sum(len(node) for node in self.nodes)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(device for node in self.nodes for device in node)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Per rank: the number of its node."""
        return tuple(n for n, node in enumerate(self.nodes) for _ in node)

    @cached_property
    def classes(self) -> tuple[Device, ...]:
        """The distinct devices, in rank order: what is measured is measured for each."""
        return tuple(dict.fromkeys(self.devices))

    @cached_property
    def class_of(self) -> tuple[int, ...]:
        """Per rank: the number of its class."""
        number = {device: k for k, device in enumerate(self.classes)}
        return tuple(number[device] for device in self.devices)

    def core(self, rank: int) -> int:
        """The number of a rank's core; ranks that share a core have the same one."""
        return self.cores[rank] if self.cores else rank

    def link(self, ranks: Sequence[int]) -> Link:
        """The slowest link that a group uses."""
        return self.inside if len({self.node_of[r] for r in ranks}) == 1 else self.across

    def place(self, ranks: Sequence[int]) -> str:
        """How a group lies; groups with the same text take equal times. `2+2 on 4`: two ranks on
        each of two nodes, on four cores."""
        counts = Counter(self.node_of[r] for r in ranks)
        cores = len({self.core(r) for r in ranks})
        return "+".join(map(str, sorted(counts.values()))) + f" on {cores}"


class Hardware(Struct, frozen=True, forbid_unknown_fields=True):
    """A datasheet: one device, how many share a node, what joins them, and where that is from.

    Links are per device and direction, as the datasheet has them; `inside_reached` and
    `across_reached` are the parts of them that collectives get.
    """

    device: Device
    per_node: Annotated[int, Meta(ge=1, le=2**16)]
    inside: Link
    across: Link
    inside_reached: Fraction = 1.0
    across_reached: Fraction = 1.0
    # Part of a kind of exchange that hides behind computing.
    overlap: dict[str, Annotated[float, Meta(ge=0.0, le=1.0)]] = {}
    aliases: tuple[Name, ...] = ()
    sources: dict[str, str] = {}  # number -> the datasheet it is from
    calibrated: dict[str, str] = {}  # number -> what it was fitted on

    def cluster(self, num_nodes: int = 1, per_node: int = 0) -> Cluster:
        node = (self.device,) * (per_node or self.per_node)
        return Cluster((node,) * num_nodes, _reached(self.inside, self.inside_reached),
                       _reached(self.across, self.across_reached))


def _reached(link: Link, part: float) -> Link:
    return structs.replace(link, bytes_per_s=link.bytes_per_s * part)


@cache
def known() -> dict[str, Hardware]:
    """Hardware by name: the files of `profiling/hardware`, which a wheel carries along."""
    here = Path(__file__).resolve().parent
    folders = (here / "hardware", here.parent / "profiling" / "hardware")
    paths = [path for folder in folders for path in sorted(folder.glob("*.json"))]
    return {path.stem: files.load(path, Hardware) for path in paths}


def hardware(name: str) -> Hardware:
    """A description by its name or an alias, whatever the case."""
    for key, found in known().items():
        if name.lower() in {text.lower() for text in (key, *found.aliases)}:
            return found
    raise PlanError(f"no hardware is called {name!r}", where="profiling/hardware",
                    fix=f"known are: {', '.join(known()) or 'none'}")


def named(text: str) -> Cluster:
    """`8xH200`: one node of eight devices; `16x8xH100`: sixteen nodes."""
    match = re.fullmatch(r"(?:([0-9]{1,7})x)?([0-9]{1,7})x([0-9]*[A-Za-z]\S*)", text.strip())
    count = int(match[1] or 1) * int(match[2]) if match else 0
    if not match or not 0 < count <= MOST_DEVICES:
        raise PlanError(f"{text[:80]!r} names no cluster of 1 to {MOST_DEVICES} devices",
                        where="cluster", fix="write 8xH200, or 16x8xH100 for 16 nodes")
    return hardware(match[3]).cluster(int(match[1] or 1), int(match[2]))


MOST_DEVICES = 2**17
CPU_CORE = Device("CPU core", 4e10, 5e9, 4 * 2**30, "assumed")
LOOPBACK = Link(1e-3, 1.4e9, 1.6)  # latency: mostly waiting for ranks that share cores
GPU = Device("A100-80", 312e12, 2e12, 80 * 2**30)
NVLINK, INFINIBAND = Link(1e-5, 2e11), Link(2e-5, 2.5e10)
