"""The one cost table and the one conversion table of sharding, in seconds."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import fx

from ..cluster import CPU_CORE, LOOPBACK, Device, Link
from ..model import ROWS, TensorInfo
from .layout import PARTIAL, WHOLE, Layout, Layouts, Split
from .rules import flops, op_name

FORBIDDEN = 1e6
VIEWS = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "permute",
          "t", "expand", "slice", "select", "getitem", "split", "chunk", "detach", "alias",
          "contiguous"}  # fmt: skip


class Prices(NamedTuple):
    """A device, a link per tensor axis, and what a byte kept through the step is worth."""

    device: Device = CPU_CORE
    links: tuple[Link, ...] = (LOOPBACK,)
    memory_s_per_byte: float = 0.0
    rows: int = 1


class Move(NamedTuple):
    """One conversion on one axis."""

    axis: int
    source: Layout
    target: Layout


def moves(source: Layouts, target: Layouts) -> list[Move]:
    """Conversions, one axis at a time. Where two axes cut one dim, the inner is undone first."""
    now, steps = list(source), []

    def go(axis: int, layout: Layout) -> None:
        if now[axis] != layout:
            steps.append(Move(axis, now[axis], layout))
            now[axis] = layout

    for axis, layout in enumerate(target):
        if now[axis] == layout:
            continue
        for inner in range(axis + 1, len(now)):
            if _same_dim(now[inner], now[axis]) or _same_dim(now[inner], layout):
                go(inner, WHOLE)
        go(axis, layout)
    return steps


def _same_dim(a: Layout, b: Layout) -> bool:
    return isinstance(a, Split) and isinstance(b, Split) and a.dim == b.dim


def move_seconds(move: Move, num_bytes: float, parts: int, prices: Prices) -> float:
    """Seconds of one conversion of a value that is `num_bytes` when whole on this axis."""
    link, share = prices.links[move.axis], (parts - 1) / parts
    touch = num_bytes / prices.device.memory_bytes_per_s
    match (move.source, move.target):
        case (str(a), Split()) if a == WHOLE:
            return touch / parts
        case (str(a), str(b)) if a == WHOLE and b == PARTIAL:
            return touch
        case (str(a), str(b)) if a == PARTIAL and b == WHOLE:
            return link.latency_s + 2 * share * num_bytes / link.bytes_per_s
        case (str(a), Split()) if a == PARTIAL:
            return link.latency_s + link.scatter * share * num_bytes / link.bytes_per_s
        case (Split(), str(b)) if b == WHOLE:
            return link.latency_s + share * num_bytes / link.bytes_per_s
        case (Split(), Split()):
            return link.latency_s + share * num_bytes / parts / link.bytes_per_s
    return FORBIDDEN


def convert_seconds(source: Layouts, target: Layouts, num_bytes: float, mesh: tuple[int, ...],
                    prices: Prices) -> float:  # fmt: skip
    """Seconds to bring a value from one set of layouts to another."""
    total, now = 0.0, list(source)
    for move in moves(source, target):
        others = math.prod(parts for axis, parts in enumerate(mesh)
                           if axis != move.axis and isinstance(now[axis], Split))  # fmt: skip
        total += move_seconds(move, num_bytes / others, mesh[move.axis], prices)
        now[move.axis] = move.target
    return total


def reduce_seconds(grad: Layouts, num_bytes: float, mesh: tuple[int, ...],
                   prices: Prices) -> float:  # fmt: skip
    """Seconds to sum a partial gradient once per step; it travels in a bucket, so no latency."""
    return sum(2 * (parts - 1) / parts * num_bytes / link.bytes_per_s
               for layout, parts, link in zip(grad, mesh, prices.links, strict=True)
               if layout == PARTIAL)  # fmt: skip


def num_bytes(info: TensorInfo | tuple[TensorInfo, ...], rows: int) -> int:
    infos = info if isinstance(info, tuple) else (info,)
    return sum(i.num_bytes(rows) for i in infos if i is not None)


def op_seconds(node: fx.Node, prices: Prices, share: int = 1) -> float:
    """Seconds of one op forward, on a device that does its `share`-th part."""
    if op_name(node) in VIEWS or node.meta["info"] is None:
        return 0.0
    rows, device = prices.rows, prices.device
    work = flops(node)
    work = work / ROWS * rows if work >= ROWS else work
    touched = num_bytes(node.meta["info"], rows)
    touched += sum(num_bytes(n.meta["info"], rows) for n in node.all_input_nodes)
    return max(device.matmul_seconds(work / share), device.memory_seconds(touched / share))


def op_costs(node: fx.Node, prices: Prices) -> tuple[float, float]:
    """(seconds forward and backward, bytes kept for backward) of an op that is not split."""
    if op_name(node) in VIEWS:
        return 0.0, 0.0
    return 3 * op_seconds(node, prices), float(num_bytes(node.meta["info"], prices.rows))


def param_costs(info: TensorInfo, prices: Prices) -> tuple[float, float]:
    """(seconds of an optimizer step, bytes of weight, gradient and two moments) of a parameter."""
    size = info.num_bytes(prices.rows)
    return 7 * size / prices.device.memory_bytes_per_s, 4.0 * size
