"""Steps whose computing times vary as they were seen to vary."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..measure.stats import quantiles
from ..plan import Plan
from ..profile import Jitter


@dataclass
class Draw:
    """One such step. A tensor group varies together: what its ranks wait for each other was
    measured with what they exchange."""

    pace: dict[int, float]  # of each rank in the whole step
    block: Sequence[float]
    chance: random.Random

    def factors(self, count: int) -> list[float]:
        """How so many blocks vary beside the step."""
        if len(self.block) == 1:
            return [*self.block] * count
        return self.chance.choices(self.block, k=count)


def drawn(plan: Plan, jitter: Jitter, count: int) -> list[Draw]:
    """So many steps. Between them every group goes at each of as many paces, in an order of its
    own, so that few steps tell what many would."""
    groups = dict.fromkeys(stage.devices for r in plan.replicas for stage in r.stages)
    paces = quantiles(jitter.rank, count)
    orders = random.Random(0)
    columns = [orders.sample(paces, count) for _ in groups]
    return [
        Draw({rank: own[k] for ranks, own in zip(groups, columns, strict=True) for rank in ranks},
             jitter.block, random.Random(k))
        for k in range(count)
    ]


def usual(plan: Plan) -> Draw:
    """The step in which everything takes what it usually does."""
    [draw] = drawn(plan, Jitter(), 1)
    return draw
