"""Predict a training step: a plan, a model and a profile become a Timeline."""

from __future__ import annotations

from ..cluster import Cluster
from ..model import ModelGraph
from ..plan import Plan
from ..profile import Profile
from ..timeline import Span, Timeline
from . import fluid, memory
from .costs import Costs
from .network import lookup
from .tasks import StepTasks


def simulate(plan: Plan, graph: ModelGraph, profile: Profile, num_rows: int,
             start_s: float = 0.0) -> Timeline:  # fmt: skip
    """One step of `num_rows` rows, starting `start_s` into the cluster's changes."""
    costs = Costs(plan, graph, lookup(profile))
    tasks = StepTasks(costs, num_rows).build()
    times = fluid.run(tasks, capacities(profile.cluster, start_s))
    spans = tuple(
        Span(rank, task.stream, task.name, start, end)
        for task, (start, end) in zip(tasks, times, strict=True) if end > start
        for rank in task.ranks
    )  # fmt: skip
    step_s = max((end for _, end in times), default=0.0)
    return Timeline(spans, step_s, memory.peaks(costs, num_rows))


def capacities(cluster: Cluster, start_s: float) -> list[fluid.Capacity]:
    """The cluster's changes as capacities: `core 3` or `link 0`, as the tasks name them."""
    return [fluid.Capacity(max(0.0, c.at_s - start_s), c.name, c.factor)
            for c in cluster.changes]  # fmt: skip
