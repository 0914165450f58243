"""Let the clock decide between the best plans: a few real steps of each, interleaved."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from ..search.best import Choice, Outcome
from ..trace import Traced
from ..trace.call import Call
from .materialize import full_values
from .model import ParallelModel

ROUNDS = 5


class _Trial:
    """One plan on a copy of the model, so that trying leaves no trace."""

    def __init__(self, parallel: ParallelModel, choice: Choice, traced: Traced, call: Call) -> None:
        module = copy.deepcopy(parallel.module)
        world, device = parallel.world, parallel.device
        self.model = ParallelModel(module, world, device, lambda *_: None, parallel.outputs)
        self.model.retrace = parallel.retrace
        self.model.adopt(choice.plan, traced, call, full_values(module, world, device, 0, None))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.seconds: list[float] = []

    def step(self, args: Sequence[object], kwargs: dict[str, object]) -> None:
        start = time.perf_counter()
        out = self.model(*args, **kwargs)
        loss = out if isinstance(out, Tensor) else out.loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)


def confirmed(parallel: ParallelModel, found: Outcome, count: int, traced: Traced, call: Call,
              tensors: Sequence[Tensor]) -> Outcome:  # fmt: skip
    """The same search with its first `count` plans in the order of the clock."""
    first = Choice(found.plan, found.step_s, found.memory_bytes)
    tried = (first, *found.others)[:count]
    state = torch.random.get_rng_state()
    args, kwargs = call.rebuild(tensors)
    trials = [_Trial(parallel, choice, traced, call) for choice in tried]
    for _ in range(ROUNDS + 1):
        for trial in trials:
            trial.step(args, kwargs)
    torch.random.set_rng_state(state)
    own = [statistics.median(trial.seconds[1:]) for trial in trials]
    times = parallel.world.sum(torch.tensor(own, dtype=torch.float64)) / parallel.world.size
    order = sorted(range(len(tried)), key=lambda i: float(times[i]))
    others = tuple(tried[i] for i in order[1:]) + found.others[count - 1 :]
    best = tried[order[0]]
    return msgspec.structs.replace(
        found, plan=best.plan, step_s=best.step_s, memory_bytes=best.memory_bytes, others=others,
        measured=tuple(float(times[i]) for i in order),
    )  # fmt: skip
