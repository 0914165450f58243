"""Where to cut the chain of blocks into stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .tables import Array

Fits = Callable[[int, int, int], bool]  # (stage, first, end)
MOST_TRIED = 300  # cuts that are all tried rather than reasoned about


def cuts(seconds: Array, num_stages: int, fits: Fits) -> Iterator[tuple[int, ...]]:
    """Borders worth evaluating: all of them if they are few, else the best-balanced that fit."""
    count = len(seconds)
    if math.comb(count - 1, num_stages - 1) <= MOST_TRIED:
        for inner in itertools.combinations(range(1, count), num_stages - 1):
            yield (0, *inner, count)
        return
    found = smallest_bottleneck(seconds, num_stages, fits)
    if found is not None:
        yield found
        yield even(seconds, num_stages)


def smallest_bottleneck(seconds: Array, num_stages: int, fits: Fits) -> tuple[int, ...] | None:
    """Stages that all fit, whose slowest is as quick as can be; None if they never fit.

    For a given limit, filling every stage from the left as far as it goes is exact: what remains is
    then contained in what any other cut leaves, and time and memory only grow with the blocks. The
    least limit is one of the sums of consecutive blocks; bisection finds it to rounding.
    """
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    best = fill(ends, num_stages, math.inf, fits)
    if best is None:
        return None
    low = max(float(seconds.max()), float(ends[-1]) / num_stages)
    high = _slowest(ends, best)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        found = fill(ends, num_stages, middle, fits)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, _slowest(ends, found))
    return best


def fill(ends: Array, num_stages: int, limit: float, fits: Fits) -> tuple[int, ...] | None:
    """Each stage as long as the limit and the memory allow, but leaving a block for each later."""
    count = len(ends) - 1
    borders = [0]
    for stage in range(num_stages):
        first = borders[-1]
        most = count - (num_stages - 1 - stage)
        by_time = int(np.searchsorted(ends, ends[first] + limit * (1 + 1e-12), side="right")) - 1
        end = _longest(stage, first, min(most, by_time), fits)
        if end <= first:
            return None
        borders.append(end)
    return tuple(borders) if borders[-1] == count else None


def _longest(stage: int, first: int, end: int, fits: Fits) -> int:
    """The last end that fits (memory grows with every block); `first` if none does."""
    if end <= first or fits(stage, first, end):
        return end
    low = first
    while end - low > 1:
        middle = (low + end) // 2
        low, end = (middle, end) if fits(stage, first, middle) else (low, middle)
    return low


def even(seconds: Array, num_stages: int) -> tuple[int, ...]:
    """Cuts nearest to equal shares."""
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    borders = [0]
    for stage in range(1, num_stages):
        near = int(np.searchsorted(ends, ends[-1] * stage / num_stages))
        least, most = borders[-1] + 1, len(seconds) - (num_stages - stage)
        borders.append(min(max(near, least), most))
    return (*borders, len(seconds))


def _slowest(ends: Array, borders: Sequence[int]) -> float:
    return float(max(ends[b] - ends[a] for a, b in itertools.pairwise(borders)))
