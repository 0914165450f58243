"""Predict a training step: a plan, a model and a profile become a Timeline."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Sequence

from ..cluster import Cluster
from ..model import ModelGraph
from ..plan import Plan
from ..profile import Lookup, Profile, own_card
from ..timeline import Span, Timeline
from . import fluid, memory
from .costs import Costs
from .equal_ranks import equal_groups, representatives
from .jitter import SampledStep, sampled_steps, usual
from .network import lookup
from .tasks import StepTasks

DRAWS = 7  # of a step whose computing times vary as measured: enough for a median


def simulate(plan: Plan, graph: ModelGraph, profile: Profile | Lookup, num_rows: int,
             start_s: float = 0.0, draws: int = 0,
             room_bytes: Sequence[float] | None = None) -> Timeline:
    """One step of `num_rows` rows, starting `start_s` into the cluster's changes.

    With `draws`, it is the median of so many steps whose computing times vary as measured. A lookup
    that is given remembers what was looked up before, and may know links in its own way. What does
    not fit into `room_bytes` of each device takes forever: only its memory is worked out.
    """
    known = profile if isinstance(profile, Lookup) else lookup(profile)
    profile = known.profile
    found = representatives(plan, profile, num_rows)
    varies = draws and not profile.quiet
    chances = sampled_steps(plan, profile.jitter_of, draws) if varies else [usual(plan)]
    with uncollected():
        costs = Costs(plan, graph, known, found)
        peaks = memory.peaks(costs, num_rows)
        if room_bytes and any(peaks[rank].peak_bytes > room_bytes[rank] for rank in plan.devices):
            return Timeline((), math.inf, peaks)
        steps = [_step(costs, num_rows, start_s, chance) for chance in chances]
    steps.sort(key=lambda step: step[1])
    spans, step_s = steps[len(steps) // 2]
    return Timeline(spans, step_s, peaks, alike=equal_groups(found))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Run without the garbage collector: nothing here is part of a reference cycle, and looking
    for cycles among all that a model is made of takes a third of the time. One inside another does
    nothing, so many steps that are priced in one do not even collect in between."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _step(costs: Costs, num_rows: int, start_s: float,
          sampled: SampledStep) -> tuple[tuple[Span, ...], float]:
    tasks = StepTasks(costs, num_rows, sampled).build()
    times = fluid.run(tasks, capacities(costs.profile.profile.cluster, start_s))
    spans = tuple(
        Span(rank, task.stream, task.name, start, end)
        for task, (start, end) in zip(tasks, times, strict=True) if end > start
        for rank in task.ranks
    )
    return spans, max((end for _, end in times), default=0.0)


def capacities(cluster: Cluster, start_s: float) -> list[fluid.Capacity]:
    """The cluster's changes, named as the tasks name what they need: `core 3`, `link 0`."""
    return [fluid.Capacity(max(0.0, c.at_s - start_s), name, c.factor)
            for c in cluster.changes for name in _meant(cluster, c.name)]


def _meant(cluster: Cluster, name: str) -> list[str]:
    """Both directions of a node's link, with one card for all devices or one for each."""
    if not name.startswith("link "):
        return [name]
    ranks = [rank for rank, node in enumerate(cluster.node_of) if name == f"link {node}"]
    cards = [name, *(own_card(name, rank) for rank in ranks)]
    return [f"{card} {way}" for card in cards for way in ("out", "in")]
