"""The scripts under examples/: the same numbers as in one process without the library."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

import autopar_torch as ap
import claims
import nets

FOLDER = Path(__file__).resolve().parent.parent / "examples"
PLANS = {"dp2": nets.DP2, "tp2": nets.TP2, "pp2": nets.PP2}


def numbers(name: str, *flags: str, plan: dict[str, int] | None = None) -> list[float]:
    """What the `main` of an example returns, under a plan."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    main = __import__(name).main
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if plan is not None:
            file = Path(folder, "plan.json")
            ap.Plan.uniform(**plan).save(file)
            patch.setenv("AUTOPAR_PLAN", str(file))
        return [float(x) for x in main([*flags, *([] if plan else ["--plain"])])]


def same(name: str, *flags: str, limit: float = 1e-6) -> None:
    want = numbers(name, *flags)
    for plan, degrees in PLANS.items():
        got = numbers(name, *flags, plan=degrees)
        worst = max(abs(a - b) / max(1, abs(b)) for a, b in zip(got, want, strict=True))
        assert worst <= limit, f"{name} under {plan}: {worst:.1e}"


def claim_mnist() -> None:
    same("mnist", "--dropout", "0", "--rows", "130", "--epochs", "1")


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
