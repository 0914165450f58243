"""Whatever forward does with rows is right, or refused."""

from __future__ import annotations

import pytest

import forwards


def test_random_forwards_are_right_or_refused() -> None:
    bad, came = forwards.wrong(range(4), ("dp2", "pp2", "tp2", "untraced"))
    assert not bad
    assert came["right"] >= 8


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_random_forwards_are_right_or_refused() -> None:
    bad, came = forwards.wrong(range(100, 140), timeout_s=1100)
    assert not bad
    assert came["right"] >= 120
