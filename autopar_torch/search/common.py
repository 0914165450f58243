"""Pipelines of several classes with the same borders: each of one class, as many as there can be.

Stage by stage all of them hold the same parameters, so each gradient is summed once, in one team.
Where sums are long that is worth more than borders which suit every class.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from .pipelines import TINY, Grouping, PipelineKind, Shared, bisected, in_front, shared_out
from .tables import Array


def with_common_borders(own: Grouping, count: int) -> Iterator[Shared]:
    """The best borders for every set of classes and number of stages, with its micro-batches."""
    classes = [c for c, n in enumerate(own.num_groups) if n]
    for size in range(1, len(classes) + 1):
        for chosen in itertools.combinations(classes, size):
            for cut in _cuts(own, chosen):
                yield from _shared(own, chosen, cut, count)


def _cuts(own: Grouping, chosen: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """For each number of stages: the borders whose longest stage is the shortest, in parts of what
    its class takes for the whole model."""
    start = np.full(own.num_blocks + 1, np.inf)
    start[-1] = 0.0
    slowest, total = start, np.where(start, 0.0, 0.0)
    ends: list[Array] = []
    whole = [own.whole_s(c) for c in chosen]
    for depth in range(min(own.num_blocks, *(own.num_groups[c] for c in chosen))):
        parts = [own.stage(c, depth) / s for c, s in zip(chosen, whole, strict=True)]
        stage = np.max(parts, axis=0)
        slowest, total, end = in_front(stage, slowest, total)
        ends.append(end)
        if slowest[0] < np.inf:
            cut = [0]
            for following in reversed(ends):
                cut.append(int(following[cut[-1]]))
            yield tuple(cut)


def _shared(own: Grouping, chosen: Sequence[int], cut: tuple[int, ...],
            count: int) -> Iterator[Shared]:
    stages = len(cut) - 1
    numbers = [own.num_groups[c] // stages for c in chosen]
    sums = own.sums_s(chosen, numbers, cut)
    kinds = []
    for c in chosen:
        each = [float(own.stage(c, stages - 1 - p)[cut[p], cut[p + 1]]) for p in range(stages)]
        slowest = max(each)
        kinds.append(PipelineKind((own.groups[c],) * stages, cut, slowest, sum(each), 0.0, 0.0,
                                  1.0, max(0.0, sums - slowest)))
    some = list(zip(kinds, numbers, strict=True))
    least = min(kind.all_s + kind.late_s for kind in kinds)

    def done(seconds: float) -> bool:
        return sum(n * kind.micro_batches(seconds) for kind, n in some) >= count

    seconds = bisected(done, max(least, TINY))
    if seconds < np.inf:
        yield shared_out(some, seconds, count, own.rows)
