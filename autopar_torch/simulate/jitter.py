"""Simulated steps whose computing times vary as they did when they were measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..measure.stats import quantiles
from ..plan import Plan
from ..profile import Jitter


@dataclass
class SampledStep:
    """One such step. The ranks of a tensor group have one pace: the time that they wait for each
    other is already part of their measured exchanges."""

    slowdown: dict[int, float]  # of each rank in the whole step
    block: Sequence[float]
    chance: random.Random

    def factors(self, count: int) -> list[float]:
        """Factors of so many blocks, on top of the pace of the step."""
        if len(self.block) == 1:
            return [*self.block] * count
        return self.chance.choices(self.block, k=count)


def sampled_steps(plan: Plan, jitter: Jitter, count: int) -> list[SampledStep]:
    """So many steps, and as many slowdowns. Each group takes each once, in a random order of its
    own, so that few steps tell what many would."""
    groups = dict.fromkeys(stage.devices for r in plan.replicas for stage in r.stages)
    slowdowns = quantiles(jitter.rank, count)
    orders = random.Random(0)
    columns = [orders.sample(slowdowns, count) for _ in groups]
    return [
        SampledStep({rank: own[k] for ranks, own in zip(groups, columns, strict=True)
                     for rank in ranks}, jitter.block, random.Random(k))
        for k in range(count)
    ]


def usual(plan: Plan) -> SampledStep:
    """The step without any variation."""
    [sampled] = sampled_steps(plan, Jitter(), 1)
    return sampled
