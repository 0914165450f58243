"""Measure what the plans of a model need: quickly everything, then what may be the fastest."""

from __future__ import annotations

import datetime
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from itertools import chain, repeat

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from .. import files, progress
from ..cluster import CPU_CORE, GPU, Cluster
from ..errors import AutoparError, PlanError
from ..limits import Name
from ..measure.links import Lines
from ..measure.room import PART, capped, chain_bytes
from ..measure.session import Session
from ..measure.stats import NOISE_LIMIT
from ..model import ModelGraph
from ..plan import Plan, Recompute
from ..profile import QUICK_S, BlockNeed, CurveNeed, Lookup, Profile, few, program_key
from ..run.world import World
from ..search.space import Candidate, Constraints, Option, candidates
from ..search.unequal import fastest
from ..shard.price import Prices
from ..simulate.network import lookup
from ..simulate.to_measure import needs_of
from ..trace import Traced
from ..trace.call import Call
from . import ways
from .probes import probes, unequal_probes
from .session import session_on

log = logging.getLogger("autopar_torch")
MOST_TP = 8
OLD_DAYS = 30  # drivers, clocks and neighbours change
PROBED_ROWS = 3  # numbers of rows at which a program is measured
MOST_KEPT = 64  # plans that the search hands to the engine, which puts them in order
LINK_ROUNDS, REFINE_ROUNDS, MOST_ROUNDS = 3, 2, 10
CLOSE = (1.25, 1.15, 1.1)  # a plan predicted slower by less than that may yet be the fastest
MOST_NAMES = 3  # uncertain times that the warning names


