"""A short look at machines while a run goes on: how fast ranks compute, and links between nodes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .factors import Look, pairs
from .links import Places, barrier, computing
from .speeds import windows

NUM_WINDOWS = 2
BYTES, TIMES, LEAST_S = 1 << 17, 3, 0.03  # messages to another node and back


def look(nodes: Sequence[str], places: Places, device: torch.device) -> Look:
    """All ranks call this; the same on all of them. `nodes`: the name of each rank's node."""
    start = time.perf_counter()
    work = computing(device)
    work()
    barrier(places)
    own, sending = min(windows(work, device, NUM_WINDOWS)), []
    for pair in pairs(nodes):
        barrier(places)
        sending.append(_there_and_back(pair, places.rank) if places.rank in pair else 0.0)
    everyone = places.gather((own, sending, time.perf_counter() - start))
    return Look(tuple(seconds for seconds, _, _ in everyone),
                tuple(map(max, zip(*(column for _, column, _ in everyone), strict=True))),
                everyone[0][2])


def _there_and_back(pair: tuple[int, int], rank: int) -> float:
    """Seconds of the quickest of some messages to the other one and back. The first rank says in
    each whether it is the last; a rank that somebody keeps from its core answers late at times."""
    first, other = rank == pair[0], pair[rank == pair[0]]
    message, found, begun = torch.zeros(BYTES // 4, device="cpu"), math.inf, time.perf_counter()
    for count in itertools.count(1):
        start = time.perf_counter()
        message[0] = float(count >= TIMES and start - begun > LEAST_S)
        for act in (dist.send, dist.recv) if first else (dist.recv, dist.send):
            act(message, other)
        found = min(found, time.perf_counter() - start)
        if message[0]:
            break
    return found
