"""What an exchange takes of a core whose rank computes meanwhile, and how it fares there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..shard.collectives import (
    Axis,
    arrive,
    start_exchange,
    start_messages,
    start_scatter,
    start_sum,
)
from ..shard.watch import between, stamp

PART = 0.8  # of an exchange's time is computed beside it, so that it still goes on then
LEAST = 0.1  # of its speed: nothing starves; below that, what is lost is not told from noise

Begin = Callable[[], list[Any]]
Work = Callable[[], object]


class Beside(NamedTuple):
    """`core`: what an exchange at full speed takes of a core. `speed`: what is left of its own."""

    core: float
    speed: float


def beside(op: str, num_bytes: float, axis: Axis, device: torch.device, exchange: Work,
           sharing: int) -> Beside:  # fmt: skip
    """Compute alone, then while an exchange goes on; all ranks of the axis call this, `sharing` of
    them on this core.

    So it counts what the process does, what the system does for it (a third of a core where packets
    wait for their turn on a link), what both leave of the caches, and how long a message waits
    until a thread gets the core.
    """
    ways = 2 if op == "send" else 1  # at once, where `exchange` sends one after the other
    a, b = torch.ones(128, 192, device=device), torch.ones(192, 384, device=device)
    whole_s, other_s = _longest([_timed(exchange) / ways, _timed(lambda: a @ b)], axis, device)
    turns = 1 + int(PART * whole_s / other_s)

    def compute() -> None:
        for _ in range(turns):
            a @ b

    alone_s, _ = _computing(list, compute, axis)
    # Handing over a message is told by `Curve.held`.
    own_s, rest_s = _computing(_begin(op, num_bytes, axis, device), compute, axis, op == "send")
    return told(whole_s, alone_s, own_s, rest_s, ways * sharing)


def told(whole_s: float, alone_s: float, own_s: float, rest_s: float, number: int) -> Beside:
    """From the seconds of an exchange, of some computing alone and beside `number` of them, and of
    what was left of the exchange then."""
    went_on_s = min(own_s, whole_s)
    speed = min(1.0, max(LEAST, (whole_s - rest_s) / went_on_s))
    lost = max(0.0, own_s - alone_s) / (number * went_on_s)
    return Beside(min(1.0, lost / speed), speed)


def _begin(op: str, num_bytes: float, axis: Axis, device: torch.device) -> Begin:
    count, parts = max(1, int(num_bytes) // 4), axis.parts
    flat = torch.ones(count, device=device)
    rows = torch.ones((parts, max(1, count // parts)), device=device)
    match op:
        case "sum":
            return lambda: start_sum(flat, axis)
        case "scatter":
            return lambda: start_scatter(rows, axis)[1]
        case "gather":
            got = torch.empty_like(rows)
            return lambda: start_exchange([rows[0]] * parts, got.unbind(), axis)
        case _:
            coming, peer = torch.empty_like(flat), 1 - axis.index
            return lambda: start_messages([(flat, peer)], [(coming, peer)], axis)


def _computing(begin: Begin, compute: Work, axis: Axis, later: bool = False) -> tuple[float, float]:
    """Seconds of computing, `later`: since all is under way; and of what is left to wait for."""
    dist.barrier(group=axis.group)
    compute()
    start = stamp()
    works = begin()
    if later:
        start = stamp()
    compute()
    middle = stamp()
    arrive(works)
    return between(start, middle), between(middle, stamp())


def _timed(work: Work) -> float:
    start = stamp()
    work()
    return between(start, stamp())


def _longest(seconds: list[float], axis: Axis, device: torch.device) -> list[float]:
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=axis.group)
    return [float(x) for x in found]
