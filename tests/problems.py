"""Random search problems, small enough for brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from autopar_torch.cluster import Cluster, Device, Link
from autopar_torch.model import ROWS, Block, Kind, ModelGraph, ParamInfo, TensorInfo
from autopar_torch.plan import Sharding
from autopar_torch.profile import (
    BlockCost,
    BlockCosts,
    Curve,
    Lookup,
    Overheads,
    Profile,
    program_key,
)
from autopar_torch.search.space import Constraints, Option
from autopar_torch.simulate.network import lookup


class Problem(NamedTuple):
    graph: ModelGraph
    options: list[Option]
    profile: Lookup
    num_rows: int
    limits: Constraints


def problem(seed: int) -> Problem:
    """Blocks of up to three kinds on up to eight devices; some of them are tight on memory."""
    draw = random.Random(seed)
    kinds, graph = _model(draw, draw.randint(1, 3), draw.randint(2, 6))
    options = [Option((), (None,) * len(graph.blocks))]
    shardings: list[dict[str, Sharding | None]] = [dict.fromkeys(kinds)]
    for parts in (2, 4):
        forms = {"w_0": "S0|S0", "x0": "R|R", "y0": "R|R"}
        own = {k: Sharding(k, (parts,), {"o": "S0"}, forms) for k in kinds}
        shardings.append(dict(own))
        options.append(Option((parts,), tuple(own[b.kind] for b in graph.blocks)))
    cells = [cell for table in shardings for kind, sharding in table.items()
             for cell in _cells(draw, kind, sharding)]
    over = Overheads(update_s_per_byte=1e-8, step_s=draw.choice([0.0, 1e-3]),
                     action_s=draw.choice([0.0, 1e-3]), micro_batch_s=draw.choice([0.0, 2e-3]),
                     add_s_per_byte=draw.choice([0.0, 1e-7]), copy_s_per_byte=1e-9,
                     cut_s_per_byte=1.5e-9, fill_s_per_byte=2e-9)
    cluster = _cluster(draw)
    curves = tuple(_messages(draw, cluster)) if draw.random() < 0.5 else ()
    found = Profile(cluster, tuple(cells), curves, overheads=(over,), assumed=True)
    precision = draw.choice(["float32", "bfloat16"])
    return Problem(
        graph, options, lookup(found), draw.choice([4, 8, 16]), Constraints(precision=precision)
    )  # type: ignore[arg-type]


def unequal(seed: int, most: int = 4, by_kind: bool = False,
            of: tuple[int, ...] = ()) -> Problem:
    """The same on up to four devices of two or three classes, each on a node of its own, or on
    so many of each. A class has a pace, or one for each kind of blocks."""
    draw, given = random.Random(seed), problem(seed)
    sizes = draw.choice([(1, 1), (1, 1, 1), (2, 1), (1, 2), (1, 3), (2, 2), (2, 1, 1)])
    sizes = of or (sizes if sum(sizes) <= most else (1, 1))
    nodes = tuple((Device(f"d{k}", 1e9, 1e9, draw.choice([10**9, 400_000, 200_000])),) * count
                  for k, count in enumerate(sizes))
    paces = {k: draw.choice([1.0, 1.4, 2.0, 3.0]) for k in range(len(sizes))}
    own = {(k, kind): draw.choice([0.3, 1.0, 3.0]) if by_kind else 1.0
           for k in paces for kind in given.graph.kinds}
    cells = tuple(replace(cell, device=k, pieces=tuple(
        _slower(p, pace * own[k, cell.kind]) for p in cell.pieces))
        for cell in given.profile.profile.cells for k, pace in paces.items())
    cluster = Cluster(nodes, Link(1e-4, draw.choice([1e6, 1e8])), Link(1e-3, 1e7))
    found = replace(given.profile.profile, cluster=cluster, cells=cells, curves=())
    return given._replace(profile=lookup(found), num_rows=draw.choice([2, 4]))


def _slower(cost: BlockCost, pace: float) -> BlockCost:
    return replace(cost, forward_s=cost.forward_s * pace, backward_s=cost.backward_s * pace,
                   input_s=cost.input_s * pace, weight_s=cost.weight_s * pace,
                   added_s=cost.added_s * pace)


def unshared(seed: int) -> tuple[ModelGraph, list[Option], Lookup]:
    """Seven blocks with two weights each on four devices of one node, which share nothing."""
    draw = random.Random(seed)
    shapes, x = [(256, 64), (64, 16)], TensorInfo((ROWS, 64), "float32", True)
    weights = {f"w_{i}": TensorInfo(shape, "float32", True) for i, shape in enumerate(shapes)}
    kinds = {k: Kind(k, {"x0": x}, {}, weights, {"y0": x}, 1, 1.0) for k in ("k0", "k1")}
    blocks = tuple(
        Block(f"b{i}", draw.choice(list(kinds)), {"x0": f"v{i - 1}"} if i else {}, {},
              {slot: f"p{i}{slot}" for slot in weights}, {"y0": f"v{i}"}) for i in range(7))
    params = {name: ParamInfo(weights[slot].shape, "float32", True)
              for block in blocks for slot, name in block.params.items()}
    forms = {"w_0": "S0|S0", "w_1": "S0|S0", "x0": "R|R", "y0": "R|R"}
    split = {k: Sharding(k, (2,), {"o": "S0"}, forms) for k in kinds}
    options = [Option((), (None,) * 7), Option((2,), tuple(split[b.kind] for b in blocks))]
    cells = [replace(cell, pieces=tuple(replace(p, added_s=draw.choice([-1e-3, 2e-3]))
                                        for p in cell.pieces))
             for k in kinds for own in (None, split[k]) for cell in _cells(draw, k, own)[:2]]
    over = Overheads(update_s_per_byte=1e-8, update_s_per_tensor=1e-4, step_s=1e-3, action_s=1e-3,
                     micro_batch_s=2e-3, add_s_per_byte=1e-7, copy_s_per_byte=1e-9,
                     cut_s_per_byte=1.5e-9, fill_s_per_byte=2e-9)
    cluster = Cluster(((Device("d", 1e9, 1e9, 10**9),) * 4,), Link(1e-4, 1e7), Link(1e-3, 1e6))
    near = Curve("send", cluster.place((0, 1)), ((8.0, 1e-4), (1e5, 1e-2)), held=0.3)
    found = Profile(cluster, tuple(cells), (near,) * draw.choice([0, 1]), (over,), assumed=True)
    return ModelGraph(kinds, blocks, params, {"loss": "v6"}), options, lookup(found)


def _model(draw: random.Random, num_kinds: int,
           num_blocks: int) -> tuple[list[str], ModelGraph]:
    x = TensorInfo((ROWS, draw.choice([8, 64])), "float32", True)
    kinds = {}
    for k in range(num_kinds):
        weight = TensorInfo((draw.choice([16, 256]), 64), "float32", True)
        kinds[f"k{k}"] = Kind(f"k{k}", {"x0": x}, {}, {"w_0": weight}, {"y0": x}, 1, 1.0)
    params, blocks = {}, []
    tied = num_blocks > 2 and draw.random() < 0.3
    for i in range(num_blocks):
        kind = f"k{draw.randrange(num_kinds)}"
        name = "p0" if tied and i == num_blocks - 1 else f"p{i}"
        params.setdefault(name, ParamInfo(kinds[kind].params["w_0"].shape, "float32", True))
        inputs = {"x0": f"v{i - 1}"} if i else {}
        blocks.append(Block(f"b{i}", kind, inputs, {}, {"w_0": name}, {"y0": f"v{i}"}))
    return list(kinds), ModelGraph(kinds, tuple(blocks), params, {"loss": f"v{num_blocks - 1}"})


def _cells(draw: random.Random, kind: str, sharding: Sharding | None) -> list[BlockCosts]:
    base, back, kept = draw.uniform(1e-3, 1e-2), draw.uniform(1.0, 3.0), draw.choice([500, 2000])
    comm = 0.0 if sharding is None else 1e-3
    early, late = draw.choice([(0.6, 0.4), (0.5, 0.7), (1.1, 0.0), (0.4, 0.5)])  # as noise has it
    found = []
    for recompute in (False, True):
        extra = base if recompute else 0.0
        pieces = tuple(
            BlockCost(n, base * n, (back * base + extra) * n, (early * back * base + extra) * n,
                  late * back * base * n, comm, comm * (2 if recompute else 1), 256.0 * n,
                  (256.0 if recompute else kept) * n, 600.0 * n, 700.0 * n,
                  added_s=(early - 0.6) * base * n, stash_bytes=1.2 * kept * n)
            for n in (1, 16)
        )
        found.append(BlockCosts(kind, program_key(sharding, recompute), pieces))
    for part, freed, spent in ((0.1, 0.4, 0.02), (0.4, 0.7, 0.3)):
        pieces = tuple(cost.again(freed, spent) for cost in found[0].pieces)
        found.append(BlockCosts(kind, program_key(sharding, part), pieces))
    return found


def _messages(draw: random.Random, cluster: Cluster) -> Iterator[Curve]:
    """Measured ones, which hold up their sender."""
    world = range(cluster.num_devices)
    for place in sorted({cluster.place(pair) for pair in itertools.combinations(world, 2)}):
        points = ((8.0, 1e-4), (1e5, draw.choice([1e-3, 1e-2])))
        yield Curve("send", place, points, held=draw.choice([0.0, 0.3, 1.0]))


def _cluster(draw: random.Random) -> Cluster:
    world = draw.choice([1, 2, 4, 8])
    device = Device("d", 1e9, 1e9, draw.choice([10**9, 400_000, 150_000]))
    nodes = draw.choice([1, 2]) if world > 1 else 1
    return Cluster(((device,) * (world // nodes),) * nodes, Link(1e-4, draw.choice([1e6, 1e8])),
                   Link(1e-3, draw.choice([1e5, 1e7])))
