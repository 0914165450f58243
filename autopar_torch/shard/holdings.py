"""Which ranks hold which part of every parameter, and which ranks sum its gradient. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache, cached_property
from typing import NamedTuple

from ..model import ModelGraph, TensorInfo
from ..plan import Plan, Stage, peer_groups
from .layout import PARTIAL, WHOLE, Forms, Part, all_cuts, local_shape, parse_forms

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes
Located = tuple[int, tuple[int, ...], int]  # rank, its coordinates on the mesh, its share
GradGroup = tuple[tuple[Part, ...], tuple[int | None, ...]]  # how it is cut, and which copy


class LocalParam(NamedTuple):
    """One rank's part of a parameter on the tensor axes, before any ZeRO cut."""

    rank: int
    stage: tuple[int, int]  # replica, stage that first reads it
    forms: Forms
    mesh: tuple[int, ...]
    place: tuple[int, ...]
    share: int = 1  # of what its team cuts under ZeRO

    @property
    def cuts(self) -> tuple[Part, ...]:
        """Equal for ranks that hold the same elements."""
        return tuple(all_cuts(self.forms.value, self.mesh, self.place))

    @property
    def grad_group(self) -> GradGroup:
        """Equal for ranks whose gradients are to be added: complete copies stay apart."""
        return _grad_group(self.forms, self.mesh, self.place)

    @property
    def num_copies(self) -> int:
        """How many ranks of this stage hold the same complete gradient."""
        pairs = zip(self.forms.grad, self.mesh, strict=True)
        return math.prod(parts for grad, parts in pairs if grad == WHOLE)

    def boxes(self, shape: Sequence[int]) -> list[Box]:
        """The rectangles of the full parameter that this rank has, in local order."""
        boxes: list[Box] = [((0,) * len(shape), tuple(shape))]
        for cut in self.cuts:
            boxes = [piece for box in boxes for piece in _cut(box, len(boxes), cut)]
        return boxes


@cache
def _grad_group(forms: Forms, mesh: tuple[int, ...], place: tuple[int, ...]) -> GradGroup:
    copies = tuple(i if grad == WHOLE else None for grad, i in zip(forms.grad, place, strict=True))
    return (tuple(all_cuts(forms.value, mesh, place)), copies)


