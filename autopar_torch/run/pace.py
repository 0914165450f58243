"""Which rank has become slower, and since when: how long each computes and waits, step by step.

What a rank computes is compared with what all compute in the same steps, so that longer batches, or
a machine that is busy for all, raise no alarm. If steps are longer than that explains, it is what
ranks exchange. What a rank has to say travels in the message of the loss. Only CPUs are watched: on
a GPU the time of a step is not known before it has ended.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..shard.watch import listen
from .world import World

LOOK_S = 0.25  # steps are looked at together, as many as last so long
FEWEST, MOST = 12, 25  # looks that say what is usual
SHIFT = 0.10  # the smallest slow-down that is looked for
QUIET = 12.0  # so many times the noise has to pile up; jitter of 3 % alone takes a million looks
LEAST_NOISE = 0.01
NETWORK = -1  # in place of a rank
NOTE = " of the watch"  # no output of a model has this name


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
    """A rank that computes longer, or less long, than it used to beside the others; or steps that
    are longer though all compute as ever (`NETWORK`)."""

    rank: int
    factor: float
    since: int
    step_s: float  # that steps take now


class Detector:
    """Looks at every rank's seconds of computing, and at how long steps are."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.taken = num_ranks, list[tuple[float, ...]]()
        self._begin()

    def _begin(self) -> None:
        self.usual: list[list[float]] = []  # looks: each rank's seconds, then the step's
        self.last: list[tuple[int, list[float]]] = []
        self.drifts = [Piled() for _ in range(self.num_ranks + 1)]

    @property
    def ready(self) -> bool:
        """Whether it knows what is usual."""
        return len(self.usual) >= FEWEST

    def step(self, computed_s: Sequence[float], waited_s: Sequence[float],
             number: int) -> Slowed | None:
        """What changed, once several steps have been looked at together."""
        step_s = statistics.fmean(map(sum, zip(computed_s, waited_s, strict=True)))
        self.taken.append((*computed_s, step_s))
        if sum(own[-1] for own in self.taken) < LOOK_S:
            return None
        look = [statistics.median(own) for own in zip(*self.taken, strict=True)]
        self.taken.clear()
        return self.look(look, number)

    def look(self, now: list[float], step: int) -> Slowed | None:
        """What changed, if it has piled up; then what is now becomes the usual."""
        calm = not any(drift.slower or drift.faster for drift in self.drifts)
        if not self.ready:
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
        self._begin()
        blamed = _blamed(factors)
        return Slowed(blamed, factors[blamed], since, recent[-1])


def _blamed(factors: Sequence[float]) -> int:
    """The rank whose own seconds changed most (if one of two is slower, the other one's share is
    smaller); the network, if that does not tell why steps changed."""
    sizes = [abs(math.log(max(factor, 1e-9))) for factor in factors]
    most = max(range(len(sizes) - 1), key=sizes.__getitem__)
    return most if sizes[most] >= sizes[-1] / 2 else NETWORK


def _change(own: int, now: Sequence[float], usual: Sequence[float]) -> float:
    """By how much a rank computes (or a step takes) longer than usual, in steps of which ranks tell
    how much work they are."""
    ratios = [a / b for a, b in zip(now[:-1], usual[:-1], strict=True) if b > 0.0]
    if not ratios or not usual[own] or not now[own]:
        return 0.0
    return math.log(now[own] / usual[own]) - math.log(statistics.median(ratios) or 1.0)


def _noise(changes: Sequence[float]) -> float:
    """Of few looks it may be more than it seems."""
    return max(LEAST_NOISE, statistics.stdev(changes) * (1 + 1 / math.sqrt(len(changes))))


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
        with listen() as watch:
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
