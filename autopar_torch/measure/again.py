"""A short look at machines while a run goes on: how fast ranks compute, and links between nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from .factors import Seen, pairs
from .links import Places, barrier, computing
from .speeds import windows

BYTES, TIMES = 1 << 18, 3  # of a message to another node and back


def look(nodes: Sequence[str], places: Places, device: torch.device, links_only: bool) -> Seen:
    """All ranks call this; the same on all of them. `nodes`: the name of each rank's node."""
    start = time.perf_counter()
    own: list[float] = []
    if not links_only:
        work = computing(device)
        work()
        barrier(places)
        own = [median(windows(work, device))]
    sending = []
    for pair in pairs(nodes):
        barrier(places)
        sending.append(_there_and_back(pair, places.rank) if places.rank in pair else 0.0)
    everyone = places.gather((own, sending, time.perf_counter() - start))
    return Seen(tuple(s for computing_s, _, _ in everyone for s in computing_s),
                tuple(map(max, zip(*(column for _, column, _ in everyone), strict=True))),
                everyone[0][2])


def _there_and_back(pair: tuple[int, int], rank: int) -> float:
    """Seconds of the quickest of some messages to the other one and back."""
    first, other = rank == pair[0], pair[rank == pair[0]]
    message, found = torch.ones(BYTES // 4), math.inf
    for _ in range(TIMES):
        start = time.perf_counter()
        for act in (dist.send, dist.recv) if first else (dist.recv, dist.send):
            act(message, other)
        found = min(found, time.perf_counter() - start)
    return found
