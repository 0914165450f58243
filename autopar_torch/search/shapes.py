"""Plans of unequal replicas but for borders: which groups of devices make a replica, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from ..cluster import Cluster
from .space import Option


class Group(NamedTuple):
    """Devices of one class that hold stages together."""

    device: int  # the class
    option: int  # how blocks are split on it
    degree: int


Lineup = tuple[Group, ...]  # the groups of a replica, in the order of its stages
Shape = tuple[Lineup, ...]  # all replicas; their order says nothing
Places = tuple[tuple[tuple[int, ...], ...], ...]  # replica, position: its devices


class Shapes:
    """All that so many devices of each class can make; nobody must use every device."""

    def __init__(self, cluster: Cluster, groups: Sequence[Group], most_stages: int,
                 num_rows: int) -> None:
        self.cluster, self.groups = cluster, groups
        self.most_stages, self.num_rows = most_stages, num_rows
        self.counts = Counter(cluster.class_of)

    @cached_property
    def lineups(self) -> list[Lineup]:
        return sorted(self._longer((), self.counts))

    def _longer(self, begun: Lineup, left: Mapping[int, int]) -> Iterator[Lineup]:
        for group in self.groups if len(begun) < self.most_stages else ():
            if group.degree <= left[group.device]:
                longer = (*begun, group)
                yield longer
                yield from self._longer(longer, _without(left, group))

    def __iter__(self) -> Iterator[Shape]:
        return self._more((), 0, self.counts)

    def _more(self, begun: Shape, first: int, left: Mapping[int, int]) -> Iterator[Shape]:
        """Shapes that begin so; lineups come in order, so that each set of them comes once."""
        for index in range(first, len(self.lineups)) if len(begun) < self.num_rows else ():
            lineup, rest = self.lineups[index], dict(left)
            for group in lineup:
                rest[group.device] -= group.degree
            if min(rest.values()) >= 0:
                yield (*begun, lineup)
                yield from self._more((*begun, lineup), index, rest)


def _without(left: Mapping[int, int], group: Group) -> dict[int, int]:
    return {**left, group.device: left[group.device] - group.degree}


def groups_of(cluster: Cluster, options: Sequence[Option],
              known: Mapping[tuple[int, int], bool]) -> list[Group]:
    """Tensor groups inside a node, on classes where their programs were measured."""
    most: Counter[int] = Counter()
    for node, device in Counter(zip(cluster.node_of, cluster.class_of, strict=True)).items():
        most[node[1]] = max(most[node[1]], device)
    return [Group(device, index, option.degree)
            for device in range(len(cluster.classes)) for index, option in enumerate(options)
            if option.degree <= most[device] and known[device, index]]


def placed(shape: Shape, cluster: Cluster) -> Places | None:
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
