"""An exchange while its rank computes: how much of the core it takes, how fast it still is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..shard.collectives import (
    Axis,
    arrive,
    start_gather,
    start_messages,
    start_scatter,
    start_sum,
)
from ..shard.watch import between, stamp
from .samples import timed
from .stats import trimmed_mean

PART = 0.8  # part of the exchange's time for which its rank computes, so that it ends after that
LEAST = 0.1  # least part of its speed: below that, its loss cannot be told from noise

Begin = Callable[[], list[Any]]


class Exchange(NamedTuple):
    """`ahead` is begun before the ranks meet, as receives are in training. If a receive is posted
    only as the message leaves, the thread that sends waits for a core that computes."""

    begin: Begin
    ahead: Begin = list


class Overlap(NamedTuple):
    """`core`: part of a core it takes at full speed. `speed`: part of its speed that is left."""

    core: float
    speed: float


class Probe(NamedTuple):
    """One measurement of an exchange with computing beside it."""

    whole_s: float  # the exchange alone
    both_s: float  # the exchange and the computing at once
    lost_s: float  # by how much each exchange made the computing longer
    rest_s: float  # the exchange, after the computing was done


def probe(op: str, num_bytes: float, axis: Axis, device: torch.device) -> Probe:
    """Compute alone, then while an exchange goes on; all ranks of the axis call this.

    So it counts the work of the process, the work of the system for it (a third of a core where
    packets queue for a link), the caches that both empty, and how long a message waits until a
    thread gets the core. The receiver times a message, and no message goes the other way meanwhile:
    behind one, acknowledgements would wait.
    """
    if op != "send":
        return _seen(_collective(op, num_bytes, axis, device), axis, device)
    ways = [_seen(_message(num_bytes, first, axis, device), axis, device) for first in (0, 1)]
    return ways[1 - axis.index]


def _seen(exchange: Exchange, axis: Axis, device: torch.device) -> Probe:
    a, b = torch.ones(128, 192, device=device), torch.ones(192, 384, device=device)
    alone_s = sum(_computing(exchange, 0, a, b, axis))
    longest = torch.tensor([alone_s, timed(lambda: a @ b)], dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=axis.group)
    whole_s, product_s = longest.tolist()
    products = 1 + int(PART * whole_s / product_s)
    compute_s, _ = _computing(Exchange(list), products, a, b, axis)
    both_s, rest_s = _computing(exchange, products, a, b, axis)
    return Probe(whole_s, min(both_s, whole_s), both_s - compute_s, rest_s)


def overlap(probes: Sequence[Probe]) -> Overlap:
    """Take the mean of the lost seconds: some exchanges go on as if no rank computed, others
    stand still until a thread gets the core."""
    whole_s, both_s, lost_s, rest_s = map(trimmed_mean, zip(*probes, strict=True))
    speed = min(1.0, max(LEAST, (whole_s - rest_s) / both_s))
    return Overlap(min(1.0, max(0.0, lost_s) / both_s / speed), speed)


def _collective(op: str, num_bytes: float, axis: Axis, device: torch.device) -> Exchange:
    count, parts = max(1, int(num_bytes) // 4), axis.parts
    flat = torch.ones(count, device=device)
    rows = torch.ones((parts, max(1, count // parts)), device=device)
    match op:
        case "sum":
            return Exchange(lambda: start_sum(flat, axis))
        case "scatter":
            return Exchange(lambda: start_scatter(rows, axis)[1])
        case _:
            return Exchange(lambda: start_gather(rows[0], axis)[1])


def _message(num_bytes: float, first: int, axis: Axis, device: torch.device) -> Exchange:
    flat = torch.ones(max(1, int(num_bytes) // 4), device=device)
    way = [(flat, 1 - axis.index)]
    if axis.index == first:
        return Exchange(lambda: start_messages(way, [], axis))
    if device.type == "cpu":
        return Exchange(list, ahead=lambda: start_messages([], way, axis))
    return Exchange(lambda: start_messages([], way, axis))


def _computing(exchange: Exchange, products: int, a: Tensor, b: Tensor,
               axis: Axis) -> tuple[float, float]:
    """Seconds of starting an exchange and so many products, and of waiting for it after that."""
    works = exchange.ahead()
    dist.barrier(group=axis.group)
    for _ in range(products):
        a @ b
    start = stamp()
    works = works + exchange.begin()
    for _ in range(products):
        a @ b
    middle = stamp()
    arrive(works)
    return between(start, middle), between(middle, stamp())
