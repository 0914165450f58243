"""Pipelines of several classes with the same borders: each of one class, as many as there can be.

Stage by stage all of them hold the same parameters, so each gradient is summed once, in one team.
Where sums are long that is worth more than borders which suit every class.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from .pipelines import TINY, Grouping, PipelineKind, Shared, bisected, in_front, shared_out
from .tables import Array


def with_common_borders(own: Grouping, count: int, most: int, limit_s: float = math.inf,
                        pp: int | None = None) -> Iterator[Shared]:
    """So many micro-batches on whole pipelines of each set of classes: the quickest few, if they
    are within the limit. `pp`: of so many stages."""
    classes = [c for c, n in enumerate(own.num_groups) if n]
    found: list[tuple[float, list[tuple[PipelineKind, int]]]] = []
    for size in range(1, len(classes) + 1):
        for chosen in itertools.combinations(classes, size):
            if not own.speaks_for(chosen):
                continue
            for cut in _cuts(own, chosen, pp):
                kinds = _kinds(own, chosen, cut)
                found.append((_seconds(kinds, count, limit_s), kinds))
    for seconds, kinds in sorted(found, key=lambda entry: entry[0])[:most]:
        if seconds < math.inf:
            yield shared_out(kinds, seconds, count, own.rows)


def _cuts(own: Grouping, chosen: Sequence[int], pp: int | None) -> Iterator[tuple[int, ...]]:
    """For each number of stages: the borders whose longest stage is the shortest, in parts of what
    its class takes for the whole model."""
    slowest = np.full(own.num_blocks + 1, np.inf)
    slowest[-1] = 0.0
    total = np.zeros(own.num_blocks + 1)
    ends: list[Array] = []
    whole = [own.whole_s(c) for c in chosen]
    most = pp or own.num_blocks
    for depth in range(min(most, own.num_blocks, *(own.num_groups[c] for c in chosen))):
        parts = [own.stage(c, depth) / s for c, s in zip(chosen, whole, strict=True)]
        stage = np.max(parts, axis=0)
        slowest, total, end = in_front(stage, slowest, total)
        ends.append(end)
        if slowest[0] < np.inf and pp in (None, depth + 1):
            cut = [0]
            for following in reversed(ends):
                cut.append(int(following[cut[-1]]))
            yield tuple(cut)


def _kinds(own: Grouping, chosen: Sequence[int],
           cut: tuple[int, ...]) -> list[tuple[PipelineKind, int]]:
    """Pipelines of each class with these borders, and how many there are."""
    stages = len(cut) - 1
    numbers = [own.num_groups[c] // stages for c in chosen]
    kinds = []
    for c in chosen:
        each = [float(own.stage(c, stages - 1 - p)[cut[p], cut[p + 1]]) for p in range(stages)]
        kinds.append(PipelineKind((own.groups[c],) * stages, cut, max(each), sum(each), 0.0, 0.0,
                                  1.0, 0.0))
    kinds = [kind._replace(late_s=late)
             for kind, late in zip(kinds, own.late_s(kinds), strict=True)]
    return list(zip(kinds, numbers, strict=True))


def _seconds(kinds: Sequence[tuple[PipelineKind, int]], count: int, limit_s: float) -> float:
    """When all micro-batches are done: not sooner than if parts of them counted. Infinite over the
    limit."""
    rate = sum(n / kind.slowest_s for kind, n in kinds)
    begun = sum(n * (1 - (kind.all_s + kind.late_s) / kind.slowest_s) for kind, n in kinds)

    def done(seconds: float) -> bool:
        return sum(n * kind.micro_batches(seconds) for kind, n in kinds) >= count

    least = max((count - begun) / rate, TINY)
    return bisected(done, least) if least < limit_s else math.inf
