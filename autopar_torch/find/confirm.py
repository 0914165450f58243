"""Let the clock decide between the best plans: a few real steps of each, interleaved."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from ..guards import Guards
from ..measure.stats import interleaved_medians
from ..run.materialize import full_values
from ..run.model import ParallelModel
from ..run.returned import ends_of
from ..run.world import World
from ..search.best import Choice, Result, varied
from ..shard.watch import between, stamp
from ..trace import Traced
from ..trace.call import Call

# After so many rounds a plan stops that is slower than the best by more than the factor.
CUTOFFS = ((3, 1.3), (8, 1.12), (16, 1.06), (32, 1.04), (64, 1.02), (128, 1.0))
UNWATCHED = Guards(batches=False, nan=False, drift_every=0)  # a trial is not the user's training
ENOUGH_S = 45.0  # after this long no further rounds begin


class StepRunner(Protocol):
    """It runs steps, and notes how long each step took."""

    seconds: list[float]

    def timed(self) -> None: ...


def race(runners: Sequence[StepRunner], cutoffs: Iterable[tuple[int, float]], world: World,
         stays: Collection[int] = (),
         enough_s: float = math.inf) -> list[list[float]]:
    """Run steps in turn, in a new random order each round; a runner that is far behind stops.
    Returns the seconds of each runner, round by round. All ranks must call this."""
    begin = time.perf_counter()
    for runner in runners:
        runner.timed()
        runner.seconds.clear()
    running, done = list(range(len(runners))), 0
    rounds_s: list[list[float]] = [[] for _ in runners]
    for rounds, factor in cutoffs:
        for number in range(done, rounds):
            for i in random.Random(number).sample(running, len(running)):
                runners[i].timed()
        done = rounds
        everyone = world.gather([runner.seconds for runner in runners])
        rounds_s = [slowest(ranks) for ranks in zip(*everyone, strict=True)]
        so_far = interleaved_medians(rounds_s)
        limit = min(so_far[i] for i in running) * factor
        running = [i for i in running if so_far[i] <= limit or i in stays]
        spent_s = max(world.gather(time.perf_counter() - begin))
        if len(running) == 1 or spent_s > enough_s:
            break
    return rounds_s


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of the slowest rank in each round: a step is over when all ranks are done with it."""
    return [max(times) for times in zip(*ranks, strict=True)]


class _PlanTrial:
    """One plan on a copy of the model, so that trying leaves no trace."""

    def __init__(self, parallel: ParallelModel, choice: Choice, traced: Traced, call: Call,
                 tensors: Sequence[Tensor]) -> None:
        self.args, self.kwargs = call.rebuild(tensors)
        module = copy.deepcopy(parallel.module)
        world, device = parallel.world, parallel.device
        self.model = ParallelModel(module, world, device, lambda *_: None, parallel.retrace,
                                   parallel.tracer_of, parallel.loss_fn, parallel.outputs,
                                   UNWATCHED, watch=False)
        self.model.adopt(choice.plan, (traced, call, None),
                         full_values(module, world, device, 0, None))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.seconds: list[float] = []

    def step(self) -> None:
        out = self.model(*self.args, **self.kwargs)
        ends = ends_of(out)
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self) -> None:
        """Time one step, after one that is not timed: in training, too, a step follows another."""
        self.step()
        self.model.world.sum(torch.zeros((), device=self.model.device))
        start = stamp()
        self.step()
        self.seconds.append(between(start, stamp()))


def confirmed(parallel: ParallelModel, found: Result, count: int, traced: Traced, call: Call,
              tensors: Sequence[Tensor]) -> Result:
    """The same search with its first `count` plans in the order of the clock."""
    tried = varied(found.choices, count)
    trials = [_PlanTrial(parallel, choice, traced, call, tensors) for choice in tried]
    rounds_s = race(trials, CUTOFFS, parallel.world, enough_s=ENOUGH_S)
    times = interleaved_medians(rounds_s)
    order = sorted(range(len(tried)), key=lambda i: (-len(rounds_s[i]), times[i]))
    rest = [choice for choice in found.choices if choice not in tried]
    return msgspec.structs.replace(found, choices=(*(tried[i] for i in order), *rest),
                                   measured=tuple(times[i] for i in order))
