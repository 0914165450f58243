"""The one cost table and the one conversion table of sharding, in seconds."""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from ..cluster import CPU_CORE, LOOPBACK, Device, Link
from ..model import ROWS, TensorInfo
from .layout import (
    PARTIAL,
    WHOLE,
    Layout,
    Layouts,
    Square,
    is_column,
    parts_of,
    side,
    splits,
)
from .rules import flops, op_name

FORBIDDEN = 1e6
VIEWS = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "permute",
          "t", "expand", "slice", "select", "getitem", "split", "chunk", "detach", "alias",
          "contiguous"}


class Prices(NamedTuple):
    """A device, a link per tensor axis, and what a byte kept through the step is worth.

    `hides`: the part of a message that goes on under a matmul (a CPU copies its messages itself).
    """

    device: Device = CPU_CORE
    links: tuple[Link, ...] = (LOOPBACK,)
    memory_s_per_byte: float = 0.0
    rows: int = 1
    hides: float = 1.0


class Move(NamedTuple):
    """One conversion on one axis."""

    axis: int
    source: Layout
    target: Layout


def moves(source: Layouts, target: Layouts) -> list[Move]:
    """Conversions, one axis at a time. Where two axes cut one dim, the inner is undone first."""
    now, steps = list(source), []

    def go(axis: int, layout: Layout) -> None:
        for stop in (detour(now[axis], layout), layout):
            if now[axis] != stop:
                steps.append(Move(axis, now[axis], stop))
                now[axis] = stop

    for axis, layout in enumerate(target):
        if now[axis] == layout:
            continue
        for inner in range(axis + 1, len(now)):
            if same_dim(now[inner], now[axis]) or same_dim(now[inner], layout):
                go(inner, WHOLE)
        go(axis, layout)
    return steps


def detour(source: Layout, target: Layout) -> Layout:
    """The layout to go through: parts cut within different outer parts cannot be exchanged."""
    if is_column(source) and source.skew == "p" and source != target:
        return PARTIAL
    if isinstance(source, str) or isinstance(target, str) or source == target:
        return target
    if is_column(source) or is_column(target):
        return WHOLE
    outers = {split.dim: split.outer for split in splits(source)}
    alike = all(outers.get(split.dim, split.outer) == split.outer for split in splits(target))
    return target if alike else WHOLE


def same_dim(a: Layout, b: Layout) -> bool:
    """Whether both cut one dim."""
    if isinstance(a, str) or isinstance(b, str):
        return False
    return any(x.dim == y.dim for x in splits(a) for y in splits(b))


def move_price(move: Move, parts: int, prices: Prices) -> tuple[float, float]:
    """Seconds of one conversion: to start it, and per byte of the value when whole on this axis."""
    link, share = prices.links[move.axis], (parts - 1) / parts
    touch, send = 1.0 / prices.device.memory_bytes_per_s, share / link.bytes_per_s
    match (_nature(move.source), _nature(move.target)):
        case ("R", "cut" | "column"):
            return 0.0, touch / parts
        case ("R", "P") | ("sums", "P"):
            return 0.0, touch
        case ("P", "R"):
            return link.latency_s, 2 * send
        case ("P", "cut"):
            return link.latency_s, link.scatter * send
        case ("cut" | "column", "R"):
            return link.latency_s, send
        case ("cut", "cut"):
            return link.latency_s, send / parts
    return FORBIDDEN, 0.0


def _nature(layout: Layout) -> str:
    """The part of a layout on which the cost of a conversion depends."""
    if isinstance(layout, str):
        return layout
    if not is_column(layout):
        return "cut"
    return "sums" if layout.skew == "p" else "column"


def convert_seconds(source: Layouts, target: Layouts, num_bytes: float, mesh: tuple[int, ...],
                    prices: Prices) -> float:
    """Seconds to bring a value from one set of layouts to another."""
    total, now = 0.0, list(source)
    for move in moves(source, target):
        now[move.axis] = WHOLE
        others = parts_of(mesh, tuple(now))
        start_s, s_per_byte = move_price(move, mesh[move.axis], prices)
        total += start_s + s_per_byte * num_bytes / others
        now[move.axis] = move.target
    return total


def reduce_seconds(grad: Layouts, num_bytes: float, mesh: tuple[int, ...],
                   prices: Prices) -> float:
    """Seconds to sum a partial gradient once per step; it travels in a bucket, so no latency."""
    own = num_bytes / parts_of(mesh, tuple(x if isinstance(x, Square) else WHOLE for x in grad))
    sums = [(side(parts) if _nature(layout) == "sums" else parts, link)
            for layout, parts, link in zip(grad, mesh, prices.links, strict=True)
            if _nature(layout) in ("P", "sums")]
    return sum(2 * (n - 1) / n * own / link.bytes_per_s for n, link in sums)


def ring_waits(forward: float, n: int, blocks: dict[str, float], link: Link,
               hides: float) -> tuple[float, float]:
    """Seconds that a linear in n steps per phase (spatial.py) waits for messages: (forward, back).

    `forward`: its computation forward on this device; `blocks`: bytes of a block of the operand
    (i), the weight (w) and the result (o).
    """
    i, w, o = (blocks[skew] for skew in "iwo")

    def wait(size: float) -> float:
        message = link.latency_s + size / link.bytes_per_s
        return (1 - hides) * message + max(0.0, hides * message - forward / n)

    return (n - 1) * wait(i + w), (n - 1) * (wait(o + w) + wait(i + o)) + wait(w)


def around_waits(forward: float, n: int, sizes: tuple[float, float, float], wide: float, link: Link,
                 hides: float) -> tuple[float, float]:
    """Seconds that an attention along the sequence waits for messages: (forward, back).

    `forward`: its computation forward on this device; `sizes`: bytes of a rank's queries, of its
    keys with values, of its result. Gradients that travel are `wide` times as many bytes.
    """
    q, pair, out = sizes

    def sent(size: float) -> float:
        return link.latency_s + size / link.bytes_per_s

    def wait(size: float, under: float) -> float:
        return (1 - hides) * sent(size) + max(0.0, hides * sent(size) - under)

    step, grads = forward / n, wide * pair  # of what a rank has itself, half a step is first
    ahead = wait(pair, step / 2) + (n - 2) * wait(pair, step)
    back = wait(pair, step) + (n - 2) * wait(pair + grads, 2 * step)
    back += wait(grads, 2 * step) + wait(grads, step)
    doors = sent((q + pair) / 2) + sent(out / 2)
    return ahead + doors, back + doors


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
