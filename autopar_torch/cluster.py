"""Cluster: devices, links, and how they change; every number with its source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType, structs

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
from .zones import Link, NodePart, Zone, ZoneLink, slowest_of


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
    """Devices by node, in rank order; links inside a node and between nodes.

    Where nodes differ in their links, each is in a zone; `links` join two zones. `inside` and
    `across` hold where these say nothing.
    """

    nodes: Annotated[tuple[Node, ...], Meta(min_length=1)]
    inside: Link
    across: Link
    changes: tuple[Change, ...] = ()
    cores: tuple[Rank, ...] = ()  # per rank: ranks with the same number share a core; (): none do
    # Unset, they leave no trace in a file.
    zones: Annotated[tuple[Zone, ...], Meta(min_length=1)] | UnsetType = UNSET
    links: Annotated[tuple[ZoneLink, ...], Meta(min_length=1)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        count = self.num_devices
        refuse(not self.nodes or not all(self.nodes), "a cluster without nodes, or an empty node")
        refuse(len(self.cores) not in (0, count), f"{len(self.cores)} cores for {count} devices")
        there = {f"link {node}" for node in range(len(self.nodes))}
        there |= {f"core {self.core(r)}" for r in range(count)} if self.changes else set()
        for change in self.changes:
            refuse(change.name not in there, f"a change of {change.name}, but there are "
                   f"{len(self.nodes)} nodes (link n) of {count} ranks (core n)")
        self._refuse_zones()

    def _refuse_zones(self) -> None:
        zones, count = self.zones or (), len(self.nodes)
        told = Counter(node for zone in zones for node in zone.nodes)
        wrong = [n for n in (*range(count), *told) if n >= count or told[n] != 1]
        refuse(bool(zones and wrong), f"each of the {count} nodes is in one zone: not so node "
               f"{wrong[:1]} in {len(zones)} zones")
        pairs = [tuple(sorted(link.zones)) for link in self.links or ()]
        for a, b in pairs:
            refuse(a == b or b >= len(zones), f"a link of zones {a} and {b}; it joins two of the "
                   f"{len(zones)} zones (a zone's own network is its `across`)")
        refuse(len(set(pairs)) < len(pairs), f"links of zones {pairs[:9]}: a pair is there twice")

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
    def zone_of(self) -> tuple[int, ...]:
        """Per node: the number of its zone."""
        number = {n: z for z, zone in enumerate(self.zones or ()) for n in zone.nodes}
        return tuple(number.get(n, 0) for n in range(len(self.nodes)))

    @cached_property
    def classes(self) -> tuple[Device, ...]:
        """The distinct devices, in rank order: what is measured is measured for each.

        Devices of two zones are two classes even if they are alike, since what they exchange is
        not: how long a block takes under tensor parallelism, or a message to the next stage.
        """
        return tuple(device for device, _ in dict.fromkeys(self._kinds))

    @cached_property
    def class_of(self) -> tuple[int, ...]:
        """Per rank: the number of its class."""
        number = {kind: k for k, kind in enumerate(dict.fromkeys(self._kinds))}
        return tuple(number[kind] for kind in self._kinds)

    @property
    def _kinds(self) -> list[tuple[Device, int]]:
        return [(device, z) for node, z in zip(self.nodes, self.zone_of, strict=True)
                for device in node]

    def core(self, rank: int) -> int:
        """The number of a rank's core; ranks that share a core have the same one."""
        return self.cores[rank] if self.cores else rank

    def zone(self, rank: int) -> Zone:
        """The zone of a rank; without zones one that says nothing."""
        node = self.node_of[rank]
        return self.zones[self.zone_of[node]] if self.zones else Zone((node,))

    def card(self, rank: int) -> int:
        """The first of the ranks that share a rank's network card."""
        return self._sharing(rank, self.zone(rank).cards)

    def bus(self, rank: int) -> int:
        """The first of the ranks that share a rank's bus."""
        return self._sharing(rank, self.zone(rank).buses)

    def _sharing(self, rank: int, count: int) -> int:
        """The first of those with the same number, if a rank's node has so many of something."""
        node = self.node_of[rank]
        start, size = self.start_of[node], len(self.nodes[node])
        if not 0 < count < size:
            return rank
        number = (rank - start) * count // size
        return start + math.ceil(number * size / count)

    @cached_property
    def start_of(self) -> tuple[int, ...]:
        """Per node: its first rank."""
        return tuple(accumulate((len(node) for node in self.nodes[:-1]), initial=0))

    @cached_property
    def shares(self) -> bool:
        """Whether devices share cards or buses."""
        return any(zone.cards or zone.buses for zone in self.zones or ())

    @cached_property
    def equal(self) -> bool:
        """Whether all devices and nodes are alike, and share nothing."""
        first = self.nodes[0]
        return not self.zones and len(set(first)) == 1 and all(n == first for n in self.nodes)

    # --- groups of ranks ------------------------------------------------------------------------

    def parts(self, ranks: Collection[int]) -> list[NodePart]:
        """A group by the nodes on which it lies."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.node_of[rank], []).append(rank)
        return sorted(self._part(own, len(own) < len(ranks)) for own in found.values())

    def _part(self, ranks: Sequence[int], leaves: bool) -> NodePart:
        classes = sorted(self.class_of[rank] for rank in ranks)
        told = classes if len(set(classes)) > 1 else classes[:1]
        bus = _most_alike(self.bus, ranks) if self.shares else 1
        card = _most_alike(self.card, ranks) if self.shares and leaves else 1
        return NodePart(len(ranks), ".".join(map(str, told)), bus, card,
                    self.zone_of[self.node_of[ranks[0]]])

    def near(self, parts: Sequence[NodePart]) -> Link:
        """The slowest link that a group uses inside nodes."""
        zones = {p.zone for p in parts if p.num_ranks > 1} or {p.zone for p in parts}
        return slowest_of(self._inside(zone) for zone in zones)

    def far(self, parts: Sequence[NodePart]) -> Link:
        """The slowest link that a group uses between nodes."""
        zones = Counter(part.zone for part in parts)
        pairs = [(z, z) for z, count in zones.items() if count > 1 or len(zones) == 1]
        pairs += combinations(sorted(zones), 2)
        return slowest_of(self._between.get(pair, self.across) for pair in pairs)

    def crowding(self, part: NodePart, link: Link) -> float:
        """How many times slower each rank's messages over a link between nodes are, if all ranks
        of a part send at once: they share cards, and buses if there are some."""
        times = float(part.card)
        if self.zones and self.zones[part.zone].buses:
            times = max(times, part.bus * link.bytes_per_s / self._inside(part.zone).bytes_per_s)
        return times

    def _inside(self, zone: int) -> Link:
        return (self.zones[zone].inside if self.zones else None) or self.inside

    @cached_property
    def _between(self) -> dict[tuple[int, ...], Link]:
        own = {(z, z): zone.across for z, zone in enumerate(self.zones or ()) if zone.across}
        return own | {tuple(sorted(link.zones)): link.link for link in self.links or ()}

    def link(self, ranks: Sequence[int], beside: Sequence[int] = ()) -> Link:
        """The slowest link that a group uses, while the ranks `beside` it do the same."""
        parts, everyone = self.parts(ranks), self.parts({*ranks, *beside})
        if len(parts) == 1:
            return self.near(parts).slowed(max(part.bus for part in everyone))
        far = self.far(parts)
        return far.slowed(max(self.crowding(part, far) for part in everyone))

    def place(self, ranks: Collection[int]) -> str:
        """How a group lies; groups with the same text take equal times. `2+2 on 4`: two ranks on
        each of two nodes, on four cores. `1+1 on 2 of 0+1`: of the classes 0 and 1, where there
        are several. `2+2 on 4 of 0+0 by 1.2+1.2`: on each node two ranks share a card."""
        parts = self.parts(ranks)
        cores = len({self.core(rank) for rank in ranks})
        text = "+".join(str(part.num_ranks) for part in parts) + f" on {cores}"
        if len(self.classes) > 1:
            text += " of " + "+".join(part.classes for part in parts)
        if self.shares:
            text += " by " + "+".join(f"{part.bus}.{part.card}" for part in parts)
        return text

    def with_network(self, factor: float) -> Cluster:
        """The same with so many times the bandwidth between nodes."""
        own, pairs = self.zones or (), self.links or ()
        zones = tuple(structs.replace(zone, across=zone.across.slowed(1 / factor))
                      if zone.across else zone for zone in own)
        links = tuple(structs.replace(pair, link=pair.link.slowed(1 / factor)) for pair in pairs)
        return structs.replace(self, across=self.across.slowed(1 / factor), zones=zones or UNSET,
                               links=links or UNSET)


def _most_alike(number: Callable[[int], int], ranks: Iterable[int]) -> int:
    return max(Counter(map(number, ranks)).values())


CPU_CORE = Device("CPU core", 4e10, 5e9, 4 * 2**30, "assumed")
LOOPBACK = Link(1e-3, 1.4e9, 1.6)  # latency: mostly waiting for ranks that share cores
GPU = Device("A100-80", 312e12, 2e12, 80 * 2**30)
NVLINK, INFINIBAND = Link(1e-5, 2e11), Link(2e-5, 2.5e10)

__all__ = ["CPU_CORE", "GPU", "INFINIBAND", "LOOPBACK", "NVLINK", "Change", "Cluster", "Device",
           "Link", "Zone", "ZoneLink", "slowest_of"]
