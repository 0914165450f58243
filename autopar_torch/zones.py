"""Links, and the zones of a cluster: who reaches whom over what, and what they share of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, structs

from .limits import ByteRate, Index, Latency


class Link(Struct, frozen=True, forbid_unknown_fields=True):
    """A way between devices: seconds before the first byte, bytes per second after it.

    `scatter`: how much slower a reduce-scatter is than an all-gather (Gloo sums on the CPU).
    """

    latency_s: Latency
    bytes_per_s: ByteRate
    scatter: Annotated[float, Meta(ge=1.0, le=1e3)] = 1.0

    def slowed(self, times: float) -> Link:
        """With so much less of its bandwidth."""
        return self if times == 1 else structs.replace(self, bytes_per_s=self.bytes_per_s / times)


def slowest_of(links: Iterable[Link]) -> Link:
    """As slow in everything as any of them is."""
    found = list(links)
    return Link(max(link.latency_s for link in found), min(link.bytes_per_s for link in found),
                max(link.scatter for link in found))


class Zone(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Nodes that reach each other over one network. Links that it does not give are the cluster's.

    Neighbours of a node share what is scarcer than devices: its network cards, and its buses
    (PCIe), which also carry what leaves the node. 0: every device has its own.
    """

    nodes: Annotated[tuple[Index, ...], Meta(min_length=1)]
    inside: Link | None = None  # of each of its nodes
    across: Link | None = None  # between them
    cards: Annotated[int, Meta(ge=0, le=2**16)] = 0  # of a node
    buses: Annotated[int, Meta(ge=0, le=2**16)] = 0


class ZoneLink(Struct, frozen=True, forbid_unknown_fields=True):
    """What joins the nodes of two zones."""

    zones: tuple[Index, Index]
    link: Link


class NodePart(NamedTuple):
    """Ranks of a group on one node, and how many of them share a bus or a card at most."""

    num_ranks: int
    classes: str
    bus: int
    card: int
    zone: int
