"""Where to cut the chain of blocks into stages."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..shard.eliminate import Array

Fits = Callable[[int, int, int], bool]  # (stage, first, end)
ROUNDING = 1 + 1e-12
MOST_TRIED = 300  # so many cuts are all tried; of more, only a few (see `free_cuts`)


class Once(NamedTuple):
    """Per block, where a single micro-batch passes: what the stages before wait for, and the rest
    of its backward."""

    input: Array
    weight: Array


class FreeCuts(NamedTuple):
    """Cuts without a memory limit."""

    balanced: tuple[int, ...] | None  # its slowest stage is as quick as can be
    others: set[tuple[int, ...]]


def free_cuts(seconds: Array, num_stages: int, once: Once | None) -> FreeCuts:
    """Also the cut nearest to equal shares, and the one for a single micro-batch."""
    balanced = smallest_bottleneck(seconds, num_stages)
    others = {even(seconds, num_stages), *([ramped(once, num_stages)[1]] if once else [])}
    return FreeCuts(balanced, others - {balanced})


def cuts(seconds: Array, num_stages: int, fits: Fits,
         free: Callable[[], FreeCuts]) -> Iterator[tuple[int, ...]]:
    """Borders worth evaluating: all of them if they are few, else the best-balanced that fit.

    If the cut that is best without a memory limit fits, no other is better.
    """
    count = len(seconds)
    if math.comb(count - 1, num_stages - 1) <= MOST_TRIED:
        for inner in itertools.combinations(range(1, count), num_stages - 1):
            yield (0, *inner, count)
        return
    found, others = free()
    if found and not all(fits(s, *ab) for s, ab in enumerate(itertools.pairwise(found))):
        slowest = max(float(seconds[a:b].sum()) for a, b in itertools.pairwise(found))
        found = smallest_bottleneck(seconds, num_stages, fits, slowest)
    if found is not None:
        yield found
        yield from others - {found}


def smallest_bottleneck(seconds: Array, num_stages: int, fits: Fits | None = None,
                        least: float = 0.0) -> tuple[int, ...] | None:
    """Stages that all fit, whose slowest is as quick as can be; None if none fit. If the slowest is
    known to take `least` seconds or more, the search begins there.

    For a given limit, filling every stage from the left as far as it goes is exact: what remains is
    then contained in what any other cut leaves, and time and memory only grow with the blocks. The
    limit begins where no cut can be below: some stage has no fewer blocks than the average one. If
    filling fails, it fails alike for every limit at which no stage could take one more block, so
    the next one to try is the least that lets one.
    """
    sums, most = np.concatenate([[0.0], np.cumsum(seconds)]), -(-len(seconds) // num_stages)
    ends, usual = sums.tolist(), float((sums[most:] - sums[:-most]).min())
    limit = max(float(seconds.max()), ends[-1] / num_stages, usual, least)
    while limit < math.inf:
        found, limit = fill(ends, num_stages, limit, fits)
        if found is not None:
            return found
    return None


def ramped(once: Once, num_stages: int,
           back_s: Sequence[float] = ()) -> tuple[float, tuple[int, ...]]:
    """How much later than its input gradients a single micro-batch is done, at least, and such a
    cut. While the gradients go back from stage to stage, those behind compute their weight
    gradients: the later the stage, the more of them. `back_s`: to each stage, the seconds of
    messages from it to the first."""
    back, rest = (np.concatenate([[0.0], np.cumsum(part)]) for part in once)
    ends, firsts = np.arange(len(back)), list[Array]()
    alone = np.where(ends > ends[:, None], rest - rest[:, None] - back[:, None], np.inf)
    late = np.where(ends == 0, 0.0, np.inf)  # of the stages before each block
    for stage in range(num_stages):
        tried = np.maximum(late[:, None], alone - (back_s[stage] if back_s else 0.0))
        firsts.append(tried.argmin(axis=0))
        late = tried.min(axis=0)
    cut = [len(back) - 1]
    for first in reversed(firsts):
        cut.append(int(first[cut[-1]]))
    return float(late[-1]), tuple(reversed(cut))


def fill(ends: Sequence[float], num_stages: int, limit: float,
         fits: Fits | None) -> tuple[tuple[int, ...] | None, float]:
    """Make each stage as long as limit and memory allow, leaving a block for each later stage. Also
    returns the next limit at which the stages would differ."""
    count, following = len(ends) - 1, math.inf
    borders = [0]
    for stage in range(num_stages):
        first = borders[-1]
        most = count - (num_stages - 1 - stage)
        by_time = bisect.bisect_right(ends, ends[first] + limit * ROUNDING) - 1
        end = min(most, by_time)
        end = _longest(stage, first, end, fits) if fits else end
        if end == by_time < most:
            following = min(following, ends[end + 1] - ends[first])
        if end <= first:
            return None, following
        borders.append(end)
    return (tuple(borders) if borders[-1] == count else None), following


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
    ends = [0.0, *np.cumsum(seconds).tolist()]
    borders = [0]
    for stage in range(1, num_stages):
        near = bisect.bisect_left(ends, ends[-1] * stage / num_stages)
        least, most = borders[-1] + 1, len(seconds) - (num_stages - stage)
        borders.append(min(max(near, least), most))
    return (*borders, len(seconds))
