"""Profile: what was measured (or read in a datasheet) about one model on one kind of hardware."""

from __future__ import annotations

import bisect
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import astuple, replace

from . import files
from .cluster import Cluster
from .errors import ProfileError
from .limits import Amount, Count, Delta, Factor, Index, Name, Seconds, Signed, increase, refuse
from .plan import Recompute, Sharding

Number = TypeVar("Number", int, float)
Source = Literal["datasheet", "derived", "measured"]
SOURCES: tuple[Source, ...] = ("datasheet", "derived", "measured")  # of times; the surest last
RECOMPUTE = "/again"  # in keys of programs whose backward recomputes forward
COMPILED = "/compiled"  # in keys of programs that run compiled
EXCHANGE_CORE = 0.5  # part of a core, if it was not measured
GROUP = r"^[0-9+]{1,5000} on [0-9]{1,9}( of [0-9+.]{1,5000})?( by [0-9+.]{1,5000})?$"
QUICK_S = 8.0  # seconds of measuring close plans well, after a quick pass


class BlockCost(Struct, frozen=True, forbid_unknown_fields=True):
    """One block of a kind under one sharding, with so many rows, on one rank.

    Seconds are a device's own: alone on its core. `comm` counts what tensor groups exchange inside,
    waiting for each other included.
    """

    rows: Count
    forward_s: Seconds
    backward_s: Seconds
    input_s: Seconds = 0.0  # the part of the backward that the stage before waits for
    weight_s: Seconds = 0.0
    comm_forward_s: Seconds = 0.0
    comm_backward_s: Seconds = 0.0
    out_bytes: Amount = 0.0  # what it returns
    kept_bytes: Amount = 0.0  # what forward leaves for backward, what it returns included
    forward_bytes: Amount = 0.0  # most that forward needed at once
    backward_bytes: Signed = 0.0  # most that backward needed at once, beyond what was kept
    added_s: Delta = 0.0  # by how much backward is longer if it adds to gradients that are there
    stash_bytes: Signed = 0.0  # what the input part of a split backward leaves for the weight part
    input_bytes: Signed = 0.0  # most that this part needed at once; 0: as much as a whole backward

    @property
    def recomputed(self) -> BlockCost:
        """The same with recompute: backward runs forward again, and only its results are kept."""
        comm = self.comm_backward_s + self.comm_forward_s
        return replace(self.again(1.0, 1.0), comm_backward_s=comm)

    def again(self, freed: float, spent: float) -> BlockCost:
        """The same where backward makes a part of what is kept, but for results, again, in a part
        of the seconds of forward."""
        size, seconds = freed * (self.kept_bytes - self.out_bytes), spent * self.forward_s
        return replace(self, backward_s=self.backward_s + seconds, input_s=self.input_s + seconds,
                       kept_bytes=self.kept_bytes - size,
                       backward_bytes=self.backward_bytes + size,
                       input_bytes=self.input_bytes and self.input_bytes + size)


class BlockCosts(Struct, frozen=True, forbid_unknown_fields=True):
    """A kind under a sharding on a class of devices, at several numbers of rows."""

    kind: Name
    sharding: Name  # `sharding_key`
    pieces: Annotated[tuple[BlockCost, ...], Meta(min_length=1)]
    source: Source = "measured"  # in all pieces, else another of SOURCES
    device: Index = 0  # the number of the class: `Cluster.classes`

    def __post_init__(self) -> None:
        rows = [cost.rows for cost in self.pieces]
        refuse(not increase(rows), f"pieces of {rows} rows, which must increase")
        refuse(any(cost.added_s < -cost.backward_s for cost in self.pieces),
               "added_s of a block undoes more than its backward_s")

    def at(self, rows: int) -> BlockCost:
        """The cost of so many rows: measured, else on the line through its neighbours."""
        known = [cost.rows for cost in self.pieces]
        place = bisect.bisect_left(known, rows)
        if place < len(known) and known[place] == rows:
            return self.pieces[place]
        if len(known) == 1:
            return _scaled(self.pieces[0], rows)
        low = min(max(place - 1, 0), len(known) - 2)
        return _between(self.pieces[low], self.pieces[low + 1], rows)


