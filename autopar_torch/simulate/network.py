"""Communication on links that were never measured: latency and bandwidth of a datasheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ..cluster import Cluster, Link
from ..profile import Curve, Lookup, Profile, own_card


@dataclass(frozen=True)
class Assumed:
    """What a measured curve would say, from the links of a cluster.

    Inside a node and across nodes a collective runs one after the other (hierarchical rings), over
    the slowest link of each that the group uses, and every rank of a node sends its part of what
    leaves it: as many parts at once as the node has ways out for them (`num_ways`).
    """

    op: str
    inside: Link
    across: Link
    num_inside: int
    num_nodes: int
    num_ways: float
    core: float = 0.0
    held: float = 0.0
    beside: float = 1.0

    def seconds(self, num_bytes: float) -> float:
        if self.op == "send":
            link = self.across if self.num_nodes > 1 else self.inside
            return link.latency_s + num_bytes / link.bytes_per_s
        rounds = 2 if self.op == "sum" else 1
        near = _ring(self.inside, self.num_inside, num_bytes)
        far = _ring(self.across, self.num_nodes, num_bytes / self.num_ways)
        return rounds * (near + far)


def _ring(link: Link, parts: int, num_bytes: float) -> float:
    if parts < 2:
        return 0.0
    return (parts - 1) * link.latency_s + (parts - 1) / parts * num_bytes / link.bytes_per_s


def assumed(op: str, ranks: Sequence[int], cluster: Cluster) -> Assumed:
    """A message shares nothing with itself; ranks of a collective on one card share that.

    The node with the fewest ways out holds up the others. Of equal nodes, some have a rank less if
    a stride does not divide them; there the fullest counts.
    """
    parts = cluster.parts(ranks)
    near, far = cluster.near(parts), cluster.far(parts)
    crowding = [cluster.crowding(part, far) for part in parts]
    if op == "send":
        return Assumed(op, near, far.slowed(max(crowding)), 1, len(parts), 1.0)
    ways = [part.num_ranks / times for part, times in zip(parts, crowding, strict=True)]
    return Assumed(op, near.slowed(max(part.bus for part in parts)), far,
                   max(part.num_ranks for part in parts), len(parts),
                   max(ways) if cluster.equal else min(ways))


class AssumedLookup(Lookup):
    """A profile whose communication is assumed where it was not measured."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self._assumed: dict[tuple[object, ...], Assumed] = {}
        self._alike: dict[Assumed, Assumed] = {}  # equal ones are one, known by its identity
        cluster = profile.cluster
        self._period = len(cluster.nodes[0]) if cluster.equal else cluster.num_devices

    def curve(self, op: str, ranks: Sequence[int]) -> Curve:
        cluster = self.profile.cluster
        if self.curves and (op, cluster.place(ranks)) in self.curves:
            return super().curve(op, ranks)
        key = (op, *self._how(ranks))
        if key not in self._assumed:
            made = assumed(op, ranks, cluster)
            self._assumed[key] = self._alike.setdefault(made, made)
        return self._assumed[key]  # type: ignore[return-value]

    def _how(self, ranks: Sequence[int]) -> tuple[object, ...]:
        """Equal for groups that lie alike: at equal distances, and as far into equal nodes."""
        step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        regular = range(ranks[0], ranks[0] + step * len(ranks), step)
        if ranks == regular or tuple(ranks) == tuple(regular):
            return len(ranks), step, ranks[0] % self._period
        return (tuple(ranks),)

    def card(self, rank: int) -> str:
        """A card of its own for every device, if the cluster does not say otherwise: that is what
        datasheets describe."""
        cluster = self.profile.cluster
        return own_card(f"link {cluster.node_of[rank]}", cluster.card(rank))


class NearestLookup(Lookup):
    """A profile of unequal devices: they make more groups than can be measured. What may be the
    fastest by what groups like these take is measured then."""

    def curve(self, op: str, ranks: Sequence[int]) -> Curve:
        key = op, self.profile.cluster.place(ranks)
        if key not in self.curves and (found := self.nearest(op, ranks)):
            self.curves[key] = replace(found, group=key[1], source="derived")
        return super().curve(op, ranks)


def lookup(profile: Profile) -> Lookup:
    """A profile by name, with what it may assume."""
    if profile.assumed:
        return AssumedLookup(profile)
    return NearestLookup(profile) if len(profile.cluster.classes) > 1 else Lookup(profile)
