"""Plans that together need all that has to be measured: every program, every kind of group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..cluster import Cluster
from ..plan import BUCKET_BYTES, Plan
from ..search.shapes import Placement, Shapes, Sharing, as_unequal_plan, groups_of, placed
from ..search.space import Candidate, Constraints, Option, as_plan
from ..search.unequal import FEW

MOST_TEAMS = 16  # ways to pick one group of every replica that are looked at


def probes(candidates: Sequence[Candidate], options: Sequence[Option],
           num_blocks: int) -> list[Plan]:
    """Plans that together use every program and every group that some candidate uses."""
    found: dict[tuple[object, ...], Plan] = {}
    most = max(c.micro_batches for c in candidates)
    for c in candidates:
        key = (c.option, c.pp, c.dp, c.zero, c.recompute, c.micro_batches in (1, most))
        if key not in found:
            plain = c._replace(virtual=1, schedule="1f1b")
            borders = [num_blocks * s // c.pp for s in range(c.pp + 1)]
            found[key] = as_plan(plain, borders, options)
    return list(found.values())


def unequal_probes(options: Sequence[Option], num_blocks: int, cluster: Cluster, num_rows: int,
                   limits: Constraints) -> list[Plan]:
    """Plans that together use every kind of group between unequal devices that some plan uses."""
    if len(cluster.classes) == 1 or cluster.num_devices > FEW:
        return []
    groups = groups_of(cluster, options, limits, lambda *_: True)
    zeros = [zero for zero in (0, 1, 3) if limits.zero in (None, zero)]
    found: list[Plan] = []
    seen: set[tuple[str, str]] = set()
    for shape in Shapes(cluster, groups, num_blocks, num_rows, limits):
        places = placed(shape, cluster)
        uses = _uses(places, cluster) if places else set()
        if places and not uses <= seen:
            seen |= uses
            cuts = [[num_blocks * p // len(own) for p in range(len(own) + 1)] for own in shape]
            sharing = Sharing((1,) * len(shape), (num_rows // len(shape),) * len(shape))
            found += [as_unequal_plan(shape, places, cuts, sharing, options, limits, "1f1b", zero,
                                      BUCKET_BYTES) for zero in zeros]
    return found


def _uses(places: Placement, cluster: Cluster) -> set[tuple[str, str]]:
    """How the groups lie that exchange something."""
    found = {("all", cluster.place(sorted(d for own in places for group in own for d in group)))}
    for own in places:
        found |= {("send", cluster.place(sorted((here[0], there[0]))))
                  for here, there in itertools.pairwise(own)}
    for team in itertools.islice(itertools.product(*places), MOST_TEAMS):
        found.add(("sum", cluster.place(sorted(group[0] for group in team))))
    return found
