"""Find the plan by itself: measure what the candidates need, search, and agree on the result."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from .. import files, progress
from ..cluster import Cluster
from ..errors import FileError
from ..measure.stats import APART, STEP
from ..model import ModelGraph
from ..profile import Profile
from ..run.world import World
from ..search.best import KEPT, Choice, Result, varied
from ..search.space import SAFETY, Constraints
from ..search.unequal import fastest, gives_unequal
from ..simulate import DRAWS, simulate
from ..simulate.network import lookup
from ..trace import Traced
from ..trace.call import Call
from .measuring import MOST_KEPT, Known, measure, name_noise, tell_stale
from .session import cluster_of

Noun = TypeVar("Noun", Known, Result)
log = logging.getLogger("autopar_torch")


def choose(traced: Traced, call: Call, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor],
           world: World, device: torch.device, limits: Constraints,
           kept: int = KEPT) -> tuple[Result, Known]:
    """The fastest plan for this batch on these ranks, and the next, the same on every rank; and
    what they were chosen by."""
    cluster = cluster_of(world, traced.graph)
    with world.doing("measuring"):
        known = recall(traced, call, tensors, buffers, world, device, cluster, limits)
    with world.doing("searching"):
        return world.by_first(Result, lambda: found_before(
            traced.graph, known, call.num_rows, limits, kept)), known


def found_before(graph: ModelGraph, known: Known, num_rows: int, limits: Constraints,
                  kept: int) -> Result:
    """The answer that the cache has for an equal question, if any."""
    key = _hashed(files.encode(graph), files.encode(known), files.encode(limits),
                  f"{num_rows} {kept} {_sources()}".encode())
    path = cache_path(f"plan-{key}")
    found = _load(path, Result)
    if found is None:
        found = best(graph, known, num_rows, limits, kept)
        _keep(found, path)
    else:
        log.info("plan: as found before, from %s", path)
    return found


def best(graph: ModelGraph, known: Known, num_rows: int, limits: Constraints,
         kept: int = KEPT) -> Result:
    """Search by the walk; the engine, which shares cores and links, orders the best of them.

    Where nothing is shared, the engine would only repeat the walk. The engine may predict more
    bytes than the search: if no plan fits then, the search is repeated with less memory.
    """
    progress.tell("searching")
    equal = not gives_unequal(known.profile)
    shared = not known.profile.assumed or known.profile.cluster.shares
    num_kept = max(kept, MOST_KEPT) if equal and shared else kept
    result = fastest(graph, known.options, lookup(known.profile), num_rows, limits, num_kept)
    choices = list(result.choices)
    if shared:
        choices = _simulated(varied(choices, kept), graph, known.profile, num_rows)
    if equal and not known.profile.assumed:
        capacity_bytes = limits.capacity_bytes(known.profile.cluster)
        least = SAFETY * min(choice.memory_bytes for choice in choices)
        if least > capacity_bytes:
            less = replace(limits, memory_bytes=int(capacity_bytes * capacity_bytes / least))
            return best(graph, known, num_rows, less, kept)
        choices = [choice for choice in choices if SAFETY * choice.memory_bytes <= capacity_bytes]
    choices.sort(key=lambda c: c.step_s)
    first, *others = choices[:kept]
    reason = f"fastest of {result.considered} candidates"
    named = replace(first, plan=replace(first.plan, reason=reason))
    return replace(result, choices=(named, *others))


def _simulated(choices: Sequence[Choice], graph: ModelGraph, profile: Profile,
               num_rows: int) -> list[Choice]:
    timelines = [simulate(c.plan, graph, profile, num_rows, draws=DRAWS)
                 for c in progress.counted("simulating the best plans", choices)]
    return [Choice(c.plan, t.step_s, max(memory.peak_bytes for memory in t.memory))
            for c, t in zip(choices, timelines, strict=True)]


def recall(traced: Traced, call: Call, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor],
           world: World, device: torch.device, cluster: Cluster,
           limits: Constraints) -> Known:
    """What was measured before, from the cache; else it is measured now."""
    path = cache_path(_fingerprint(traced, call, cluster, limits))
    cached = _load(path, Known) if world.rank == 0 else None
    if cached is not None and not _as_fast(cached.profile.cluster, cluster):
        log.info("profile: %s is of other speeds, so it is measured again", path)
        cached = None
    cached = world.told(cached, Known | None)  # type: ignore[arg-type]
    if cached is not None:
        log.info("profile: from %s", path)
        if world.rank == 0:
            tell_stale(cached)
        name_noise(cached.profile, world)
        return cached
    start = time.perf_counter()
    known = measure(traced, call, tensors, buffers, world, device, cluster, limits)
    if world.rank == 0:
        log.info("profile: measured in %.1f s", time.perf_counter() - start)
        _keep(known, path)
    return known


# --- the cache ------------------------------------------------------------------------------------


def cache_path(fingerprint: str) -> Path:
    """Profiles and answers live in AUTOPAR_CACHE, else below the user's cache folder."""
    base = os.environ.get("AUTOPAR_CACHE") or os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base else Path.home() / ".cache"
    return folder / "autopar_torch" / f"{fingerprint}.json"


def _fingerprint(traced: Traced, call: Call, cluster: Cluster, limits: Constraints) -> str:
    """Equal where a profile may be used again: of the same model, machines, versions and batch, and
    the same limits: only what some plan within the limits needs is measured. (How fast the machines
    are beside each other is compared, as it never is the same twice: `_as_fast`.)"""
    rest = f"{torch.__version__} {torch.version.cuda} {call.num_rows} {FORMAT}"
    nodes = tuple(tuple(replace(d, speed=1.0) for d in node) for node in cluster.nodes)
    same = replace(cluster, nodes=nodes)
    return _hashed(*map(files.encode, (traced.graph, same, limits)), rest.encode())


def _as_fast(then: Cluster, now: Cluster) -> bool:
    """Whether devices fall into the same classes, which are about as fast."""
    return then.class_of == now.class_of and all(
        math.isclose(a.speed, b.speed, rel_tol=APART, abs_tol=1.01 * STEP)
        for a, b in zip(then.classes, now.classes, strict=True))


def _hashed(*parts: bytes) -> str:
    return hashlib.sha256(b"|".join(parts)).hexdigest()[:16]


def _sources() -> str:
    """The sources of measuring and searching: with other code the answer may differ."""
    package = Path(__file__).resolve().parent.parent
    sources = sorted(p for folder in ROOMS for p in (package / folder).glob("*.py"))
    return _hashed(*(p.read_bytes() for p in sources))


ROOMS = (".", "search", "simulate", "shard", "run", "find")
FORMAT = 23  # raised when a number in a profile gets another meaning


def _load(path: Path, kind: type[Noun]) -> Noun | None:
    try:
        return files.load(path, kind) if path.exists() else None
    except FileError as error:
        log.warning("cache: %s; it is found out again", error)
        return None


def _keep(found: Known | Result, path: Path) -> None:
    try:
        files.save(found, path)
    except (FileError, OSError) as error:
        log.warning("cache: not kept for the next run: %s", error)
