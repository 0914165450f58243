"""What was measured, for machines of which some are slower now. Pure.

Computing is scaled by what is left of a rank's speed, and what crosses nodes by what is left of the
slowest link that it uses; latencies stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from msgspec.structs import asdict, replace

from ..cluster import Cluster, Zone, ZoneLink, slowest_of
from ..limits import Fraction
from ..measure.factors import Factors
from ..model import ModelGraph
from ..profile import BlockCosts, Curve, CurveNeed, Lookup, Overheads, Profile, program_key
from ..search.space import Constraints, Option, candidates
from ..simulate.to_measure import needs_of
from .probes import probes, unequal_probes


def changed(profile: Profile, options: Sequence[Option], graph: ModelGraph, num_rows: int,
            limits: Constraints, now: Factors) -> Profile:
    """The profile of the machines as they are now."""
    if now.usual:
        return profile
    old, new = profile.cluster, slowed(profile.cluster, now)
    first = [new.class_of.index(k) for k in range(len(new.classes))]  # a rank of each class
    meshes = {program_key(sharding, again): option.mesh for option in options
              for sharding in option.shardings for again in (False, True)}
    cells = []
    for k, rank in enumerate(first):
        for cell in profile.cells:
            if cell.device == old.class_of[rank]:
                link = _link(old, _group(meshes.get(cell.sharding, ()), rank), now.links)
                cells.append(_slower(cell, k, now.speeds[rank], link))
    return replace(
        profile, cluster=new, cells=tuple(cells), noise={},
        curves=_curves(profile, options, graph, num_rows, limits, new, now),
        overheads=tuple(_overheads(own[old.class_of[rank] if len(own) > 1 else 0],
                                   now.speeds[rank]) for rank in first)
        if (own := profile.overheads) else (),
        jitter=tuple(profile.jitter_of(rank) for rank in first))


def slowed(cluster: Cluster, now: Factors) -> Cluster:
    """Devices with the speeds that are left; nodes with unequal links are in several zones."""
    nodes = tuple(
        tuple(replace(device, speed=device.speed * now.speeds[start + i])
              for i, device in enumerate(node))
        for start, node in zip(cluster.start_of, cluster.nodes, strict=True))
    by_link: dict[float, list[int]] = {}
    for node, link in enumerate(now.links):
        by_link.setdefault(link, []).append(node)
    if cluster.zones or len(by_link) == 1:
        return replace(cluster, nodes=nodes).with_network(min(now.links))
    zones = tuple(Zone(tuple(own), across=cluster.across.slowed(1 / link))
                  for link, own in by_link.items())
    pairs = tuple(ZoneLink((a, b), slowest_of([x for x in (zones[a].across, zones[b].across) if x]))
                  for a, b in combinations(range(len(zones)), 2))
    return replace(cluster, nodes=nodes, zones=zones, links=pairs)


def _group(mesh: Sequence[int], rank: int) -> range:
    """The tensor group of a rank: neighbours, as they were measured."""
    size = math.prod(mesh)
    return range(rank // size * size, rank // size * size + size)


def _link(cluster: Cluster, ranks: Sequence[int], links: Sequence[Fraction]) -> float:
    """What is left of the slowest link between nodes that a group uses."""
    nodes = {cluster.node_of[rank] for rank in ranks if rank < cluster.num_devices}
    return min(links[node] for node in nodes) if len(nodes) > 1 else 1.0


def _slower(cell: BlockCosts, number: int, speed: float, link: float) -> BlockCosts:
    pieces = tuple(replace(cost, **{
        name: value / (link if name.startswith("comm") else speed)
        for name, value in asdict(cost).items() if name.endswith("_s")}) for cost in cell.pieces)
    same = speed == link == 1.0
    return replace(cell, pieces=pieces, device=number, source=cell.source if same else "derived")


def _overheads(own: Overheads, speed: float) -> Overheads:
    return replace(own, **{name: value / speed for name, value in asdict(own).items()
                           if name != "fixed_bytes"})


def _curves(profile: Profile, options: Sequence[Option], graph: ModelGraph, num_rows: int,
            limits: Constraints, new: Cluster, now: Factors) -> tuple[Curve, ...]:
    """Of all that plans exchange on the new cluster, where groups may be of other kinds."""
    found = candidates(options, graph, new.num_devices, num_rows, limits)
    if not profile.curves or not found:
        return ()
    plans = probes(found, options, len(graph.blocks))
    plans += unequal_probes(options, len(graph.blocks), new, num_rows, limits)
    _, needs = needs_of(plans, graph, new, num_rows)
    seen = Lookup(profile)
    made = {(need.op, new.place(need.ranks)): _curve(seen, need, new, now) for need in needs}
    return tuple(curve for curve in made.values() if curve)


def _curve(seen: Lookup, need: CurveNeed, new: Cluster, now: Factors) -> Curve | None:
    """As measured among these ranks, else in the group that is most like it."""
    ranks = tuple(sorted(need.ranks))
    place = seen.profile.cluster.place(ranks)
    found = seen.curves.get((need.op, place)) or seen.nearest(need.op, ranks)
    if found is None:
        return None
    link = _link(seen.profile.cluster, ranks, now.links)
    first = found.points[0][1]
    points = tuple((size, first + (seconds - first) / link if seconds > first else seconds)
                   for size, seconds in found.points)
    same = link == 1.0 and found.group == place
    return replace(found, group=new.place(ranks), points=points,
                   source=found.source if same else "derived")
