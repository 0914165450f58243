"""How much of the cores that programs here want the host gives to others, in spells of minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

MOST_STOLEN = 0.1
PROBE_S, PAUSE_S, PATIENCE_S = 1.0, 4.0, 120.0


def wanted() -> tuple[int, int]:
    """Ticks of cores that programs here wanted, and how many of them the host gave to others."""
    _, user, nice, system, _, _, irq, soft, stolen, *_ = Path("/proc/stat").read_text().split()
    return sum(map(int, (user, nice, system, irq, soft, stolen))), int(stolen)


def stolen(before: tuple[int, int]) -> float:
    """The share of what was wanted since `before` that was given to others."""
    ticks, taken = (now - then for now, then in zip(wanted(), before, strict=True))
    return taken / max(ticks, 1)


def calmly(work: Callable[[], None], worst: Callable[[float], float]) -> None:
    """Some work; where too much was taken meanwhile, the end of the spell is waited for, though not
    for ever. `worst` of what all ranks saw, who must all call this."""
    before = wanted()
    work()
    share, begun = worst(stolen(before)), time.monotonic()
    while worst(time.monotonic() - begun) < PATIENCE_S and share > MOST_STOLEN:
        time.sleep(PAUSE_S)
        share = worst(_probed())


def _probed() -> float:
    """What is taken from a core that computes, as all ranks do."""
    before, begun = wanted(), time.monotonic()
    while time.monotonic() - begun < PROBE_S:
        pass
    return stolen(before)
