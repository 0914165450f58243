"""Cases of a test that are left to `pytest -m slow`: one of each kind is enough for every day."""

from __future__ import annotations

from typing import Any

import pytest


def slowly(*cases: Any) -> list[Any]:
    """These values of a parameter, or of several (tuples)."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
            for case in cases]
