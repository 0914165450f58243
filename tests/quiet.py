"""Claims about time can only be judged while the machine is its own: hosts give cores to others."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from host import MOST_STOLEN, stolen, wanted
from ranks import RankFailed

TRIES = 3
PAUSE_S = 5


@contextlib.contextmanager
def judged() -> Iterator[None]:
    """A claim that fails while the host takes cores away is skipped, and says so."""
    before = wanted()
    try:
        yield
    except RankFailed:
        raise
    except AssertionError:
        if (share := stolen(before)) > MOST_STOLEN:
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
