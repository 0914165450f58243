"""One layer under every plan of the paper's setting: replicas outside, tensor axes inside.

A layer is traced on meta tensors and solved by the package (`tabulate`, `read_out`), its seconds
and bytes come from `estimate`. Megatron is the same solver confined to columns and rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import fx

from autopar_torch.cluster import Device, Link
from autopar_torch.plan import Sharding
from autopar_torch.shard.eliminate import Table, minimum
from autopar_torch.shard.estimate import estimate
from autopar_torch.shard.layout import Split, Strategy, parse_forms, parts_of
from autopar_torch.shard.price import FORBIDDEN, Prices, param_costs, reduce_seconds
from autopar_torch.shard.rules import op_name
from autopar_torch.shard.solve import KindTable, read_out, tabulate
from autopar_torch.shard.strategies import strategies
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from rings.paper import SEQ, SHAPES, Layer, Mlp, Model

PER_NODE = 4
Space = Literal["megatron", "inside", "never", "free"]


class Setting(NamedTuple):
    """What the paper leaves open. Bytes per second: of a device inside a node, of a node across."""

    name: str
    inside: float = 150e9
    across: float = 12.5e9
    flops: float = 14.8e12
    hides: float = 1.0
    item: float = 1.0  # bytes of a number, over those of FP32


STATED = Setting("as stated")  # NVLink 300 GB/s both ways, 100 Gbit/s
OBSERVED = Setting("as timed", inside=18.6e9, across=6.5e9)  # what its figure 9 took per collective


class Cost(NamedTuple):
    """Of one layer on one device: seconds, and bytes."""

    forward: float
    backward: float
    collective: float  # of both, what nobody hides
    reduce: float  # gradients, once per step
    update: float
    state: float  # weights, gradients, two moments
    kept: float  # activations
    plan: str = ""

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.reduce + self.update

    @property
    def exposed(self) -> float:
        return self.collective + self.reduce

    @property
    def memory(self) -> float:
        return self.state + self.kept


@functools.cache
def layer(model: str, part: str, rows: int) -> fx.Graph:
    """The graph of one layer, or of its MLP, on rows that tensor axes may cut.

    Rows of a batch belong to replicas in this package, in the paper any operator may cut them.
    So what is traced is one row of the batch, with `rows` sequences inside.
    """
    with torch.device("meta"):
        whole = Model(SHAPES[model], Mlp if part == "mlp" else Layer)
        call, _ = take_apart((), {"ids": torch.zeros(1, rows, SEQ, dtype=torch.long)})
    traced = trace(whole, call)
    middle = next(b for b in traced.graph.blocks if b.name == "layers.1")
    return traced.programs[middle.kind]


def meshes(degree: int) -> list[tuple[int, ...]]:
    """Axes that lie inside a node or across nodes, not both."""
    if degree <= PER_NODE:
        return [(2, 2), (4,)] if degree == 4 else [(degree,)]
    return [(degree // PER_NODE, PER_NODE)]


def link(parts: int, stride: int, s: Setting) -> Link:
    """Neighbours `stride` apart; as many groups as leave a node share its link."""
    if parts * stride <= PER_NODE:
        return Link(1e-5, s.inside)
    return Link(2e-5, s.across / min(stride, PER_NODE))


def prices(mesh: tuple[int, ...], rows: int, s: Setting) -> Prices:
    links, stride = [], 1
    for parts in reversed(mesh):
        links.append(link(parts, stride, s))
        stride *= parts
    card = Device("V100", s.flops, 0.8 * 9e11, 32 << 30)
    scaled = tuple(Link(x.latency_s, x.bytes_per_s / s.item) for x in reversed(links))
    card = Device("V100", s.flops, 0.8 * 9e11 / s.item, 32 << 30)
    return Prices(card, scaled, 0.0, rows, s.hides)


def columns_and_rows(graph: fx.Graph) -> dict[fx.Node, list[Strategy]]:
    """What Megatron may do: cut heads and hidden dims, not the sequence, not the residual."""
    found = {}
    for node, options in strategies(graph).items():
        shape = node.meta["info"].shape if node.meta["info"] else ()
        whole = len(shape) == 4 and op_name(node) in {"add", "layer_norm", "rms_norm"}
        residual = (
            whole and shape[-1] == graph.find_nodes(op="placeholder")[0].meta["info"].shape[-1]
        )
        found[node] = [
            s for s in options if not (s.is_split and residual) and not _cuts_rows(node, s)
        ]
    return found


def _cuts_rows(node: fx.Node, strategy: Strategy) -> bool:
    return op_name(node) == "linear" and strategy.ins[0] in (Split(0), Split(1), Split(2))


def steady(table: KindTable) -> dict[Any, int]:
    """The forms of a layer among its like: it takes what it gives."""
    alike = [[0.0 if a == b else FORBIDDEN for b in table.borders["y0"]]
             for a in table.borders["x0"]]
    return _least(table, (("x0", "y0"), np.array(alike)))


def whole(table: KindTable) -> dict[Any, int]:
    """Its borders are whole."""
    return _least(table, *(((slot,), np.array([0.0] + [FORBIDDEN] * (len(forms) - 1)))
                           for slot, forms in table.borders.items()))


def _least(table: KindTable, *more: Table) -> dict[Any, int]:
    """The best forms of the borders, and ways of what is left to the chain."""
    sizes: dict[Any, int] = {slot: len(forms) for slot, forms in table.borders.items()}
    best = minimum({**sizes, **table.left}, [*table.solution.tables, *more])
    return {v: best.values[v] for v in table.solution.kept}


def solved(graph: fx.Graph, mesh: tuple[int, ...], p: Prices, space: Space) -> Sharding:
    """The fastest sharding of a layer."""
    options = columns_and_rows(graph) if space == "megatron" else None
    table = tabulate(
        graph, mesh, p, options=options, spatial="free" if space == "free" else "never"
    )
    return read_out(table, "layer", whole(table) if space == "megatron" else steady(table))


def cost(graph: fx.Graph, mesh: tuple[int, ...], replicas: int, s: Setting,
         space: Space) -> Cost:
    """A layer of one replica, with what its replicas exchange."""
    p = prices(mesh, 1, s)
    split = None if mesh == (1,) else solved(graph, mesh, p, space)
    piece = estimate(graph, split, p)
    degree = int(np.prod(mesh))
    outside = link(replicas, degree, s) if replicas > 1 else Link(0.0, 1e30)
    reduce = update = state = 0.0
    for node in graph.find_nodes(op="placeholder"):
        if node.name.startswith("w_"):
            info = node.meta["info"]
            form = parse_forms(split.forms[node.name]) if split else None
            share = parts_of(mesh, form.value) if form else 1
            own = info.num_bytes(1) / share
            seconds, size = param_costs(info, p)
            update, state = update + seconds / share, state + size / share * s.item
            reduce += reduce_seconds(form.grad, info.num_bytes(1), mesh, p) if form else 0.0
            reduce += 2 * (replicas - 1) / replicas * own * s.item / outside.bytes_per_s
    rings = sum("w" in text for text in split.ops.values()) if split else 0
    plan = f"{replicas} x {'x'.join(map(str, mesh))}" + (f", {rings} in rings" if rings else "")
    ahead, back = piece.comm_forward_s, piece.comm_backward_s
    return Cost(piece.forward_s + ahead, piece.backward_s + back, ahead + back, reduce, update,
                state, piece.kept_bytes * s.item, plan)


def degrees(devices: int, rows: int) -> Iterator[int]:
    """Numbers of replicas."""
    return (d for d in (1, 2, 4, 8, 16, 32) if devices % d == 0 and rows % d == 0)


@functools.cache
def ways(model: str, part: str, degree: int, replicas: int, rows: int, s: Setting,
         space: Space) -> list[Cost]:
    """Every way to run a layer on replicas of so many devices."""
    graph = layer(model, part, rows)
    near = degree <= PER_NODE or space != "inside"
    flat = [cost(graph, (degree,), replicas, s, "megatron")] if near and fits(model, degree) else []
    if space in ("megatron", "inside"):
        return flat
    return flat + [cost(graph, mesh, replicas, s, kind) for mesh in meshes(degree)
                   for kind in dict.fromkeys(("never", space))]


def fits(model: str, degree: int) -> bool:
    """Megatron gives every device whole heads."""
    return SHAPES[model].groups % degree == 0


def best(
    model: str, devices: int, rows: int, s: Setting, space: Space, part: str = "layer"
) -> Cost:
    """The fastest plan: every number of replicas, every mesh."""
    found = [c for d in degrees(devices, rows)
             for c in ways(model, part, devices // d, d, rows // d, s, space)]
    return min(found, key=lambda c: c.step)
