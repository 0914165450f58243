"""How fast each device is beside those of its name: a short look at all at once.

By the clock on the wall, since what a quota takes away shows only there; in windows as long as the
kernel's periods of a quota.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

import torch

from .detect import Site, crowds
from .links import ROWS, Places, barrier, computing
from .stats import APART, STEP, relative_error

WINDOW_S, WINDOWS = 0.1, 5
GPU_ROWS = 2**13  # so that kernels outlast their launches
ERRORS = 2.0  # standard errors by which a difference is no chance


class Timed(NamedTuple):
    """Seconds that some work takes, and their relative error."""

    seconds: float
    error: float = 0.0


def speeds(sites: Sequence[Site], ranks: Places, device: torch.device) -> list[float]:
    """Per rank: part of the speed of the fastest device of the same name. All ranks call this.

    Devices that seem unequal are looked at twice as long, as somebody may just pass by.
    """
    if all(len(units) == 1 for units in _units(sites).values()):
        return [1.0] * len(sites)
    work = computing(device, GPU_ROWS if device.type == "cuda" else ROWS)
    work()
    own: list[float] = []
    for _ in range(2):
        barrier(ranks)
        own += windows(work, device)
        found = _speeds(sites, ranks.gather(own))
        if min(found) == 1.0:
            break
    return found


def windows(work: Callable[[], object], device: torch.device,
            count: int = WINDOWS) -> list[float]:
    """Seconds that it took, in each of some windows."""
    found = []
    for _ in range(count):
        start, times = time.perf_counter(), 0
        while times == 0 or time.perf_counter() - start < WINDOW_S:
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times += 1
        found.append((time.perf_counter() - start) / times)
    return found


def _units(sites: Sequence[Site]) -> dict[str, dict[tuple[str, str], list[int]]]:
    """Per name of devices: ranks by node and cores. Ranks of one node on the same cores are equal,
    whoever of them waits."""
    found: dict[str, dict[tuple[str, str], list[int]]] = {}
    for rank, site in enumerate(sites):
        units = found.setdefault(site.device.name, {})
        units.setdefault((site.node, site.cores), []).append(rank)
    return found


def _speeds(sites: Sequence[Site], seen: Sequence[Sequence[float]]) -> list[float]:
    """From the windows of every rank."""
    found, crowd = [1.0] * len(sites), crowds(sites)
    for units in _units(sites).values():
        own = list(units.values())
        paces = [Timed(fmean(median(seen[r]) / crowd[r] for r in ranks),
                      max(relative_error(seen[r]) for r in ranks)) for ranks in own]
        for ranks, speed in zip(own, of_paces(paces), strict=True):
            found = [speed if r in ranks else old for r, old in enumerate(found)]
    return found


def of_paces(paces: Sequence[Timed]) -> list[float]:
    """Part of the speed of the fastest class, the same for all of a class."""
    number = classes(paces)
    usual = [median(p.seconds for p, own in zip(paces, number, strict=True) if own == k)
             for k in range(max(number) + 1)]
    return [max(STEP, round(round(usual[0] / usual[k] / STEP) * STEP, 2)) for k in number]


def classes(paces: Sequence[Timed]) -> list[int]:
    """The class of each pace, the fastest first: who is slower than the usual one of a class, by
    more than chance and more than it costs to know, begins the next."""
    number = [0] * len(paces)
    members: list[Timed] = []
    last = 0
    for i in sorted(range(len(paces)), key=paces.__getitem__):
        if members and _slower(paces[i], members):
            last, members = last + 1, []
        members.append(paces[i])
        number[i] = last
    return number


def _slower(pace: Timed, members: Sequence[Timed]) -> bool:
    chance = math.hypot(pace.error, members[-1].error)
    usual = median(member.seconds for member in members)
    return pace.seconds > usual * (1 + max(APART, ERRORS * chance))