class Known(Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept between runs: the ways to split, and what was measured of them."""

    options: tuple[Option, ...]
    profile: Profile
    model: Name = ""  # `digest` of the graph that was measured
    made_with: dict[str, Name] = {}  # versions, and the day


def made_with() -> dict[str, str]:
    """The versions that times depend on, and the day of measuring."""
    return {"torch": str(torch.__version__), "cuda": str(torch.version.cuda),
            "day": datetime.date.today().isoformat()}


def tell_stale(known: Known) -> None:
    """Say what has changed since the machines were measured."""
    then, now = known.made_with, made_with()
    told = [f"{name} was {then[name]}, is {now[name]}" for name in ("torch", "cuda")
            if then.get(name, now[name]) != now[name]]
    oldest = (datetime.date.today() - datetime.timedelta(OLD_DAYS)).isoformat()
    told += [f"it is of {then['day']}"] if then.get("day", oldest) < oldest else []
    if told:
        log.warning("what was measured may be stale: %s; measure again to be sure", ", ".join(told))


def digest(graph: ModelGraph) -> str:
    """Names a model, and the precision that it computes with."""
    return hashlib.sha256(files.encode(graph)).hexdigest()[:16]


def measure(traced: Traced, call: Call, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor],
            world: World, device: torch.device, cluster: Cluster, limits: Constraints,
            seconds: float = QUICK_S) -> Known:
    """Links first, since they decide how blocks are split; then everything the plans need."""
    refuse_meta(tensors, buffers)
    progress.tell("measuring the machines: links, then blocks")
    ways_known = _measurable(_options(traced, call, world, device, cluster, limits), traced,
                             cluster)
    found = list(candidates(ways_known, traced.graph, world.size, call.num_rows, limits))
    if not found:
        return Known(tuple(ways_known), Profile(cluster, ()), digest(traced.graph), made_with())
    blocks, curves = _needs(traced, found, ways_known, cluster, call.num_rows, world, limits)
    session = session_on(cluster, blocks, curves, traced, call, tensors, buffers, world, device,
                         quick=seconds <= QUICK_S)
    session.round()
    profile = _refined(session, ways_known, traced.graph, call.num_rows, limits, world,
                       seconds)
    name_noise(profile, world)
    return Known(tuple(ways_known), profile, digest(traced.graph), made_with())


def refuse_meta(tensors: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> None:
    """What has no values cannot be run. Parameters are made up, and may be on `meta`."""
    without = ["the inputs"] * any(t.is_meta for t in tensors)
    if without := [*without, *(f"the buffer {n}" for n, t in buffers.items() if t.is_meta)]:
        raise PlanError(f"nothing can be measured: there are no values in {without[0]} (on meta)",
                        where="measure", fix="make inputs, and a model with buffers, without "
                        "torch.device('meta'); the inputs with all rows of a step")


def _refined(session: Session, options: Sequence[Option], graph: ModelGraph, num_rows: int,
             limits: Constraints, world: World, seconds: float) -> Profile:
    """The profile after more rounds of the plans that may be the fastest so far. They end when the
    time is over or these plans are known well, with each of their cells measured, none derived."""
    profile = session.profile()
    deadline, factors = time.perf_counter() + seconds, chain(CLOSE, repeat(CLOSE[-1]))
    while True:
        enough = _late(deadline, world) or (
            session.rounds >= MOST_ROUNDS and not session.noise())
        factor = CLOSE[-1] if enough else next(factors)
        plans = _close(graph, options, profile, num_rows, limits, factor, world)
        blocks, curves = _asked(plans, graph, profile.cluster, num_rows, world)
        fresh = session.derives(blocks)
        session.refine(blocks, curves)
        if enough and not fresh:
            return session.profile()  # its noise lists what close plans run
        for done in range(REFINE_ROUNDS):
            if done and not fresh and _late(deadline, world):
                break
            session.round()
        profile = session.profile()


def _close(graph: ModelGraph, options: Sequence[Option], profile: Profile, num_rows: int,
           limits: Constraints, factor: float, world: World) -> list[Plan]:
    """Plans that may be the fastest by what is known so far. All others are known well enough to be
    slower, so what only they need is not measured again."""
    close: list[Plan] = []
    if world.rank == 0:
        try:
            found = fastest(graph, options, lookup(profile), num_rows, limits, MOST_KEPT)
            most_s = found.best.step_s * factor
            close = [c.plan for c in found.choices if c.step_s <= most_s]
        except AutoparError as error:  # the search that follows says so
            log.debug("profile: no plan to measure more closely: %s", error)
    return world.told(close, list[Plan])


def name_noise(profile: Profile, world: World) -> None:
    if world.rank or not profile.noise:
        return
    worst = sorted(profile.noise.items(), key=lambda item: -item[1])[:MOST_NAMES]
    log.warning("profile: %d of its times are uncertain by more than %.0f %% (%s), so the plan may "
                "not be the best; close other programs and measure again (with AUTOPAR_CACHE "
                "on an empty folder), or longer (`autopar measure --seconds`)", len(profile.noise),
                100 * NOISE_LIMIT,
                "; ".join(f"{name}: {error:.0%}" for name, error in worst))


def _late(deadline: float, world: World) -> bool:
    """Whether any rank is out of time; then all ranks stop measuring together."""
    return any(world.gather(time.perf_counter() > deadline))


Needs = tuple[list[BlockNeed], list[CurveNeed]]


def _asked(plans: Sequence[Plan], graph: ModelGraph, cluster: Cluster, num_rows: int,
           world: World) -> Needs:
    """What plans need; every rank works out the needs of its share of the plans."""
    own = needs_of(plans[world.rank :: world.size], graph, cluster, num_rows)
    everyone = world.gather(own)
    blocks = dict.fromkeys(need for blocks, _ in everyone for need in blocks)
    return list(blocks), list(dict.fromkeys(need for _, curves in everyone for need in curves))


def _needs(traced: Traced, found: list[Candidate], options: Sequence[Option], cluster: Cluster,
           num_rows: int, world: World, limits: Constraints) -> Needs:
    """Each program at the smallest, a middle and the largest number of rows that plans use."""
    plans = probes(found, options, len(traced.graph.blocks))
    plans += unequal_probes(options, len(traced.graph.blocks), cluster, num_rows, limits)
    blocks, curves = _asked(plans, traced.graph, cluster, num_rows, world)
    wanted: dict[tuple[int, Recompute], set[int]] = {}
    for c in found:
        wanted.setdefault((c.option, c.recompute), set()).add(c.rows(num_rows))
    by_key = {(need.kind, need.key): need for need in blocks}
    every: dict[BlockNeed, None] = {}
    for (index, recompute), rows in wanted.items():
        for block, sharding in zip(traced.graph.blocks, options[index].shardings, strict=True):
            recomputed = not traced.graph.kinds[block.kind].runs_once and recompute
            need = by_key[block.kind, program_key(sharding, recomputed)]
            for count in few(sorted(rows), PROBED_ROWS):
                every[msgspec.structs.replace(need, rows=count)] = None
    return capped(every, traced, _room_bytes(cluster)), curves


def _room_bytes(cluster: Cluster) -> float:
    return PART * min(device.memory_bytes for device in cluster.devices)


def _measurable(options: list[Option], traced: Traced, cluster: Cluster) -> list[Option]:
    """Without the ways to split of which not even a row fits; all of them where none would be left,
    so that it is told what is missing."""
    blocks = traced.graph.blocks
    found = [option for option in options if chain_bytes(list(dict.fromkeys(
        BlockNeed(block.kind, sharding, 1) for block, sharding in zip(
            blocks, option.shardings, strict=True))), traced) <= _room_bytes(cluster)]
    if found and len(found) < len(options):
        log.info("left out, as blocks of it do not fit at one row: tensor groups of %s", ", ".join(
            "x".join(map(str, option.mesh)) for option in options if option not in found))
    return found or options


def _options(traced: Traced, call: Call, world: World, device: torch.device, cluster: Cluster,
             limits: Constraints) -> list[Option]:
    """Rank 0 solves, with the links that all ranks measured; all ranks get its answer."""
    shapes = ways.meshes(cluster, min(world.size, MOST_TP), limits)
    groups = {ranks for mesh in shapes for ranks in ways.axis_ranks(mesh)}
    needs = [CurveNeed(op, ranks, size) for ranks in sorted(groups) for op in ("gather", "scatter")
             for size in (ways.SMALL, ways.LARGE)]
    lines = Lines(needs, cluster, world, device, late=())  # as inside of blocks, where none is late
    lines.warm_up()
    for _ in range(LINK_ROUNDS):
        lines.round()
    seen = Lookup(Profile(cluster, (), lines.result()))
    rows = max(1, call.num_rows)
    base = GPU if torch.cuda.is_available() else CPU_CORE

    def prices(mesh: tuple[int, ...]) -> Prices:
        among = ways.axis_ranks(mesh)
        links = tuple(ways.link_of(seen, ranks) for ranks in among)
        hides = 1.0 if base is GPU else ways.hidden(seen, among)
        return Prices(base, links, 0.0, rows, hides)

    made: list[Option] = []
    for mesh in shapes if world.rank == 0 else ():
        made += ways.options(traced, mesh, prices(mesh), limits.rings)
    return world.told(made, list[Option])
