"""How much of the cores that programs here want the host gives to others, in spells of minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

MOST_STOLEN = 0.1
PROBE_S, PAUSE_S, PATIENCE_S = 1.0, 4.0, 600.0


def wanted() -> tuple[int, int]:
    """Ticks of cores that programs here wanted, and how many of them the host gave to others."""
    _, user, nice, system, _, _, irq, soft, stolen, *_ = Path("/proc/stat").read_text().split()
    return sum(map(int, (user, nice, system, irq, soft, stolen))), int(stolen)


def stolen(before: tuple[int, int]) -> float:
    """The share of what was wanted since `before` that was given to others."""
    ticks, taken = (now - then for now, then in zip(wanted(), before, strict=True))
    return taken / max(ticks, 1)


class Calm:
    """Does work of all ranks one after another. Where too much was taken meanwhile it waits for the
    spell to end, for so long in all. `worst` of what all ranks saw, who must all call this."""

    def __init__(self, worst: Callable[[float], float]) -> None:
        self.worst, self.left_s = worst, PATIENCE_S

    def __call__(self, work: Callable[[], None]) -> None:
        before = wanted()
        work()
        share = self.worst(stolen(before))
        while share > MOST_STOLEN and self.left_s > 0:
            time.sleep(PAUSE_S)
            self.left_s -= PAUSE_S + PROBE_S  # the same on all ranks
            share = self.worst(_probed())


def _probed() -> float:
    """What is taken from a core that computes, as all ranks do."""
    before, begun = wanted(), time.monotonic()
    while time.monotonic() - begun < PROBE_S:
        pass
    return stolen(before)
