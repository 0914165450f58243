"""The helper that starts ranks: results come back, failures speak, hangs end."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from ranks import run_ranks


def describe(step: int) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    return {"place": f"{rank} of {os.environ['WORLD_SIZE']}", "value": rank * step}


def fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank one has had enough")
    time.sleep(600)


def hang_on_one() -> int:
    if os.environ["RANK"] == "1":
        time.sleep(600)
    return os.getpid()


def test_results_come_back_in_the_order_of_ranks() -> None:
    found = run_ranks(3, "test_ranks:describe", 7)
    assert [r["value"] for r in found] == [0, 7, 14]
    assert [r["place"] for r in found] == ["0 of 3", "1 of 3", "2 of 3"]


def test_the_message_is_the_traceback_of_the_rank_that_failed() -> None:
    start_s = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run_ranks(2, "test_ranks:fail_on_one", timeout_s=300)
    assert "rank 1 exited with 1" in str(error.value)
    assert "ValueError: rank one has had enough" in str(error.value)
    assert time.monotonic() - start_s < 250


def test_a_hanging_rank_is_killed_and_says_where_it_was() -> None:
    start_s = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run_ranks(2, "test_ranks:hang_on_one", timeout_s=4)
    assert "rank(s) [1] had not finished after 4 s" in str(error.value)
    assert "in hang_on_one" in str(error.value)
    assert time.monotonic() - start_s < 250
