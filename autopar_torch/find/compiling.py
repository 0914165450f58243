"""Which kinds of blocks of a plan run compiled: those that are measured to be quicker so."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from ..measure.session import Session
from ..plan import Plan
from ..profile import COMPILED, QUICK_S, BlockNeed, Lookup, Profile, merged
from ..run.model import ParallelModel
from ..run.world import World
from ..search.best import Choice
from ..shard import compiled
from ..simulate import DRAWS, simulate
from ..simulate.to_measure import block_needs
from ..trace import Traced
from ..trace.call import Call
from .session import cluster_of, session_on

log = logging.getLogger("autopar_torch")
ROUNDS = 4  # of both ways at least, if there is time
GAIN = 0.03  # by less than that it may be chance


def settled(parallel: ParallelModel, plan: Plan, traced: Traced, call: Call,
            tensors: Sequence[Tensor]) -> Plan:
    """The plan with the kinds that run compiled; one that names some keeps these. Nothing is
    compiled if it cannot be on any one rank. All ranks call it."""
    world = parallel.world
    with world.doing("compiling"):
        if why := _why_not(world, parallel.device):
            if world.rank == 0:
                log.warning("blocks run uncompiled, as torch's compiler fails here: %s", why)
            return replace(plan, compiled=())
        wanted = Counter(need for need in block_needs(plan, traced.graph, call.num_rows)
                         if not traced.graph.kinds[need.kind].mutates)
        if plan.compiled:
            own = [need for need in wanted if need.compiled]
            _session(parallel, own, traced, call, tensors)  # which runs each once
            return plan
        both = [replace(need, compiled=on) for need in wanted for on in (False, True)]
        session = _session(parallel, both, traced, call, tensors)
        profile = _measured(session, world)
        failures = {k: why for own in world.gather(compiled.failures) for k, why in own.items()}
        kinds = _quicker(wanted, profile, failures)
        if world.rank == 0:
            log.info("compiled, as it is quicker: %s", ", ".join(kinds) or "no kind of block")
            for kind, why in failures.items():
                log.warning("%s runs uncompiled: %s", traced.graph.named([kind]), why)
        found = replace(plan, compiled=kinds)
        _predict(parallel, found, profile, call.num_rows)
        return found


def _why_not(world: World, device: torch.device) -> str:
    """What the compiler of some rank fails with."""
    found = world.gather(compiled.refusal(device))
    return next((f"{why} (rank {rank})" for rank, why in enumerate(found) if why), "")


def _session(parallel: ParallelModel, needs: Sequence[BlockNeed], traced: Traced, call: Call,
             tensors: Sequence[Tensor]) -> Session:
    """Measuring of these blocks. What is compiled here is what training runs."""
    world, case = parallel.world, parallel.case
    cluster = case.profile.cluster if case else cluster_of(world, traced.graph)
    return session_on(cluster, needs, [], traced, call, tensors,
                      dict(parallel.module.named_buffers()), world, parallel.device)


def _measured(session: Session, world: World) -> Profile:
    deadline = time.perf_counter() + QUICK_S
    while True:
        session.round()
        late = any(world.gather(time.perf_counter() > deadline))
        if late or (session.rounds >= ROUNDS and not session.noise()):
            return session.profile()


def _predict(parallel: ParallelModel, plan: Plan, profile: Profile, num_rows: int) -> None:
    """The plan that was found takes another time now."""
    case, found = parallel.case, parallel.found
    if case is None or found is None:
        return
    own = tuple(cell for cell in profile.cells if COMPILED in cell.sharding)
    known = replace(case.profile, cells=merged([*case.profile.cells, *own]))
    step = simulate(plan, case.graph, known, num_rows, draws=DRAWS)
    peak_bytes = max(memory.peak_bytes for memory in step.memory)
    parallel.case = dataclasses.replace(case, profile=known)
    parallel.found = replace(found, choices=(Choice(plan, step.step_s, peak_bytes),
                                             *found.choices[1:]))


def _quicker(wanted: Counter[BlockNeed], profile: Profile,
             failures: Mapping[str, str]) -> tuple[str, ...]:
    """Kinds whose blocks in the plan take less when compiled, on the slowest devices."""
    seen, took_s = Lookup(profile), defaultdict[tuple[str, bool], float](float)
    classes = range(len(profile.cluster.classes))
    for need, count in wanted.items():
        for on in (False, True):
            key = replace(need, compiled=on).key
            own = [c for c in classes if (need.kind, key, c) in seen.costs]
            cost = seen.slowest(need.kind, key, need.rows, own)
            took_s[need.kind, on] += count * (cost.forward_s + cost.backward_s)
    return tuple(sorted(kind for kind in {need.kind for need in wanted} - set(failures)
                        if took_s[kind, True] < (1 - GAIN) * took_s[kind, False]))
