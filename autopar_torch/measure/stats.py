"""Numbers from noisy repeats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

NOISE_LIMIT = 0.5  # quartiles further apart than this part of the median: no measurement


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles over the median; 0 for a single value."""
    if len(values) < 4 or not statistics.median(values):
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / statistics.median(values)


def error_of_median(values: Sequence[float]) -> float:
    """How uncertain the median is, relative: falls with the number of repeats."""
    return spread(values) / max(1, len(values)) ** 0.5


def quantiles(values: Sequence[float], count: int = 25) -> tuple[float, ...]:
    """Values at the middles of as many equal parts; drawing one of them is drawing a sample."""
    ordered = sorted(values)
    if not ordered:
        return (1.0,)
    return tuple(ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count))
