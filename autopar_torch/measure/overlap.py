"""An exchange while its rank computes: what it takes of the core, what is left of its speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..shard.collectives import (
    Axis,
    arrive,
    start_exchange,
    start_messages,
    start_scatter,
    start_sum,
)
from ..shard.watch import between, stamp
from .samples import timed
from .stats import trimmed_mean

PART = 0.8  # of an exchange's time is computed beside it, so that it still goes on then
LEAST = 0.1  # of its speed: nothing starves; below that, what is lost is not told from noise

Begin = Callable[[], list[Any]]


class Exchange(NamedTuple):
    """`ahead`: what is begun before its ranks meet, as receives are in training. One that is posted
    as the message leaves has its sender's thread wait for a core that computes."""

    begin: Begin
    ahead: Begin = list


class Overlap(NamedTuple):
    """`core`: what an exchange at full speed takes of a core. `speed`: what is left of its own."""

    core: float
    speed: float


class Probe(NamedTuple):
    """What was seen once of an exchange and of computing beside it."""

    whole_s: float  # of the exchange alone
    both_s: float  # in which it went on while its core computed
    lost_s: float  # that the computing took longer, for each exchange beside it
    rest_s: float  # that the exchange took after that


def probe(op: str, num_bytes: float, axis: Axis, device: torch.device) -> Probe:
    """Compute alone, then while an exchange goes on; all ranks of the axis call this.

    So it counts what the process does, what the system does for it (a third of a core where packets
    wait for their turn on a link), what both leave of the caches, and how long a message waits
    until a thread gets the core. A message is seen by who receives it, and goes alone: with another
    one the other way, answers would wait behind what is sent.
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
    """Of what was lost the mean counts: some exchanges go on as if nobody computed, others stand
    still until a thread gets the core."""
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
            got = torch.empty_like(rows)
            return Exchange(lambda: start_exchange([rows[0]] * parts, got.unbind(), axis))


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
    """Seconds of so many products with what it takes to begin, and of what is left to wait for."""
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
