"""Ranks that do the same at the same time: one of them can stand for all."""

from __future__ import annotations

from ..cluster import Cluster
from ..plan import Plan, Replica
from ..profile import Profile

Representatives = dict[int, int]  # rank -> the first rank that does the same at the same time


def representatives(plan: Plan, profile: Profile, num_rows: int) -> Representatives:
    """Of replicas that are equal, lie alike on nodes and take as many rows: the first rank of each
    stage of the first one.

    Only with datasheets, whose devices share nothing and never change. Otherwise every rank is its
    own representative. If ZeRO cuts a parameter unevenly, a representative has the largest piece.
    """
    themselves = {rank: rank for rank in range(profile.cluster.num_devices)}
    if not (_apart(profile) and _in_turn(plan, profile.cluster)):
        return themselves
    leaders: dict[object, Replica] = {}
    found: Representatives = {}
    for replica, spans in zip(plan.replicas, plan.micro_batches(num_rows), strict=True):
        rows = tuple(end - start for start, end in spans)
        first = leaders.setdefault((_shape(replica, profile.cluster), rows), replica)
        if any(s.devices[0] < ahead.devices[0]
               for s, ahead in zip(replica.stages, first.stages, strict=True)):
            return themselves
        found |= {rank: ahead.devices[0] for stage, ahead in zip(replica.stages, first.stages,
                                                                 strict=True)
                  for rank in stage.devices}
    return themselves | found


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
    shared = changes or profile.cluster.shares
    return not measured and not shared and len(set(cores)) == len(cores)


def _in_turn(plan: Plan, cluster: Cluster) -> bool:
    """Whether every stage is a group of one node, one rank after the other, and all stages of a
    replica have as many. With ZeRO, groups of two axes are not equal: their places gather in
    different orders."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    groups = {stage.devices for stage in stages}
    alike = all(len({len(s.devices) for s in replica.stages}) == 1 for replica in plan.replicas)
    inside = all(cluster.node_of[group[0]] == cluster.node_of[group[-1]] for group in groups)
    in_turn = all(group == tuple(range(group[0], group[0] + len(group))) for group in groups)
    crossing = plan.zero and any(len(stage.axes) > 1 for stage in stages)
    return alike and inside and in_turn and not crossing


def _shape(replica: Replica, cluster: Cluster) -> tuple[object, ...]:
    start = cluster.node_of[replica.stages[0].devices[0]]
    places = tuple((cluster.node_of[stage.devices[0]] - start,
                    *(cluster.class_of[rank] for rank in stage.devices))
                   for stage in replica.stages)
    programs = tuple((s.blocks, s.mesh, s.recompute, s.shardings, s.share) for s in replica.stages)
    return places, programs, replica.position_of, replica.num_micro_batches
