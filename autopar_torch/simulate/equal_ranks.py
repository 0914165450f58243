"""Ranks that do the same at the same time: one of them can stand for all."""

from __future__ import annotations

from ..cluster import Cluster
from ..plan import Plan, Replica
from ..profile import Profile

Representatives = dict[int, int]  # rank -> the first rank that does the same at the same time


def representatives(plan: Plan, profile: Profile, num_rows: int) -> Representatives:
    """If replicas are equal and lie on equal nodes: the first rank of each stage of the first one.

    Only with datasheets, whose devices share nothing and never change. Otherwise every rank is its
    own representative. If ZeRO cuts a parameter unevenly, a representative has the largest piece.
    """
    themselves = {rank: rank for rank in range(profile.cluster.num_devices)}
    if not (_apart(profile) and _equal(plan, profile.cluster, num_rows)):
        return themselves
    first = plan.replicas[0]
    return themselves | {rank: ahead.devices[0] for replica in plan.replicas
                         for stage, ahead in zip(replica.stages, first.stages, strict=True)
                         for rank in stage.devices}


def equal_groups(found: Representatives) -> tuple[tuple[int, ...], ...]:
    """The ranks that each representative stands for, itself first; only of several ranks."""
    groups: dict[int, list[int]] = {}
    for rank in sorted(found):
        groups.setdefault(found[rank], []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values() if len(ranks) > 1)


def _apart(profile: Profile) -> bool:
    """Whether every device has a core and a card of its own, and none changes over time."""
    cores, changes = profile.cluster.cores, profile.cluster.changes
    measured = profile.curves or not profile.assumed or not profile.quiet
    return not measured and not changes and len(set(cores)) == len(cores)


def _equal(plan: Plan, cluster: Cluster, num_rows: int) -> bool:
    """Whether replicas are equal and lie alike on nodes, and stages are equal groups of devices of
    one node each, one rank after the other. With ZeRO, groups of two axes are not equal: their
    places gather in different orders."""
    shapes = {_shape(replica, cluster) for replica in plan.replicas}
    rows = {tuple(end - start for start, end in spans) for spans in plan.micro_batches(num_rows)}
    groups = [stage.devices for replica in plan.replicas for stage in replica.stages]
    sizes = {(len(group), len({cluster.node_of[rank] for rank in group})) for group in groups}
    same = len(shapes) == len(rows) == len(sizes) == 1 and max(sizes)[1] == 1
    in_turn = all(group == tuple(range(group[0], group[0] + len(group))) for group in groups)
    crossing = plan.zero and any(len(s.axes) > 1 for r in plan.replicas for s in r.stages)
    return same and in_turn and not crossing and _first(plan)


def _first(plan: Plan) -> bool:
    """Whether the first replica has the smallest ranks of every stage, so that its rank is the
    first of its team."""
    pairs = (zip(replica.stages, plan.replicas[0].stages, strict=True) for replica in plan.replicas)
    return all(ahead.devices[0] <= stage.devices[0] for pair in pairs for stage, ahead in pair)


def _shape(replica: Replica, cluster: Cluster) -> tuple[object, ...]:
    start = cluster.node_of[replica.stages[0].devices[0]]
    places = tuple((cluster.node_of[stage.devices[0]] - start,
                    *(cluster.class_of[rank] for rank in stage.devices))
                   for stage in replica.stages)
    programs = tuple((s.blocks, s.mesh, s.recompute, s.shardings, s.share) for s in replica.stages)
    return places, programs, replica.position_of, replica.num_micro_batches
