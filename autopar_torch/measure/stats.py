"""Numbers from noisy repeats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from statistics import fmean, median

NOISE_LIMIT = 0.25  # relative error of a median: what is less certain is not known
WORTH_S = 1e-3  # what takes less is mostly clock


def trimmed_mean(values: Sequence[float]) -> float:
    """Without the outermost tenth at either end. Steps add up times, and of those that are skewed
    the medians add up to too little."""
    away = -(-len(values) // 10) if len(values) > 2 else 0
    return fmean(sorted(values)[away : len(values) - away])


def uncertainty(seconds: Sequence[float]) -> float:
    """How far off the median may be, relative: less with more repeats. Times that are mostly clock
    count as certain."""
    if len(seconds) < 2 or median(seconds) < WORTH_S:
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4)
    return (high - low) / median(seconds) / len(seconds) ** 0.5


def quantiles(values: Sequence[float], count: int = 25) -> tuple[float, ...]:
    """Values at the middles of as many equal parts; drawing one of them is drawing a sample."""
    ordered = sorted(values)
    if not ordered:
        return (1.0,)
    return tuple(ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count))


def interleaved_medians(several: Sequence[Sequence[float]]) -> list[float]:
    """Medians of several quantities that were seen in turn, as if all had met the spells of whoever
    was seen to the end: a machine may be quick in one round and slow in the next."""
    most = max(len(samples) for samples in several)
    means = [fmean(column) for column in zip(*(s for s in several if len(s) == most), strict=True)]
    return [median([x / mean for x, mean in zip(samples, means, strict=False)]) * median(means)
            for samples in several]
