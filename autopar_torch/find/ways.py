"""Ways to split the chain on every mesh that the devices allow: what the search chooses from."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from .. import progress
from ..cluster import Cluster, Link, slowest_of
from ..errors import SearchError
from ..plan import Plan, Stage
from ..profile import BlockCosts, BlockNeed, Lookup, program_key
from ..run.shardings import complete
from ..search.space import RECOMPUTES, Constraints, Option, divisors
from ..shard.estimate import Again, estimate
from ..shard.layout import Square, parse_forms, side
from ..shard.price import Prices
from ..shard.solve import Spatial
from ..trace import Traced

log = logging.getLogger("autopar_torch")
SMALL, LARGE = 4096.0, 2.0**20  # sizes that tell latency and bandwidth of a link


def meshes(cluster: Cluster, most: int, limits: Constraints) -> list[tuple[int, ...]]:
    """Tensor groups that the constraints allow; with `rings="always"` those that have a square."""
    if limits.tp and limits.tp > most:
        raise SearchError(f"tp={limits.tp}, but tensor groups of more than {most} devices are not "
                          "searched", where="constraints",
                          fix="give such a plan: Plan.uniform(tp=...)")
    found = [m for m in _meshes(cluster, most) if limits.tp in (None, math.prod(m))]
    if limits.rings != "always":
        return found
    squares = [mesh for mesh in found if any(map(side, mesh))]
    if not squares:
        raise SearchError(
            "linears run in rings on n x n devices that are an axis of a tensor group; no group "
            "here has such an axis", where="constraints: rings='always'",
            fix="allow tensor groups of 4 devices, or rings='free'",
        )
    return squares


def _meshes(cluster: Cluster, most: int) -> list[tuple[int, ...]]:
    """Tensor groups of neighbours: inside a node, across nodes, and both as two axes. They share
    out all devices, or those of one class on one node."""
    total, per_node = cluster.num_devices, max(map(len, cluster.nodes))
    alike = Counter(zip(cluster.node_of, cluster.class_of, strict=True)).values()
    degrees = {parts for count in (total, *alike) for parts in divisors(count)} - {1}
    found: list[tuple[int, ...]] = [()]
    for parts in sorted(degrees):
        if parts > most:
            break
        found.append((parts,))
        if parts > per_node and parts % per_node == 0 and per_node > 1:
            found.append((parts // per_node, per_node))
    return found


def axis_ranks(mesh: Sequence[int]) -> list[tuple[int, ...]]:
    """The group of rank 0 on each axis of a mesh."""
    groups, stride = [], 1
    for parts in reversed(mesh):
        groups.append(tuple(i * stride for i in range(parts)))
        stride *= parts
    return groups[::-1]


def neighbours(cluster: Cluster, mesh: Sequence[int]) -> list[tuple[int, ...]]:
    """Tensor groups as equal plans place them, one after the other; of those that lie alike on
    nodes alike, the first."""
    size, starts = math.prod(mesh), cluster.start_of
    kinds: dict[tuple[int, ...], int] = {}
    kind_of = [kinds.setdefault(cluster.class_of[start : start + len(node)], len(kinds))
               for start, node in zip(starts, cluster.nodes, strict=True)]
    found: dict[tuple[int, ...], int] = {}
    for start in range(0, cluster.num_devices - size + 1, size):
        first, last = cluster.node_of[start], cluster.node_of[start + size - 1]
        found.setdefault((start - starts[first], *kind_of[first : last + 1]), start)
    return [tuple(range(start, start + size)) for start in found.values()]


def links(cluster: Cluster, mesh: Sequence[int],
          groups: Collection[tuple[int, ...]]) -> tuple[Link, ...]:
    """Per axis of a mesh: the slowest link of some tensor groups, each of which exchanges along all
    of its lines at once. On equal nodes the first group stands for all, also if a mesh does not
    divide a node."""
    groups = [tuple(range(math.prod(mesh)))] if cluster.equal else groups
    return tuple(slowest_of(cluster.link([group[i + k] for i in line], group)
                            for group in groups for k in starts)
                 for line, starts in _lines(mesh))


def _lines(mesh: Sequence[int]) -> list[tuple[tuple[int, ...], list[int]]]:
    """Per axis: the places of its first line, and how far from that the others start."""
    return [(line, [k for k in range(math.prod(mesh)) if k % (line[1] * len(line)) < line[1]])
            for line in axis_ranks(mesh)]


def link_of(profile: Lookup, ranks: tuple[int, ...]) -> Link:
    """A link as sharding sees it, from curves of gathering and of reduce-scatter."""
    share = (len(ranks) - 1) / len(ranks)
    gather, scatter = (profile.curve(op, ranks) for op in ("gather", "scatter"))
    slope = (gather.seconds(LARGE) - gather.seconds(SMALL)) / (LARGE - SMALL)
    other = (scatter.seconds(LARGE) - scatter.seconds(SMALL)) / (LARGE - SMALL)
    slope = max(slope, 1e-13)
    return Link(max(1e-7, gather.seconds(SMALL)), share / slope, max(1.0, other / slope))


def hidden(profile: Lookup, groups: Sequence[tuple[int, ...]]) -> float:
    """The part of a message's time that a matmul can hide: the core is free meanwhile. On a fast
    link the core copies all the time, on a slow one it mostly waits."""
    busy = max((profile.curve("gather", ranks).core for ranks in groups), default=0.0)
    return max(0.0, 1.0 - busy)


SPATIAL: dict[str, tuple[Spatial, ...]] = {
    "free": ("free", "never"), "never": ("never",), "always": ("always",),
}


def options(traced: Traced, mesh: tuple[int, ...], prices: Prices, rings: Spatial) -> list[Option]:
    """Ways to split on a mesh. A way without rings is kept beside one with: measuring decides."""
    found = [option(traced, mesh, prices, spatial) for spatial in SPATIAL[rings]]
    return [o for i, o in enumerate(found) if o.shardings not in [x.shardings for x in found[:i]]]


def option(traced: Traced, mesh: tuple[int, ...], prices: Prices,
           spatial: Spatial = "free") -> Option:
    """The cheapest sharding of the chain on a mesh, at these prices."""
    blocks = traced.graph.blocks
    if not mesh:
        return Option((), (None,) * len(blocks))
    bare = Plan.uniform(tp=math.prod(mesh), tp_mesh=mesh)
    stage = msgspec.structs.replace(bare.replicas[0].stages[0], blocks=(0, len(blocks)))
    replica = msgspec.structs.replace(bare.replicas[0], stages=(stage,))
    plan = complete(msgspec.structs.replace(bare, replicas=(replica,)), traced, prices.rows,
                    priced={mesh: prices}, spatial=spatial)
    done: Stage = plan.replicas[0].stages[0]
    found = Option(mesh, tuple(plan.shardings[n] for n in done.shardings or ()))
    if spatial == "always" and not has_rings(found):
        log.warning("rings='always': no linear of this model can run in rings on %s devices",
                    "x".join(map(str, mesh)))
    return found


def has_rings(option: Option) -> bool:
    """Whether any weight lies as a ring wants it."""
    forms = (parse_forms(f) for s in option.shardings if s for f in s.forms.values())
    return any(isinstance(x, Square) and x.skew == "w" for form in forms for x in form.value)


def estimated(traced: Traced, options: Sequence[Option], rows: Sequence[int],
              prices: Mapping[tuple[int, ...], Sequence[Prices]]) -> list[BlockCosts]:
    """Costs by datasheet, at the prices of each class of devices, with forward kept and with it
    recomputed."""
    found: dict[tuple[str, str, int], BlockCosts] = {}
    for option in progress.counted("pricing blocks by datasheet", options):
        for block, sharding in zip(traced.graph.blocks, option.shardings, strict=True):
            need = BlockNeed(block.kind, sharding, 1)
            if (block.kind, need.key, 0) in found:
                continue
            for k, own_prices in enumerate(prices[option.mesh]):
                kept = tuple(estimate(traced.programs[block.kind], sharding,
                                      own_prices._replace(rows=n)) for n in rows)
                again = Again(traced.programs[block.kind], sharding, own_prices)
                for recompute in RECOMPUTES:
                    key = program_key(sharding, recompute)
                    own = tuple(again(cost, recompute) for cost in kept)
                    found[block.kind, key, k] = BlockCosts(block.kind, key, own, "datasheet", k)
    return list(found.values())
