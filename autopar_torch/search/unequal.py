"""The fastest plan where devices differ: replicas of any shape, any cuts, any shares of the rows.

Plans of equal replicas come first, on every set of classes, so that more devices never make a plan
slower. Then come shapes, by increasing lower bound: with their shares, then with their cuts, then
with the price that the engine gives. It ends when no bound is below the best plans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from ..errors import SearchError
from ..model import ModelGraph
from ..profile import Lookup, Profile
from ..simulate import uncollected
from .best import KEPT, Result, search
from .few import Enumeration
from .judging import Judge
from .many import Proposals
from .shapes import groups_of
from .space import Constraints, Option

FEW = 4  # devices: all their shapes are looked at


def fastest(graph: ModelGraph, options: Sequence[Option], profile: Lookup, num_rows: int,
            limits: Constraints, kept: int = KEPT, time_limit_s: float = 0.0) -> Result:
    """The fastest plans: of equal replicas where all devices are equal, else of any. With a time
    limit, of those that were looked at by then; the gap says what that may have cost."""
    find = search_unequal if gives_unequal(profile.profile) else search
    return find(graph, options, profile, num_rows, limits, kept=kept, time_limit_s=time_limit_s)


def gives_unequal(profile: Profile) -> bool:
    """Whether devices differ, so that they may get unequal work."""
    return len(profile.cluster.classes) > 1


def search_unequal(graph: ModelGraph, options: Sequence[Option], profile: Lookup, num_rows: int,
                   limits: Constraints | None = None, kept: int = KEPT,
                   time_limit_s: float = 0.0) -> Result:
    """The fastest plan on devices of several classes. Of a few devices all shapes are looked at,
    whatever the limit of time."""
    start, limits, cluster = time.perf_counter(), limits or Constraints(), profile.profile.cluster
    many = cluster.num_devices > FEW
    judge = Judge(graph, options, profile, num_rows, limits, kept, many)
    deadline = start + time_limit_s if time_limit_s else math.inf
    with uncollected():
        judge.even()
        groups = groups_of(cluster, options, limits, judge.measured)
        (Proposals(judge, deadline) if many else Enumeration(judge)).run(groups)
    if not judge.best:
        raise judge.nothing or SearchError(
            f"no plan for {cluster.num_devices} devices and {num_rows} rows meets the constraints",
            where="constraints", fix="leave some of them open, or give more rows")
    return Result(tuple(choice for _, _, choice in judge.best), judge.seen["considered"],
                  dict(judge.discarded), judge.seen["priced"], judge.gap,
                  time.perf_counter() - start, num_devices=cluster.num_devices)
