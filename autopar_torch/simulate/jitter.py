"""Simulated steps whose computing times vary as they did when they were measured."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ..measure.stats import quantiles
from ..plan import Plan
from ..profile import Jitter

JitterOf = Callable[[int], Jitter]  # of a rank


@dataclass
class SampledStep:
    """One such step. The ranks of a tensor group have one pace: the time that they wait for each
    other is already part of their measured exchanges."""

    slowdown: dict[int, float]  # of each rank in the whole step
    jitter_of: JitterOf
    chance: random.Random

    def factors(self, rank: int, count: int) -> list[float]:
        """Factors of so many blocks on a rank, on top of the pace of the step."""
        block = self.jitter_of(rank).block
        if len(block) == 1:
            return [*block] * count
        return self.chance.choices(block, k=count)


def sampled_steps(plan: Plan, jitter_of: JitterOf, count: int) -> list[SampledStep]:
    """So many steps, and as many slowdowns. Each group takes each once, in a random order of its
    own, so that few steps tell what many would."""
    groups = dict.fromkeys(stage.devices for r in plan.replicas for stage in r.stages)
    orders = random.Random(0)
    columns = [orders.sample(quantiles(jitter_of(ranks[0]).rank, count), count)
               for ranks in groups]
    return [
        SampledStep({rank: own[k] for ranks, own in zip(groups, columns, strict=True)
                     for rank in ranks}, jitter_of, random.Random(k))
        for k in range(count)
    ]


def usual(plan: Plan) -> SampledStep:
    """The step without any variation."""
    [sampled] = sampled_steps(plan, lambda _: Jitter(), 1)
    return sampled
