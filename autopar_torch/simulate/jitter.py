"""Steps whose computing times vary as they were seen to vary."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..measure.stats import quantiles
from ..plan import Plan
from ..profile import Jitter


@dataclass
class SampledStep:
    """One such step. A tensor group varies together: what its ranks wait for each other was
    measured with what they exchange."""

    slowdown: dict[int, float]  # of each rank in the whole step
    block: Sequence[float]
    chance: random.Random

    def factors(self, count: int) -> list[float]:
        """How so many blocks vary beside the step."""
        if len(self.block) == 1:
            return [*self.block] * count
        return self.chance.choices(self.block, k=count)


def sampled_steps(plan: Plan, jitter: Jitter, count: int) -> list[SampledStep]:
    """So many steps. Between them every group goes at each of as many slowdowns, in an order of its
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
    """The step in which everything takes what it usually does."""
    [sampled] = sampled_steps(plan, Jitter(), 1)
    return sampled
