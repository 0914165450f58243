"""What the command line of the tests says beside what pytest knows."""

from __future__ import annotations

import math
import time

import pytest

START_S = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--end-within", type=float, default=math.inf, metavar="S",
        help="short tests come first, and those that may take longer than what is left are skipped",
    )


def _most_s(item: pytest.Item) -> float:
    """How long a test may take."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--end-within") < math.inf:
        items.sort(key=_most_s)


def pytest_runtest_setup(item: pytest.Item) -> None:
    left_s = item.config.getoption("--end-within") - (time.monotonic() - START_S)
    if _most_s(item) > left_s:
        pytest.skip(f"it may take {_most_s(item):.0f} s, and {left_s:.0f} s are left")
