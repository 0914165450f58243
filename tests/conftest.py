"""What the command line of the tests says beside what pytest knows."""

from __future__ import annotations

import math
import time

import pytest

START_S = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--begin-within", type=float, default=math.inf, metavar="S",
        help="tests that have not begun after so many seconds are skipped",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit_s = item.config.getoption("--begin-within")
    if (now_s := time.monotonic() - START_S) > limit_s:
        pytest.skip(f"no time left: {now_s:.0f} s have passed, --begin-within is {limit_s:.0f} s")