def merged(costs: Iterable[BlockCosts]) -> tuple[BlockCosts, ...]:
    """One entry per program, in the order of their names, its numbers of rows in order."""
    by_rows: dict[tuple[str, str, int], dict[int, BlockCost]] = {}
    sources: dict[tuple[str, str, int], Source] = {}
    for found in costs:
        key = (found.kind, found.sharding, found.device)
        by_rows.setdefault(key, {}).update({cost.rows: cost for cost in found.pieces})
        sources[key] = min(found.source, sources.get(key, found.source), key=SOURCES.index)
    return tuple(BlockCosts(kind, sharding, tuple(own[n] for n in sorted(own)),
                            sources[kind, sharding, device], device)
                 for (kind, sharding, device), own in sorted(by_rows.items()))


def few(values: Sequence[Number], most: int) -> list[Number]:
    """At most so many of some sorted values, with both ends: the points of a line to measure."""
    if len(values) <= most:
        return list(values)
    return sorted({values[i * (len(values) - 1) // (most - 1)] for i in range(most)})


def around(value: float, points: Collection[Number]) -> set[Number]:
    """The nearest of some points on both sides of a value, between which its line is drawn."""
    below = max((p for p in points if p <= value), default=None)
    above = min((p for p in points if p >= value), default=None)
    return {p for p in (below, above) if p is not None}


def _scaled(cost: BlockCost, rows: int) -> BlockCost:
    factor = rows / cost.rows
    return BlockCost(rows, *[value * factor for value in astuple(cost)[1:]])


def _between(a: BlockCost, b: BlockCost, rows: int) -> BlockCost:
    """A value on the line through two points; beyond the points it does not become negative."""
    share, values = (rows - a.rows) / (b.rows - a.rows), []
    for x, y in zip(astuple(a)[1:], astuple(b)[1:], strict=True):
        value = x + share * (y - x)
        values.append(value if value > 0 or x < 0 or y < 0 else 0.0)
    return BlockCost(rows, *values)


class Curve(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one communication over its size, for one kind of group.

    `core`: part of each rank's core that it takes. `beside`: part of its speed that is left while
    that core computes. `held`: part of a message's time for which posting it blocks its sender, and
    as long its receiver.
    """

    op: Annotated[str, Meta(pattern=r"^(sum|scatter|gather|send)$")]
    group: Annotated[str, Meta(pattern=GROUP)]  # `Cluster.place`
    points: Annotated[tuple[tuple[Amount, Seconds], ...], Meta(min_length=1)]  # (bytes, seconds)
    core: Factor = 0.0
    held: Factor = 0.0
    beside: Factor = 1.0
    source: Source = "measured"

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        refuse(not increase(sizes), f"points at {sizes} bytes, which must increase")

    def seconds(self, num_bytes: float) -> float:
        """Read off straight lines between the points; beyond them the last line goes on."""
        points = self.points
        if len(points) == 1:
            return points[0][1]
        sizes = [size for size, _ in points]
        high = min(max(bisect.bisect_left(sizes, num_bytes), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[high - 1], points[high]
        share = (num_bytes - x0) / (x1 - x0)
        return max(y0 + share * (y1 - y0), points[0][1] if num_bytes < sizes[0] else 0.0)


class Overheads(Struct, frozen=True, forbid_unknown_fields=True):
    """What a step costs beside its blocks, on one rank."""

    step_s: Seconds = 0.0  # once per step: taking the batch, handing the gradients over
    micro_batch_s: Seconds = 0.0  # per micro-batch: its part of the batch, masks and tables
    action_s: Seconds = 0.0  # per forward of a stage: coming to it from a backward
    update_s_per_byte: Seconds = 0.0  # optimizer, per byte of parameters
    update_s_per_tensor: Seconds = 0.0
    add_s_per_byte: Seconds = 0.0  # adding a gradient to what is there
    copy_s_per_byte: Seconds = 0.0  # packing a message
    cut_s_per_byte: Seconds = 0.0  # the same in rows for the ranks of ZeRO, with taking apart
    fill_s_per_byte: Seconds = 0.0  # from a message into parameters
    fixed_bytes: Amount = 0.0

    def packing(self, op: str) -> float:
        """Seconds per byte of a message of gradients for such a collective."""
        cut = op == "scatter" and self.cut_s_per_byte  # older profiles do not tell them apart
        return cut or self.copy_s_per_byte


Slowdown = Annotated[float, Meta(gt=0.0, le=1e6)]
Quantiles = Annotated[tuple[Slowdown, ...], Meta(min_length=1, max_length=10**4)]


class Jitter(Struct, frozen=True, forbid_unknown_fields=True):
    """How computing time varies on this machine, as quantiles of factors around what is usual.

    A rank that waits for several waits for the slowest, so a step is longer than medians say.
    """

    rank: Quantiles = (1.0,)  # one rank in one step, over what all ranks usually take
    block: Quantiles = (1.0,)  # one block, over the rest of its step

    @property
    def quiet(self) -> bool:
        return len(self.rank) == 1 and len(self.block) == 1


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of one model, curves of one cluster, and what else a step costs.

    Overheads and jitter are those of each class of devices, or one for all.
    """

    cluster: Cluster
    cells: tuple[BlockCosts, ...]
    curves: tuple[Curve, ...] = ()
    overheads: Annotated[tuple[Overheads, ...], Meta(min_length=1)] = (Overheads(),)
    jitter: Annotated[tuple[Jitter, ...], Meta(min_length=1)] = (Jitter(),)
    noise: dict[str, Factor] = {}  # times that stayed uncertain: the relative error of each median
    assumed: bool = False  # what was not measured is taken from the cluster's datasheets

    def __post_init__(self) -> None:
        count = len(self.cluster.classes)
        for what, own in (("overheads", self.overheads), ("jitters", self.jitter)):
            refuse(len(own) not in (1, count), f"{len(own)} {what} for {count} classes of devices")
        refuse(any(c.device >= count for c in self.cells),
               f"cells of a class that is not among the {count} of the cluster")
        names = [f"{c.kind} under {c.sharding} on {c.device}" for c in self.cells]
        names += [f"{c.op} among {c.group}" for c in self.curves]
        twice = [name for name, count in Counter(names).items() if count > 1]
        refuse(bool(twice), f"cells or curves are there twice: {twice[:3]}")

    @property
    def quiet(self) -> bool:
        """Whether nothing is known of how computing times vary."""
        return all(jitter.quiet for jitter in self.jitter)

    def jitter_of(self, rank: int) -> Jitter:
        return self.jitter[self.cluster.class_of[rank] if len(self.jitter) > 1 else 0]

    def save(self, path: str | os.PathLike[str]) -> None:
        files.save(self, path)


class BlockNeed(Struct, frozen=True, dict=True):
    """A block that some plan runs, with so many rows."""

    kind: str
    sharding: Sharding | None
    rows: int
    recompute: Recompute = False  # what of forward is computed again in backward
    compiled: bool = False

    @cached_property
    def key(self) -> str:
        return program_key(self.sharding, self.recompute, self.compiled)

    def __hash__(self) -> int:
        return hash((self.kind, self.key, self.rows))


class CurveNeed(Struct, frozen=True):
    """A communication that some plan uses."""

    op: str
    ranks: tuple[int, ...]
    num_bytes: float


class Lookup:
    """Looks numbers up in a profile; raises an error for what was not measured."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.costs = {(c.kind, c.sharding, c.device): c for c in profile.cells}
        self.curves = {(curve.op, curve.group): curve for curve in profile.curves}
        self._known: dict[tuple[str, str, int, int], BlockCost] = {}

    def cost(self, kind: str, sharding: str, rows: int, device: int = 0) -> BlockCost:
        """On a device of a class."""
        key = (kind, sharding, rows, device)
        if key not in self._known:
            found = self.costs.get((kind, sharding, device))
            if found is None and self.profile.assumed:  # datasheets do not tell what is compiled
                found = self.costs.get((kind, sharding.replace(COMPILED, ""), device))
            if found is None:
                name = self.profile.cluster.classes[device].name
                raise ProfileError(
                    f"{kind} under sharding {sharding or 'whole'} was not measured on {name}",
                    where="Profile.cells", fix="measure again for this plan",
                )
            self._known[key] = found.at(rows)
        return self._known[key]

    def overheads(self, device: int = 0) -> Overheads:
        """Of a class of devices."""
        own = self.profile.overheads
        return own[device if len(own) > 1 else 0]

    def slowest(self, kind: str, sharding: str, rows: int, classes: Iterable[int]) -> BlockCost:
        """On the class of devices that is the slowest at it: with equal shares all wait for it."""
        return max((self.cost(kind, sharding, rows, device) for device in classes),
                   key=lambda cost: cost.forward_s + cost.backward_s)

    def curve(self, op: str, ranks: Sequence[int]) -> Curve:
        group = self.profile.cluster.place(ranks)
        if (op, group) not in self.curves:
            known = ", ".join(sorted({f"{o} {g}" for o, g in self.curves})) or "none"
            raise ProfileError(f"{op} among {tuple(ranks)} ({group}) was not measured",
                               where="Profile.curves", fix=f"measured are: {known}")
        return self.curves[op, group]

    def nearest(self, op: str, ranks: Sequence[int]) -> Curve | None:
        """Of the group that is most like this one: on one node or on several as it is, and with as
        few more ranks as there are, else with as many as there are. None if no curve is there."""
        own = _sizes(self.profile.cluster.place(ranks))

        def unlike(curve: Curve) -> tuple[bool, bool, int, str]:
            other = _sizes(curve.group)
            more = sum(other) - sum(own)
            return (len(own) > 1) != (len(other) > 1), more < 0, abs(more), curve.group

        return min((c for c in self.profile.curves if c.op == op), key=unlike, default=None)

    def card(self, rank: int) -> str:
        """The network card of a rank: one for all ranks of its node, as measured, if the cluster
        does not say how many there are."""
        cluster = self.profile.cluster
        name = f"link {cluster.node_of[rank]}"
        return own_card(name, cluster.card(rank)) if cluster.zone(rank).cards else name

    def ways(self, rank: int, group: Sequence[int], away: bool) -> dict[str, float]:
        """What an exchange of a rank with a group goes through in either direction, and the part of
        it that this takes; `away`: the group is on several nodes. The bus of a rank that is alone
        on its node carries no more than a link between nodes does."""
        cluster, zone = self.profile.cluster, self.profile.cluster.zone(rank)
        found = {self.card(rank): 1.0} if away else {}
        if zone.buses:
            node, parts = cluster.node_of[rank], cluster.parts(group)
            alone = sum(cluster.node_of[other] == node for other in group) == 1
            most = cluster.far(parts) if alone else cluster.near(parts)
            own = zone.inside or cluster.inside
            found[f"bus {cluster.bus(rank)}"] = min(1.0, most.bytes_per_s / own.bytes_per_s)
        return found

    def exchange_core(self, ranks: Sequence[int]) -> float:
        """Part of a core that each rank of a tensor group uses while the group exchanges."""
        if not self.curves:
            return EXCHANGE_CORE
        curve = self.curves.get(("sum", self.profile.cluster.place(ranks)))
        return curve.core if curve else EXCHANGE_CORE


def _sizes(group: str) -> list[int]:
    """How many ranks are on each node; see `Cluster.place`."""
    return [int(size) for size in group.partition(" on ")[0].split("+")]


def own_card(link: str, rank: int) -> str:
    return f"{link} of {rank}"


def sharding_key(sharding: Sharding | None) -> str:
    """Equal for shardings that run the same program; empty for whole blocks."""
    return sharding.key if sharding else ""


def program_key(sharding: Sharding | str | None, recompute: Recompute,
                compiled: bool = False) -> str:
    """Names the program of a block (its sharding, or the key of that) and how it runs."""
    own = (sharding if isinstance(sharding, str) else sharding_key(sharding)) + COMPILED * compiled
    if not recompute:
        return own
    return own + (RECOMPUTE if recompute is True else f"{RECOMPUTE} {recompute}")
