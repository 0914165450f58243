"""Find the plan by itself: measure what the candidates need, search, and agree on the result."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from .. import files
from ..cluster import CPU_CORE, GPU, Cluster
from ..errors import AutoparError, FileError
from ..measure.links import WARM_UP, Lines
from ..measure.session import Session
from ..measure.stats import NOISE_LIMIT
from ..model import ModelGraph
from ..profile import CellNeed, CurveNeed, Lookup, Profile, cell_key, few
from ..search.best import KEPT, SAFETY, Choice, Outcome, search
from ..search.space import Candidate, Constraints, Option, candidates
from ..shard.price import Prices
from ..simulate import simulate
from ..simulate.needs import needs_of
from ..simulate.network import lookup
from ..trace import Traced
from ..trace.call import Call
from . import options as ways
from .observe import cluster_of, session_on
from .world import World

log = logging.getLogger("autopar_torch")
MOST_TP = 8
PROBED_ROWS = 3  # numbers of rows at which a program is measured
KEPT_SHARING = 64  # where ranks share cores, the engine knows better than the formula who is good
QUICK_S, LEAST_ROUNDS, MOST_ROUNDS = 8.0, 3, 30
MOST_NAMES = 3  # of what is too uncertain
DRAWS = 7  # of steps whose times vary as measured


class Known(Struct, frozen=True):
    """What is kept between runs: the ways to split, and what was measured of them."""

    options: tuple[Option, ...]
    profile: Profile


def choose(traced: Traced, call: Call, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor],
           world: World, device: torch.device, limits: Constraints) -> Outcome:  # fmt: skip
    """The fastest plan for this batch on these ranks, the same on every rank."""
    cluster = cluster_of(world)
    known = recall(traced, call, tensors, buffers, world, device, cluster, limits)
    error: AutoparError | None = None
    found = None
    if world.rank == 0:
        try:
            found = best(traced.graph, known, call.num_rows, limits)
        except AutoparError as failed:
            error = failed
    world.together(error)
    return files.decode(world.agree(files.encode(found)), Outcome)


def best(graph: ModelGraph, known: Known, num_rows: int, limits: Constraints) -> Outcome:
    """Search by the formula; the engine, which shares cores and links, orders the best of them.

    Where nothing was measured and nobody shares, the engine would only repeat the formula. What the
    formula took to fit, the engine may find too large: then the search is asked for less.
    """
    kept = KEPT if known.profile.cluster.ranks_per_core == 1 else KEPT_SHARING
    result = search(graph, known.options, lookup(known.profile), num_rows, limits, kept=kept)
    choices = [result.best, *result.runners_up]
    if not known.profile.assumed:
        choices = [_simulated(choice, graph, known.profile, num_rows) for choice in choices]
        room = limits.room(known.profile.cluster)
        least = SAFETY * min(choice.memory_bytes for choice in choices)
        if least > room:
            less = msgspec.structs.replace(limits, memory_bytes=int(room * room / least))
            return best(graph, known, num_rows, less)
        choices = [choice for choice in choices if SAFETY * choice.memory_bytes <= room]
        choices.sort(key=lambda c: c.step_s)
    first, *others = choices[:KEPT]
    reason = f"fastest of {result.considered} candidates"
    plan = msgspec.structs.replace(first.plan, reason=reason)
    return Outcome(plan, first.step_s, first.memory_bytes, result, tuple(others))


def _simulated(choice: Choice, graph: ModelGraph, profile: Profile, num_rows: int) -> Choice:
    timeline = simulate(choice.plan, graph, profile, num_rows, draws=DRAWS)
    peak = max(memory.peak_bytes for memory in timeline.memory)
    return Choice(choice.plan, timeline.step_s, peak)


def recall(traced: Traced, call: Call, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor],
           world: World, device: torch.device, cluster: Cluster,
           limits: Constraints) -> Known:  # fmt: skip
    """From the cache, else measured now."""
    path = cache_path(_fingerprint(traced, call, cluster, limits))
    cached = _load(path) if world.rank == 0 else None
    cached = files.decode(world.agree(files.encode(cached)), Known | None)  # type: ignore[arg-type]
    if cached is not None:
        log.info("profile: from %s", path)
        _name_noise(cached.profile, world)
        return cached
    start = time.perf_counter()
    known = measure(traced, call, tensors, buffers, world, device, cluster, limits)
    if world.rank == 0:
        log.info("profile: measured in %.1f s", time.perf_counter() - start)
        _keep(known, path)
    return known


def measure(traced: Traced, call: Call, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor],
            world: World, device: torch.device, cluster: Cluster, limits: Constraints,
            seconds: float = QUICK_S) -> Known:  # fmt: skip
    """Links first, since they decide how blocks are split; then everything the plans need."""
    deadline = time.perf_counter() + seconds
    ways_known = _options(traced, call, world, device, cluster, limits)
    found = list(candidates(ways_known, traced.graph, world.size, call.num_rows, limits))
    if not found:
        return Known(tuple(ways_known), Profile(cluster, ()))
    cells, curves = _needs(traced, found, ways_known, cluster, call.num_rows)
    session = session_on(cluster, cells, curves, traced, call, tensors, buffers, world, device)
    _enough(session, deadline, world)
    profile = session.profile()
    _name_noise(profile, world)
    return Known(tuple(ways_known), profile)


def _enough(session: Session, deadline: float, world: World) -> None:
    """Rounds until time is up, or all is known well. Always whole ones: what the blocks of a chain
    take is told by their sum."""
    rounds = 0
    while rounds < LEAST_ROUNDS or not (
        _late(deadline, world) or (rounds >= MOST_ROUNDS and not session.noise())
    ):
        session.round()
        rounds += 1


def _name_noise(profile: Profile, world: World) -> None:
    if world.rank or not profile.noise:
        return
    worst = sorted(profile.noise.items(), key=lambda item: -item[1])[:MOST_NAMES]
    log.warning("profile: %d of its times are uncertain by more than %.0f %% (%s), so the plan may "
                "not be the best; close other programs and measure again (without the kept "
                "profile), or for longer (`autopar measure --seconds`)", len(profile.noise),
                100 * NOISE_LIMIT,
                "; ".join(f"{name}: {error:.0%}" for name, error in worst))  # fmt: skip


def _late(deadline: float, world: World) -> bool:
    """Whether any rank is out of time: all leave together."""
    return bool(world.sum(torch.tensor(float(time.perf_counter() > deadline))) > 0)


def _needs(traced: Traced, found: list[Candidate], options: Sequence[Option], cluster: Cluster,
           num_rows: int) -> tuple[list[CellNeed], list[CurveNeed]]:  # fmt: skip
    """Each program at the smallest, a middle and the largest number of rows that plans use."""
    plans = ways.probes(found, options, len(traced.graph.blocks))
    cells, curves = needs_of(plans, traced.graph, cluster, num_rows)
    wanted: dict[tuple[int, bool, bool], set[int]] = {}
    for c in found:
        split = c.schedule == "zero_bubble"
        wanted.setdefault((c.option, split, c.recompute), set()).add(c.rows(num_rows))
    by_key = {(need.kind, need.key): need for need in cells}
    every: dict[CellNeed, None] = {}
    for (index, split, recompute), rows in wanted.items():
        for block, sharding in zip(traced.graph.blocks, options[index].shardings, strict=True):
            again = recompute and not traced.graph.kinds[block.kind].mutates
            need = by_key[block.kind, cell_key(sharding, split, again)]
            for count in few(sorted(rows), PROBED_ROWS):
                every[msgspec.structs.replace(need, rows=count)] = None
    return list(every), curves


def _options(traced: Traced, call: Call, world: World, device: torch.device, cluster: Cluster,
             limits: Constraints) -> list[Option]:  # fmt: skip
    """Rank 0 solves with the links that all have measured; everyone gets its answer."""
    shapes = ways.meshes(cluster, min(world.size, MOST_TP), limits)
    groups = {ranks for mesh in shapes for ranks in ways.axis_ranks(mesh)}
    needs = [CurveNeed(op, ranks, size) for ranks in sorted(groups) for op in ("gather", "scatter")
             for size in (ways.SMALL, ways.LARGE)]  # fmt: skip
    lines = Lines(needs, cluster, world, device)
    for _ in range(WARM_UP + LEAST_ROUNDS):
        lines.round()
    seen = Lookup(Profile(cluster, (), lines.result()))
    rows = max(1, call.num_rows)
    base = GPU if torch.cuda.is_available() else CPU_CORE

    def prices(mesh: tuple[int, ...]) -> Prices:
        among = ways.axis_ranks(mesh)
        links = tuple(ways.link_of(seen, ranks) for ranks in among)
        hides = 1.0 if base is GPU else ways.hidden(seen, cluster, among)
        return Prices(base, links, 0.0, rows, hides)

    made: list[Option] = []
    for mesh in shapes if world.rank == 0 else ():
        made += ways.options(traced, mesh, prices(mesh), limits.rings)
    return files.decode(world.agree(files.encode(made)), list[Option])


# --- the cache ------------------------------------------------------------------------------------


def cache_path(fingerprint: str) -> Path:
    """Profiles live in AUTOPAR_CACHE, else below the user's cache folder."""
    base = os.environ.get("AUTOPAR_CACHE") or os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base else Path.home() / ".cache"
    return folder / "autopar_torch" / f"{fingerprint}.json"


def _fingerprint(traced: Traced, call: Call, cluster: Cluster, limits: Constraints) -> str:
    """Equal where a profile may be used again: model, machines, versions, batch, and what of it all
    was looked at: only what some plan within the limits needs is measured."""
    looked_at = msgspec.structs.replace(limits, memory_bytes=None)
    parts = [files.encode(traced.graph), files.encode(cluster), files.encode(looked_at),
             f"{torch.__version__} {call.num_rows} {FORMAT}".encode()]  # fmt: skip
    return hashlib.sha256(b"|".join(parts)).hexdigest()[:16]


FORMAT = 5  # of what a profile means: changes with the measuring code


def _load(path: Path) -> Known | None:
    try:
        return files.load(path, Known) if path.exists() else None
    except FileError as error:
        log.warning("profile: %s; it is measured again", error)
        return None


def _keep(known: Known, path: Path) -> None:
    try:
        files.save(known, path)
    except (FileError, OSError) as error:
        log.warning("profile: not kept for the next run: %s", error)


__all__ = ["Known", "best", "choose", "cluster_of", "measure", "recall"]
