"""Numbers from noisy repeats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

NOISE_LIMIT = 0.25  # relative error of a median: what is less certain is not known
WORTH_S = 1e-3  # what takes less is mostly clock


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def trimmed_mean(values: Sequence[float]) -> float:
    """Without the outermost tenth at either end. Steps add up times, and of those that are skewed
    the medians add up to too little."""
    away = -(-len(values) // 10) if len(values) > 2 else 0
    return mean(sorted(values)[away : len(values) - away])


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles over the median; 0 for a single value."""
    if len(values) < 2 or not statistics.median(values):
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / statistics.median(values)


def uncertainty(seconds: Sequence[float]) -> float:
    """The error of a time that was measured; nothing is asked of those that are mostly clock."""
    worth = seconds and statistics.median(seconds) >= WORTH_S
    return error_of_median(seconds) if worth else 0.0


def error_of_median(values: Sequence[float]) -> float:
    """How uncertain the median is, relative: falls with the number of repeats."""
    return spread(values) / max(1, len(values)) ** 0.5


def quantiles(values: Sequence[float], count: int = 25) -> tuple[float, ...]:
    """Values at the middles of as many equal parts; drawing one of them is drawing a sample."""
    ordered = sorted(values)
    if not ordered:
        return (1.0,)
    return tuple(ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count))


def evened(several: Sequence[Sequence[float]]) -> list[float]:
    """Factors of the medians of several quantities that were seen in turn, as if all had met the
    same noise: it reaches the lower samples last."""
    calm = [_lower(samples) for samples in several]
    usual = [median(samples) if samples else 0.0 for samples in several]
    noise = sum(usual) / sum(calm) if sum(calm) else 1.0
    return [noise * low / mid if mid else 1.0 for low, mid in zip(calm, usual, strict=True)]


def paced_medians(several: Sequence[Sequence[float]]) -> list[float]:
    """Medians of several quantities that were seen in turn, as if all had met the spells of whoever
    was seen to the end: a machine may be quick in one round and slow in the next."""
    most = max(len(samples) for samples in several)
    paces = [mean(column) for column in zip(*(s for s in several if len(s) == most), strict=True)]
    return [median([x / pace for x, pace in zip(samples, paces, strict=False)]) * median(paces)
            for samples in several]


def _lower(values: Sequence[float]) -> float:
    """The end of the lowest third."""
    return sorted(values)[(len(values) - 1) // 3] if values else 0.0
