"""Plans of unequal replicas but for borders: which groups of devices make a replica, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ..cluster import Cluster
from ..plan import Plan, Replica, ScheduleName, Sharding, Stage
from .space import Constraints, Option


class Group(NamedTuple):
    """Devices of one class that hold stages together."""

    device: int  # the class
    option: int  # how blocks are split on it
    degree: int


Lineup = tuple[Group, ...]  # the groups of a replica, in the order of its stages
Lineups = tuple[Lineup, ...]  # all replicas; their order says nothing
Placement = tuple[tuple[tuple[int, ...], ...], ...]  # replica, position: its devices


class Sharing(NamedTuple):
    """How the batch is shared out: micro-batches of each replica, and the rows of one of each."""

    number: tuple[int, ...]
    rows: tuple[int, ...]


class Shapes:
    """All that so many devices of each class can make; nobody must use every device."""

    def __init__(self, cluster: Cluster, groups: Sequence[Group], num_blocks: int, num_rows: int,
                 limits: Constraints) -> None:
        self.groups, self.limits, self.counts = groups, limits, Counter(cluster.class_of)
        self.most_stages = min(num_blocks, limits.pp or cluster.num_devices)
        self.most_replicas = min(num_rows, limits.dp or cluster.num_devices)

    @cached_property
    def lineups(self) -> list[Lineup]:
        return sorted(lineup for lineup in self._longer((), self.counts)
                      if self.limits.pp in (None, len(lineup)))

    def _longer(self, begun: Lineup, left: Mapping[int, int]) -> Iterator[Lineup]:
        for group in self.groups if len(begun) < self.most_stages else ():
            if group.degree <= left[group.device]:
                longer = (*begun, group)
                yield longer
                yield from self._longer(
                    longer, {**left, group.device: left[group.device] - group.degree})

    def __iter__(self) -> Iterator[Lineups]:
        return (shape for shape in self._more((), 0, self.counts)
                if self.limits.dp in (None, len(shape)))

    def _more(self, begun: Lineups, first: int, left: Mapping[int, int]) -> Iterator[Lineups]:
        """Shapes that begin so; lineups come in order, so that each set of them comes once."""
        for index in range(first, len(self.lineups)) if len(begun) < self.most_replicas else ():
            lineup, rest = self.lineups[index], dict(left)
            for group in lineup:
                rest[group.device] -= group.degree
            if min(rest.values()) >= 0:
                yield (*begun, lineup)
                yield from self._more((*begun, lineup), index, rest)


def groups_of(cluster: Cluster, options: Sequence[Option], limits: Constraints,
              known: Callable[[int, int], bool]) -> list[Group]:
    """Tensor groups inside a node, of the classes and options that are known."""
    most: Counter[int] = Counter()
    for node, device in Counter(zip(cluster.node_of, cluster.class_of, strict=True)).items():
        most[node[1]] = max(most[node[1]], device)
    return [Group(device, index, option.degree)
            for device in range(len(cluster.classes)) for index, option in enumerate(options)
            if option.degree <= most[device] and limits.tp in (None, option.degree)
            and known(device, index)]


def placed(shape: Lineups, cluster: Cluster) -> Placement | None:
    """Devices for every group: the large groups first, each from the first node that has room.
    None if a group finds no node."""
    free: dict[tuple[int, int], list[int]] = {}
    for rank, key in enumerate(zip(cluster.class_of, cluster.node_of, strict=True)):
        free.setdefault(key, []).append(rank)
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    order = sorted(((r, p) for r, lineup in enumerate(shape) for p in range(len(lineup))),
                   key=lambda at: -shape[at[0]][at[1]].degree)
    for r, p in order:
        group = shape[r][p]
        room = next((ranks for (device, _), ranks in free.items()
                     if device == group.device and len(ranks) >= group.degree), None)
        if room is None:
            return None
        found[r, p] = tuple(room[: group.degree])
        del room[: group.degree]
    return tuple(tuple(found[r, p] for p in range(len(lineup))) for r, lineup in enumerate(shape))


def as_unequal_plan(shape: Lineups, places: Placement, cuts: Sequence[Sequence[int]],
                    sharing: Sharing, options: Sequence[Option], limits: Constraints,
                    schedule: ScheduleName, zero: int, bucket_bytes: int) -> Plan:
    """A shape written out, with the borders of each replica."""
    table: list[Sharding] = []
    equal = len(set(sharing.rows)) == 1

    def stage(group: Group, devices: tuple[int, ...], blocks: tuple[int, int]) -> Stage:
        option, numbers = options[group.option], []
        for sharding in option.shardings[slice(*blocks)] if group.degree > 1 else ():
            if sharding is not None and sharding not in table:
                table.append(sharding)
            numbers.append(-1 if sharding is None else table.index(sharding))
        return Stage(devices, blocks, option.mesh if group.degree > 1 else (),
                     limits.recompute or False, tuple(numbers) if numbers else None)

    replicas = tuple(
        Replica(tuple(map(stage, lineup, devices, pairwise(cut))), count,
                None if equal else count * rows)
        for lineup, devices, cut, count, rows in zip(shape, places, cuts, *sharing, strict=True))
    return Plan(replicas, schedule, zero, limits.precision, tuple(table), "found by search",
                bucket_bytes, limits.grad_dtype)
