"""From samples of blocks to numbers: what a block takes, and how that varies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple, cast

from ..shard.watch import Stamp, Watch, between, stamp
from .stats import trimmed_mean


class Sample(NamedTuple):
    """One run: its seconds on the clock, and those of them that it exchanged."""

    wall_s: float
    comm_s: float

    @property
    def compute_s(self) -> float:
        return self.wall_s - self.comm_s


class Later(NamedTuple):
    """A sample on a GPU, read once all is done: who waits for each block measures its launches."""

    start: Stamp
    end: Stamp
    exchanges: Sequence[tuple[str, Stamp, Stamp]]

    @property
    def wall_s(self) -> float:
        return between(self.start, self.end)

    @property
    def comm_s(self) -> float:
        return sum(between(start, end) for _, start, end in self.exchanges)

    @property
    def compute_s(self) -> float:
        return self.wall_s - self.comm_s


def timed(work: Callable[[], object]) -> float:
    start = stamp()
    work()
    return between(start, stamp())


def sampled(work: Callable[[], Any]) -> tuple[Any, Sample]:
    with Watch() as watch:
        start = stamp()
        result = work()
        end = stamp()
    if not isinstance(start, float):
        return result, cast(Sample, Later(start, end, watch.spans))
    return result, Sample(between(start, end), watch.seconds)


class Scales(NamedTuple):
    """Factors that bring times of single blocks to that of whole rounds."""

    compute: float = 1.0
    comm: float = 1.0


Columns = Sequence[Sequence[Sample]]  # per block and phase: its samples, one a round


def scales(own: Columns) -> Scales:
    """Scale blocks so that they sum to what whole rounds take, whatever single ones met."""
    compute = sum(trimmed_mean([s.compute_s for s in samples]) for samples in own)
    comm = sum(trimmed_mean([s.comm_s for s in samples]) for samples in own)
    if not compute:
        return Scales()
    return Scales(trimmed_mean(whole(own, lambda s: s.compute_s)) / compute,
                  trimmed_mean(whole(own, lambda s: s.comm_s)) / comm if comm else 1.0)


def whole(own: Columns, value: Callable[[Sample], float]) -> list[float]:
    """Seconds of whole rounds."""
    count = min((len(samples) for samples in own), default=0)
    return [sum(value(samples[k]) for samples in own) for k in range(count)]


def seconds(samples: Sequence[Sample], scale: Scales) -> tuple[float, float]:
    """(computing, exchanging) of one block. Not medians: a throttled core stops for milliseconds,
    in few of its short blocks and in all long ones."""
    if not samples:
        return 0.0, 0.0
    compute, comm = (trimmed_mean([getattr(s, n) for s in samples])
                     for n in ("compute_s", "comm_s"))
    return compute * scale.compute, comm * scale.comm


class Variation(NamedTuple):
    """How a chain of blocks varied on one rank."""

    rounds: list[float]  # seconds of computing in whole rounds
    single: list[float]  # factors of single runs over their round; their mean is 1


def variation(own: Columns) -> Variation:
    rounds = whole(own, lambda s: s.compute_s)
    if not rounds:
        return Variation([], [])
    usual = median(rounds)
    typical = [trimmed_mean([s.compute_s for s in samples]) for samples in own]
    least = sum(typical) / len(typical) / 4  # smaller ones are mostly clock
    single = [samples[k].compute_s / max(m * rounds[k] / max(usual, 1e-9), 1e-9)
              for samples, m in zip(own, typical, strict=True) if m > least
              for k in range(len(rounds))]
    middle = fmean(single) if single else 1.0
    return Variation(rounds, [x / middle for x in single])


def slowdowns(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Each round of a chain, on each rank, over the mean of the ranks' medians. So a core that is
    slow for the whole session shows too; its own rounds alone would not tell."""
    seen = [rounds for rounds in ranks if rounds]
    usual = fmean([median(rounds) for rounds in seen]) if seen else 1.0
    return [seconds / max(usual, 1e-9) for rounds in seen for seconds in rounds]
