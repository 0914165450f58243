"""Numbers from noisy repeats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from statistics import fmean, median

NOISE_LIMIT = 0.25  # relative error of a median: above it a time counts as uncertain
APART = 0.1  # what is slower by less earns less than it costs to tell it apart
STEP = 0.05  # of speeds
WORTH_S = 1e-3  # shorter times are mostly those of the clock itself


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the outermost tenth at either end. A step adds up times, and where times are
    skewed, their medians add up to too little."""
    away = -(-len(values) // 10) if len(values) > 2 else 0
    return fmean(sorted(values)[away : len(values) - away])


def uncertainty(seconds: Sequence[float]) -> float:
    """Relative error of the median: smaller with more repeats. Times that are mostly those of the
    clock count as certain."""
    return relative_error(seconds) if seconds and median(seconds) >= WORTH_S else 0.0


def relative_error(values: Sequence[float]) -> float:
    """Of the median: about a standard error, of which outliers do not make much."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / median(values) / len(values) ** 0.5


def quantiles(values: Sequence[float], count: int = 25) -> tuple[float, ...]:
    """The middle of each of `count` equal parts of the samples; drawing one is drawing a sample."""
    ordered = sorted(values)
    if not ordered:
        return (1.0,)
    return tuple(ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count))


def interleaved_medians(several: Sequence[Sequence[float]]) -> list[float]:
    """Medians of several quantities that were measured in turn, some for fewer rounds than others.
    A machine may be quick in one round and slow in the next, so each sample is divided by the pace
    of its round: the mean of the quantities that were measured in all rounds."""
    most = max(len(samples) for samples in several)
    means = [fmean(column) for column in zip(*(s for s in several if len(s) == most), strict=True)]
    return [median([x / mean for x, mean in zip(samples, means, strict=False)]) * median(means)
            for samples in several]
