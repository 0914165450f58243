"""Which rank has become slower, and since when: how long each computes and waits, step by step.

What a rank computes is compared with what all compute in the same steps, so that longer batches, or
a machine that is busy for all, raise no alarm. If steps are longer than that explains, it is what
ranks exchange. What a rank has to say travels in the message of the loss. Only CPUs are watched: on
a GPU the time of a step is not known before it has ended.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..shard.watch import Watch
from .world import World

LOOK_S = 0.25  # steps are looked at together, as many as last so long
FEWEST, MOST = 12, 25  # looks that say what is usual
SHIFT = 0.10  # the smallest slow-down that is looked for
QUIET = 12.0  # so many times the noise has to pile up; jitter of 3 % alone takes a million looks
LEAST_NOISE = 0.01
NETWORK = -1  # in place of a rank
NOTE = " of the watch"  # no output of a model has this name
LookSeconds = NDArray[np.float64]


class Slowed(NamedTuple):
    """A rank that computes longer, or less long, than it used to beside the others; or steps that
    are longer though all compute as ever (`NETWORK`)."""

    rank: int
    factor: float
    since: int
    step_s: float  # that steps take now


class Detector:
    """Looks at every rank's seconds of computing, and at how long steps are. Slow-downs and
    speed-ups of more than half the shift pile up each in a sum that never falls below zero
    (CUSUM)."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.taken = num_ranks, list[tuple[float, ...]]()
        self.taken_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self.usual: list[LookSeconds] = []  # looks: each rank's seconds, then the step's
        self.last: list[tuple[int, LookSeconds]] = []
        self.piled = np.zeros((2, self.num_ranks + 1))  # slower, faster
        self.since = np.zeros(self.num_ranks + 1, dtype=int)  # the step after which it began

    @property
    def ready(self) -> bool:
        """Whether it knows what is usual."""
        return len(self.usual) >= FEWEST

    def step(self, computed_s: Sequence[float], waited_s: Sequence[float],
             number: int) -> Slowed | None:
        """What changed, once several steps have been looked at together."""
        step_s = (sum(computed_s) + sum(waited_s)) / self.num_ranks
        self.taken.append((*computed_s, step_s))
        self.taken_s += step_s
        if self.taken_s < LOOK_S:
            return None
        look = np.median(self.taken, axis=0)
        self.taken, self.taken_s = [], 0.0
        return self.look(look, number)

    def look(self, now: LookSeconds, step: int) -> Slowed | None:
        """What changed, if it has piled up; then what is now becomes the usual."""
        if not self.ready:
            self.usual.append(now)
            return None
        calm, num_usual, known = not self.piled.any(), len(self.usual), np.array(self.usual)
        self.last = [*self.last[-MOST:], (step, now)]
        usual = np.median(known, axis=0)
        # Of few looks the noise may be more than it seems, and so may the median be off.
        noise = np.maximum(LEAST_NOISE, _changes(known, usual).std(axis=0, ddof=1)
                           * (1 + 1 / math.sqrt(num_usual)))
        half = np.maximum(SHIFT, noise) / 2 + 1.25 * noise / math.sqrt(num_usual)
        change = _changes(now[None], usual)[0]
        self.piled = np.maximum(0.0, self.piled + np.array([change - half, -change - half]))
        self.since[~self.piled.any(axis=0)] = step
        alarms = self.piled.max(axis=0) > QUIET * noise
        if not alarms.any():
            if calm and num_usual < MOST:
                self.usual.append(now)
            return None
        since = int(self.since[alarms].min())
        then = [look for at, look in self.last if at >= since]
        recent = np.median(then[len(then) // 2 :], axis=0)
        factors = np.where(usual > 0.0, recent / np.where(usual > 0.0, usual, 1.0), 1.0)
        self._begin()
        blamed = _blamed(factors)
        return Slowed(blamed, float(factors[blamed]), since, float(recent[-1]))


def _blamed(factors: LookSeconds) -> int:
    """The rank whose own seconds changed most (if one of two is slower, the other one's share is
    smaller); the network, if that does not tell why steps changed."""
    sizes = np.abs(np.log(np.maximum(factors, 1e-9)))
    most = int(sizes[:-1].argmax())
    return most if sizes[most] >= sizes[-1] / 2 else NETWORK


def _changes(looks: LookSeconds, usual: LookSeconds) -> LookSeconds:
    """By how much ranks compute (and steps take) longer than usual in each look, in steps of which
    ranks tell how much work they are."""
    ratios = looks / np.where(usual > 0.0, usual, 1.0)
    some = usual[:-1] > 0.0
    work = np.median(ratios[:, :-1][:, some], axis=1) if some.any() else np.zeros(len(looks))
    known = (usual > 0.0) & (looks > 0.0)
    return np.where(known, np.log(np.where(known, ratios, 1.0)), 0.0) - np.where(
        known, np.log(np.where(work > 0.0, work, 1.0))[:, None], 0.0)


class Heard(NamedTuple):
    """What all ranks said of a step."""

    computed_s: list[float]
    waited_s: list[float]
    called: bool  # rank 0 has something to tell before the next step


class Stopwatch:
    """A recorder that only adds up how long this rank computes and waits, and tells the others."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls = False  # on rank 0: ask all ranks to listen before the next step
        self.heard: Heard | None = None
        self._now, self._last = [0.0, 0.0], [0.0, 0.0]

    @contextlib.contextmanager
    def computing(self, name: str) -> Iterator[None]:
        with Watch() as watch:
            start = time.perf_counter()
            yield
            whole = time.perf_counter() - start
        waited = sum(end - begin for _, begin, end in watch.spans)
        self._now[0] += whole - waited
        self._now[1] += waited

    @contextlib.contextmanager
    def exchanging(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._now[1] += time.perf_counter() - start

    def step(self) -> None:
        """A step begins: its message will tell how long the last one was."""
        self._last, self._now = self._now, [0.0, 0.0]

    def write(self, values: dict[str, Tensor], device: torch.device) -> None:
        """Add a note to what will be summed over all ranks: beside the loss, if that fits."""
        own, size = self.world.rank, self.world.size
        note = [0.0] * (2 * size + 1)
        note[own], note[size + own], note[-1] = *self._last, float(self.calls)
        values[NOTE] = torch.tensor(note, dtype=torch.float32, device=device)
        if (loss := values.get("loss")) is not None and loss.dtype == torch.float32:
            values["loss"] = torch.cat([loss.reshape(-1), values.pop(NOTE)])

    def read(self, values: dict[str, Tensor], like: Tensor | None) -> None:
        """Take everyone's notes out of the sums; `like`: what the loss was before."""
        if NOTE in values or like is None:
            told = values.pop(NOTE)
        else:
            sums = values["loss"]
            values["loss"] = sums[: like.numel()].reshape(like.shape).clone()  # no view
            told = sums[like.numel() :]
        *seconds, called = told.tolist()
        half = len(seconds) // 2
        self.heard = Heard(seconds[:half], seconds[half:], called > 0)
