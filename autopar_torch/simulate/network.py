"""Communication on links that were never measured: latency and bandwidth of a datasheet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..cluster import Cluster, Link
from ..profile import Curve, Lookup, Profile


@dataclass(frozen=True)
class Assumed:
    """What a measured curve would say, from the links of a cluster.

    Inside a node and across nodes a collective runs one after the other (hierarchical rings), and
    every rank of a node sends its part of what leaves it.
    """

    op: str
    inside: Link
    across: Link
    num_inside: int
    num_nodes: int
    core: float = 0.0
    held: float = 0.0
    beside: float = 1.0

    def seconds(self, num_bytes: float) -> float:
        if self.op == "send":
            link = self.across if self.num_nodes > 1 else self.inside
            return link.latency_s + num_bytes / link.bytes_per_s
        rounds = 2 if self.op == "sum" else 1
        near = _ring(self.inside, self.num_inside, num_bytes)
        far = _ring(self.across, self.num_nodes, num_bytes / self.num_inside)
        return rounds * (near + far)


def _ring(link: Link, parts: int, num_bytes: float) -> float:
    if parts < 2:
        return 0.0
    return (parts - 1) * link.latency_s + (parts - 1) / parts * num_bytes / link.bytes_per_s


def assumed(op: str, ranks: Sequence[int], cluster: Cluster) -> Assumed:
    counts = Counter(cluster.node_of[rank] for rank in ranks)
    return Assumed(op, cluster.inside, cluster.across, max(counts.values()), len(counts))


class AssumedLookup(Lookup):
    """A profile whose communication is assumed where it was not measured."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self._assumed: dict[tuple[str, int, int, int], Assumed] = {}
        self._alike: dict[Assumed, Assumed] = {}  # equal ones are one, known by its identity
        sizes = {len(node) for node in profile.cluster.nodes}
        self._per_node = sizes.pop() if len(sizes) == 1 else profile.cluster.num_devices

    def curve(self, op: str, ranks: Sequence[int]) -> Curve:
        cluster = self.profile.cluster
        if self.curves and (op, cluster.place(ranks)) in self.curves:
            return super().curve(op, ranks)
        step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        key = (op, len(ranks), step, ranks[0] % self._per_node)  # nodes are alike, or all one
        if key not in self._assumed:
            made = assumed(op, ranks, cluster)
            self._assumed[key] = self._alike.setdefault(made, made)
        return self._assumed[key]  # type: ignore[return-value]

    def card(self, rank: int) -> str:
        """A card of its own for every device: that is what datasheets describe."""
        return own_card(super().card(rank), rank)


def own_card(link: str, rank: int) -> str:
    return f"{link} of {rank}"


def lookup(profile: Profile) -> Lookup:
    """A profile by name, with the links it may assume."""
    return AssumedLookup(profile) if profile.assumed else Lookup(profile)
