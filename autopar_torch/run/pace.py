"""Which rank has become slower, and since when: how long each computes, beside the others.

What a rank computes is compared with what all compute in the same steps, so that longer batches, or
a machine that is busy for all, raise no alarm. Only CPUs are watched: on a GPU the time of a step
is not known before it has ended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..shard.watch import listen
from .world import World

log = logging.getLogger("autopar_torch")
FEWEST, MOST = 12, 25  # looks that say what is usual
SHIFT = 0.10  # the smallest slow-down that is looked for
QUIET = 12.0  # so many times the noise has to pile up; jitter of 3 % alone takes a million looks
LEAST_NOISE = 0.01


class Piled(NamedTuple):
    """What has piled up of one rank's slow-downs and speed-ups (CUSUM: a sum that never falls
    below zero, of what is more than half the shift)."""

    slower: float = 0.0
    faster: float = 0.0
    since: int = 0  # the step after which the larger one began to grow

    def after(self, change: float, noise: float, num_usual: int, step: int) -> Piled:
        half = max(SHIFT, noise) / 2 + 1.25 * noise / math.sqrt(num_usual)  # that of the median
        slower = max(0.0, self.slower + change - half)
        faster = max(0.0, self.faster - change - half)
        return Piled(slower, faster, self.since if self.slower or self.faster else step)

    def alarm(self, noise: float) -> bool:
        return max(self.slower, self.faster) > QUIET * noise


class Slowed(NamedTuple):
    """A rank that computes longer, or less long, than it used to beside the others."""

    rank: int
    factor: float
    since: int


class Detector:
    """Looks at every rank's seconds of computing; the same on all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._begin(num_ranks)

    def _begin(self, num_ranks: int) -> None:
        self.usual: list[list[float]] = []  # looks: per rank, its seconds
        self.last: list[tuple[int, list[float]]] = []
        self.drifts = [Piled() for _ in range(num_ranks)]

    def look(self, seconds: Sequence[float], step: int) -> Slowed | None:
        """What changed, if it has piled up; then what is now becomes the usual."""
        now = list(seconds)
        calm = not any(drift.slower or drift.faster for drift in self.drifts)
        if len(self.usual) < FEWEST:
            self.usual.append(now)
            return None
        self.last.append((step, now))
        usual = [statistics.median(own) for own in zip(*self.usual, strict=True)]
        noises = [_noise([_change(own, look, usual) for look in self.usual])
                  for own in range(len(now))]
        self.drifts = [drift.after(_change(own, now, usual), noises[own], len(self.usual), step)
                       for own, drift in enumerate(self.drifts)]
        alarms = [own for own, drift in enumerate(self.drifts) if drift.alarm(noises[own])]
        if not alarms:
            if calm and len(self.usual) < MOST:
                self.usual.append(now)
            self.last = self.last[-MOST:]
            return None
        since = min(self.drifts[own].since for own in alarms)
        then = [look for at, look in self.last if at >= since]
        recent = [statistics.median(own) for own in zip(*then[len(then) // 2 :], strict=True)]
        factors = [a / b if b else 1.0 for a, b in zip(recent, usual, strict=True)]
        # If one of two is slower, the other one's share is smaller: whose seconds changed is it.
        blamed = max(range(len(now)), key=lambda own: abs(math.log(max(factors[own], 1e-9))))
        self._begin(len(now))
        return Slowed(blamed, factors[blamed], since)


def _change(own: int, now: Sequence[float], usual: Sequence[float]) -> float:
    """By how much a rank computes longer than usual, in steps of which others tell how much work
    they are."""
    ratios = [a / b for a, b in zip(now, usual, strict=True) if b > 0.0]
    if not ratios or not usual[own] or not now[own]:
        return 0.0
    return math.log(now[own] / usual[own]) - math.log(statistics.median(ratios) or 1.0)


def _noise(changes: Sequence[float]) -> float:
    """Of few looks it may be more than it seems."""
    return max(LEAST_NOISE, statistics.stdev(changes) * (1 + 1 / math.sqrt(len(changes))))


class Stopwatch:
    """A recorder that only adds up how long this rank computes."""

    def __init__(self, world: World, every: int) -> None:
        self.world, self.every = world, every
        self.detector = Detector(world.size)
        self.computed_s = 0.0
        self.steps: list[float] = []
        self.begun = time.perf_counter()

    @staticmethod
    def watches(world: World, every: int) -> bool:
        return bool(every) and world.size > 1 and not torch.cuda.is_available()

    @contextlib.contextmanager
    def computing(self, name: str) -> Iterator[None]:
        with listen() as watch:
            start = time.perf_counter()
            yield
            whole = time.perf_counter() - start
        self.computed_s += whole - sum(end - begin for _, begin, end in watch.spans)

    @contextlib.contextmanager
    def exchanging(self, name: str) -> Iterator[None]:
        yield

    def step(self, number: int) -> None:
        """A step begins; now and then ranks tell each other how long the last ones took them."""
        self.steps.append(self.computed_s)
        self.computed_s = 0.0
        if number % self.every:
            return
        took_s, self.begun = time.perf_counter() - self.begun, time.perf_counter()
        own = statistics.median(self.steps)
        self.steps.clear()
        found = self.detector.look(self.world.everyones(own, float), number)
        if found is not None and self.world.rank == 0:
            self._tell(found, took_s / self.every)

    def _tell(self, found: Slowed, step_s: float) -> None:
        member = self.world.watch.members[found.rank]
        if found.factor > 1.0:
            log.warning("%s computes %.2f times as long in a step as before, since about step %d "
                        "(a step now takes %.3f s): see what else runs there, its clock and its "
                        "temperature", member, found.factor, found.since, step_s)
        else:
            log.info("%s computes in %.2f of the time that a step took it before, since about "
                     "step %d", member, found.factor, found.since)
