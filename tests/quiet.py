"""Claims about time can only be judged while the machine is its own: hosts give cores to others."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ranks import RankFailed

TRIES = 3
PAUSE_S = 5
MOST_STOLEN = 0.1  # of what was wanted of the cores, while a claim was looked at


def wanted() -> tuple[int, int]:
    """Ticks of cores that programs here wanted, and how many of them the host gave to others."""
    _, user, nice, system, _, _, irq, soft, stolen, *_ = Path("/proc/stat").read_text().split()
    return sum(map(int, (user, nice, system, irq, soft, stolen))), int(stolen)


@contextlib.contextmanager
def judged() -> Iterator[None]:
    """A claim that fails while the host takes cores away is skipped, and says so."""
    before = wanted()
    try:
        yield
    except RankFailed:
        raise
    except AssertionError:
        ticks, stolen = (now - then for now, then in zip(wanted(), before, strict=True))
        if (share := stolen / max(ticks, 1)) > MOST_STOLEN:
            pytest.skip(f"the host took {share:.0%} of the cores, more than {MOST_STOLEN:.0%}")
        raise


def patient(claim: Callable[..., None]) -> Callable[..., None]:
    """Holds once in three tries: others on the machine take cores, and with them rates, away."""

    @functools.wraps(claim)
    def tried(*args: Any, **fixtures: Any) -> None:
        for _ in range(TRIES - 1):
            with contextlib.suppress(AssertionError):
                claim(*args, **fixtures)
                return
            time.sleep(PAUSE_S)
        with judged():
            claim(*args, **fixtures)

    return tried
