"""How gradients are summed: which ranks cut a parameter under ZeRO, what one message carries.

Pure: the runtime executes these buckets, the simulator prices them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..model import ModelGraph, item_bytes
from ..plan import Plan, shared_out
from .holdings import Box, Holders, LocalParam, Team, all_holdings
from .layout import local_shape


class Share(NamedTuple):
    """One parameter or buffer on one rank."""

    name: str
    holding: LocalParam
    team: Team
    local: tuple[int, ...]  # this rank's part before the ZeRO cut
    dtype: str
    trained: bool  # it gets gradients
    zero: bool  # cut once more among its team
    same_schedule: bool  # all ranks of the team use it at the same points of their schedules

    @property
    def sizes(self) -> list[int]:
        """Rows of dim 0 of each rank of the team under ZeRO, if they are given; else empty."""
        return shared_out(self.local[0], self.team.shares) if self.team.shares else []

    @property
    def rows(self) -> int:
        """Rows of dim 0 per rank under ZeRO, at most (the last ranks may have fewer)."""
        if not self.zero:
            return self.local[0]
        return max(self.sizes, default=-(-self.local[0] // len(self.team.ranks)))

    @property
    def piece(self) -> int:
        """Elements of a ZeRO piece, padding included."""
        return self.rows * math.prod(self.local[1:])

    @property
    def num_local(self) -> int:
        return math.prod(self.local)

    @property
    def num_owned(self) -> int:
        """Elements that the optimizer of this rank sees."""
        if not self.zero:
            return self.num_local
        start, end = self.own_rows()
        return (end - start) * math.prod(self.local[1:])

    def own_rows(self) -> tuple[int, int]:
        """First and end row of the piece that this rank owns under ZeRO, within its part."""
        place, sizes = self.team.ranks.index(self.holding.rank), self.sizes
        if sizes:
            return sum(sizes[:place]), sum(sizes[: place + 1])
        start = min(place * self.rows, self.local[0])
        return start, min(start + self.rows, self.local[0])

    def boxes(self, shape: tuple[int, ...]) -> list[Box]:
        """Rectangles of the full tensor, in the order in which they lie in the owned rows."""
        boxes = self.holding.boxes(shape)
        if not self.zero:
            return boxes
        start, end = self.own_rows()
        found, at, stacked = [], 0, box_dim(self.holding) == 0  # else they lie side by side
        for offsets, sizes in boxes:
            a, b = max(start - at, 0), min(end - at, sizes[0])
            if b > a and all(sizes):
                found.append(((offsets[0] + a, *offsets[1:]), (b - a, *sizes[1:])))
            at += sizes[0] if stacked else 0
        return found

    @property
    def num_sent(self) -> int:
        """Elements of its gradient in a message, per rank that gets a piece of its own."""
        return self.piece if self.zero else self.num_local


class Own(NamedTuple):
    """What a rank knows of its part of a parameter without looking at those of the others."""

    boxes: list[Box]
    speaks: bool  # it is the first of those that have them
    speaker: int  # the first rank that has any


def own_of(share: Share | None, shape: tuple[int, ...], everyone: Holders) -> Own | None:
    """None where parts overlap in other ways, as under uneven plans. No share: a rank has none."""
    teams = [everyone.team(everyone[0].rank), *([share.team] if share else [])]
    if not everyone.are_regular or any(team.shares for team in teams):
        return None
    if share is None:
        return Own([], False, everyone[0].rank)
    rank = share.holding.rank
    place = share.team.ranks.index(rank) if share.zero else 0
    boxes = [box for box in share.boxes(shape) if all(box[1])]
    return Own(boxes, everyone.first_like(rank, place) == rank, everyone[0].rank)


def box_dim(holding: LocalParam) -> int | None:
    """The dim along which the boxes of a part lie one after the other; None if they are a grid."""
    dims = {cut.split.dim for cut in holding.cuts if cut.split.outer > 1}
    return None if len(dims) > 1 else next(iter(dims), 0)


def shares_of(plan: Plan, graph: ModelGraph, rank: int,
              holdings: Mapping[str, Holders] | None = None) -> dict[str, Share]:
    """Everything that a rank has a part of."""
    return {name: _share(plan, graph, name, everyone.by_rank[rank], everyone.team(rank))
            for name, everyone in (holdings or all_holdings(plan, graph)).items()
            if rank in everyone.by_rank}


def boxes_of(plan: Plan, graph: ModelGraph, name: str,
             everyone: Holders) -> dict[int, list[Box]]:
    """Rank -> the boxes that it keeps of a parameter."""
    shape = graph.params[name].shape
    return {h.rank: _share(plan, graph, name, h, everyone.team(h.rank)).boxes(shape)
            for h in everyone}


def _share(plan: Plan, graph: ModelGraph, name: str, holding: LocalParam, team: Team) -> Share:
    info = graph.params[name]
    local = tuple(local_shape(info.shape, holding.forms.value, holding.mesh))
    can_cut = len(team.ranks) > 1 and not team.layouts_differ and bool(local)
    trained = info.trainable and not info.buffer
    zero = plan.zero > 0 and can_cut and trained and box_dim(holding) is not None
    same_schedule = zero and plan.in_step and _in_one_stage(plan, graph, name)
    return Share(name, holding, team, local, info.dtype, trained, zero, same_schedule)


def _in_one_stage(plan: Plan, graph: ModelGraph, name: str) -> bool:
    """Whether only one stage of every replica reads a parameter."""
    users = graph.users(name)
    stages = [s.blocks for s in plan.replicas[0].stages if s.blocks]
    return sum(any(a <= u < b for u in users) for a, b in stages) == 1


def buckets_of(shares: Mapping[str, Share], graph: ModelGraph, plan: Plan,
               names: Iterable[str]) -> list[list[Share]]:
    """Gradients that travel together, in the order in which the backward makes them: later blocks
    get theirs first. Those of what no block reads travel apart, as they seldom do."""
    first_use = {name: graph.users(name)[0] if graph.users(name) else -1 for name in names}
    open_: dict[tuple[object, ...], list[Share]] = {}
    done: list[list[Share]] = []

    def place(name: str) -> tuple[int, int]:
        """The same for all ranks, whichever blocks of theirs use it, and in which order."""
        first = first_use[name]
        known = graph.blocks[first].params.values() if first >= 0 else graph.params
        return -first, -list(known).index(name)

    for name in sorted(first_use, key=place):
        share = shares[name]
        if not share.trained:
            continue
        block = first_use[name] if plan.zero >= 2 else min(0, first_use[name])
        key = (share.team, share.zero, share.same_schedule, share.dtype, block)
        open_.setdefault(key, []).append(share)
        if sum(s.num_local * item_bytes(s.dtype) for s in open_[key]) >= plan.bucket_bytes:
            done.append(open_.pop(key))
    return done + list(open_.values())