def _cut(box: Box, num_boxes: int, cut: Part) -> list[Box]:
    """Part of a box, within each of the outer parts that fall on it."""
    offsets, sizes = box
    (dim, outer), parts, index = cut
    pieces = max(1, outer // num_boxes)  # outer parts that earlier cuts have not separated
    length = sizes[dim] // pieces // parts
    starts = [offsets[dim] + p * (sizes[dim] // pieces) + index * length for p in range(pieces)]
    return [
        ((*offsets[:dim], start, *offsets[dim + 1 :]), (*sizes[:dim], length, *sizes[dim + 1 :]))
        for start in starts
    ]


def place_in(stage: Stage, rank: int) -> tuple[int, ...]:
    """Coordinates of a rank on the mesh of its stage (last axis fastest)."""
    index, place = stage.devices.index(rank), []
    for size in reversed(stage.axes):
        place.append(index % size)
        index //= size
    return tuple(reversed(place))


def axis_ranks(stage: Stage, rank: int, axis: int) -> tuple[int, ...]:
    """Ranks that differ from this one on one axis only."""
    mine = place_in(stage, rank)
    return tuple(other for other in stage.devices
                 if all(a == b or i == axis for i, (a, b) in enumerate(
                     zip(mine, place_in(stage, other), strict=True))))


def axis_groups(plan: Plan, graph: ModelGraph) -> set[tuple[int, ...]]:
    """Every group of the tensor axes, and of ranks that join statistics of batches."""
    groups = {ranks for block in range(len(graph.blocks))
              for ranks in peer_groups(plan, graph, block)[0]}
    for stage in {(s.devices, s.axes): s for r in plan.replicas for s in r.stages}.values():
        groups |= {axis_ranks(stage, rank, a) for rank in stage.devices
                   for a in range(len(stage.axes))}
    return {tuple(sorted(group)) for group in groups}


def param_forms(plan: Plan, stage: Stage, block: int, slot: str) -> Forms:
    """The form of a parameter slot of a block, whole where there is no sharding."""
    if sharding := plan.sharding(stage, block):
        return parse_forms(sharding.forms[slot])
    return Forms.whole(len(stage.axes))


def value_shape(plan: Plan, graph: ModelGraph, stage: Stage, value: str, info: TensorInfo,
                rows: int) -> list[int]:
    """Shape, on one device of a stage, of a value that crosses a border of the stage."""
    for index in range(*(stage.blocks or (0, 0))):
        block, sharding = graph.blocks[index], plan.sharding(stage, index)
        slots = {**block.inputs, **block.outputs}
        slot = next((s for s, v in slots.items() if v == value), None)
        if slot is not None and sharding is not None:
            return local_shape(info.at(rows), parse_forms(sharding.forms[slot]).value, stage.axes)
    return list(info.at(rows))


class Team(NamedTuple):
    """Ranks that sum their gradients of a parameter; `layouts_differ`: so do their parts. Under
    ZeRO they cut it by their `shares`, or equally."""

    ranks: tuple[int, ...]
    layouts_differ: bool = False
    shares: tuple[int, ...] = ()


class Holders(list[LocalParam]):
    """All holdings of one parameter, in rank order."""

    @cached_property
    def by_rank(self) -> dict[int, LocalParam]:
        return {holding.rank: holding for holding in self}

    @property
    def teams(self) -> Collection[Team]:
        """All of them, each once."""
        return self._teams.values() if self._cut_alike else [self._everyone]

    @cached_property
    def are_whole(self) -> bool:
        """Whether each has all of the parameter, before any ZeRO cut."""
        return not any(holding.cuts for holding in self)

    @cached_property
    def are_regular(self) -> bool:
        """Whether any two have the same elements or none in common, also under ZeRO."""
        return self._cut_alike and len({(len(team.ranks), team.shares) for team in self.teams}) == 1

    def first_like(self, rank: int, place: int) -> int:
        """The first rank at this place of a team whose members are cut like a rank."""
        cuts = self.by_rank[rank].cuts
        return min(team.ranks[place] for (own, _), team in self._teams.items() if own == cuts)

    def team(self, rank: int) -> Team:
        """The ranks with which a rank sums its gradient."""
        if self._cut_alike:
            return self._teams[self.by_rank[rank].grad_group]
        return self._everyone

    @cached_property
    def _cut_alike(self) -> bool:
        return len({(h.forms, h.mesh) for h in self}) == 1 or len({h.stage for h in self}) == 1

    @cached_property
    def _teams(self) -> dict[GradGroup, Team]:
        groups: dict[GradGroup, list[LocalParam]] = {}
        for holding in self:
            groups.setdefault(holding.grad_group, []).append(holding)
        return {group: _cutting(members) for group, members in groups.items()}

    @cached_property
    def _everyone(self) -> Team:
        whole = all(PARTIAL not in h.forms.grad and h.forms.grad == h.forms.value
                    and not h.cuts and h.num_copies == 1 for h in self)
        return _cutting(self) if whole else Team(tuple(h.rank for h in self), True)


def _cutting(members: list[LocalParam]) -> Team:
    shares = tuple(h.share for h in members)
    return Team(tuple(h.rank for h in members), False, shares if len(set(shares)) > 1 else ())


def all_holdings(plan: Plan, graph: ModelGraph) -> dict[str, Holders]:
    """Parameter -> one holding per rank that has a part of it, in rank order. Parameters that lie
    alike in all stages have the same one."""
    distinct = {tuple((s.blocks, s.axes, s.shardings) for s in replica.stages): replica
                for replica in plan.replicas}.values()
    places = _places(plan)
    known: dict[tuple[object, ...], Holders] = {}
    found: dict[str, Holders] = {}
    for name, uses in _uses(plan, graph).items():
        key = tuple((s, param_forms(plan, stage, *use)) for replica in distinct
                    for s, stage in enumerate(replica.stages) for use in uses if _reads(stage, use))
        if key not in known:
            known[key] = _holders(plan, uses, places)
        found[name] = known[key]
    return found


def unread_holdings(plan: Plan, graph: ModelGraph, num_ranks: int) -> dict[str, Holders]:
    """Of what another trace may read: each rank has all of it, if all compute, on one mesh each."""
    ranks: dict[int, LocalParam] = {}
    meshes = {(rank, stage.devices, stage.axes) for replica in plan.replicas
              for stage in replica.stages for rank in stage.devices}
    for r, stages in enumerate(_places(plan)):
        for s, places in enumerate(stages):
            axes = plan.replicas[r].stages[s].axes
            for rank, place, share in places:
                ranks.setdefault(rank, LocalParam(rank, (r, s), Forms.whole(len(axes)), axes, place,
                                                  share))
    if not len(ranks) == len(meshes) == num_ranks:
        return {}
    return dict.fromkeys(graph.unread, Holders(ranks[k] for k in sorted(ranks)))


def _places(plan: Plan) -> list[list[list[Located]]]:
    """By replica and stage."""
    return [[[(rank, place_in(stage, rank), share) for rank, share in zip(
        stage.devices, stage.share or (1,) * len(stage.devices), strict=True)]
        for stage in replica.stages] for replica in plan.replicas]


def _uses(plan: Plan, graph: ModelGraph) -> dict[str, list[tuple[int, str]]]:
    """Parameter -> the blocks and slots that read it, in the order of the stages."""
    found: dict[str, list[tuple[int, str]]] = {}
    for stage in plan.replicas[0].stages:
        for block in range(*(stage.blocks or (0, 0))):
            for slot, name in graph.blocks[block].params.items():
                found.setdefault(name, []).append((block, slot))
    return found


def _reads(stage: Stage, use: tuple[int, str]) -> bool:
    first, end = stage.blocks or (0, 0)
    return first <= use[0] < end


def _holders(plan: Plan, uses: Sequence[tuple[int, str]],
             places: Sequence[Sequence[Sequence[Located]]]) -> Holders:
    """Of a parameter that these slots of blocks read, by the place and share of every rank."""
    ranks: dict[int, LocalParam] = {}
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            for use in uses:
                if _reads(stage, use):
                    forms = param_forms(plan, stage, *use)
                    for rank, place, share in places[r][s]:
                        ranks.setdefault(rank, LocalParam(rank, (r, s), forms, stage.axes, place,
                                                          share))
    return Holders(ranks[k] for k in sorted(ranks))
