"""Claims about time can only be judged while the machine is its own: hosts give cores to others."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TRIES = 3
PAUSE_S = 5
MOST_STOLEN = 0.1  # of all cores, while a claim was looked at


def stolen_s() -> float:
    """Seconds of all cores that the host gave to others since it started."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(first[8]) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def judged() -> Iterator[None]:
    """A claim that fails while the host takes cores away is skipped, and says so."""
    start_s, before_s = time.monotonic(), stolen_s()
    try:
        yield
    except AssertionError:
        cores_s = (time.monotonic() - start_s) * (os.cpu_count() or 1)
        if (share := (stolen_s() - before_s) / max(cores_s, 1e-3)) > MOST_STOLEN:
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
