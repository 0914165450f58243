"""Ordinary scripts are right under every plan, or refused by name (`python profiling trust`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trust import lab, table as trust

ROOT = Path(__file__).resolve().parent.parent
FEW = (
    "gradient_accumulation", "two_forwards_one_backward", "inference_mode", "scheduler",
    "state_dict_in_and_out",
)
PLANS = "tp2,pp2,dp2,zero3"


def table(folder: Path, *options: str, timeout_s: float = 600) -> list[dict[str, Any]]:
    """The cells that are neither right nor refused; each is shown whole."""
    out = folder / "cells.json"
    command = [sys.executable, str(ROOT / "profiling"), "trust", "--json", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    cells = json.loads(out.read_text())
    bad = [cell for cell in cells if cell["status"] not in trust.GOOD]
    assert cells, "nothing ran"
    assert (done.returncode != 0) == bool(bad), done.stdout + done.stderr
    return bad


@pytest.mark.slow
def test_a_few_scripts_are_right_or_refused(tmp_path: Path) -> None:
    assert table(tmp_path, "--only", ",".join([*FEW, *trust.QUICK]), "--plans", PLANS) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_script_is_right_or_refused(tmp_path: Path) -> None:
    assert table(tmp_path, timeout_s=3500) == []


def test_wrong_numbers_are_seen() -> None:
    """The judge itself: equal numbers are right, others silent, and a lone error is not enough."""
    case = lab.Case("one", "cases", lambda wrap: 0)
    want = lab.flat({"loss": [1.0, 2.0]})
    good = {"value": lab.flat({"loss": [1.0, 2.0 + 1e-7]})}
    off = {"value": lab.flat({"loss": [1.0, 2.1]})}
    lacks = {"value": lab.flat({"loss": [1.0]})}
    ours = {"error": "PlanError", "text": "no", "ours": True, "whole": True, "when": 1.0}
    bare = ours | {"whole": False, "when": 0.0}
    raw = {"error": "KeyError", "text": "1", "ours": False, "whole": False, "when": 2.0}
    seen = {
        "right": [good, good], "silent": [good, off], "refused": [bare, ours], "hang": [good, None],
        "abort": [ours, {"died": True}], "raw": [ours, raw], "bare": [bare, bare],
    }
    for status, found in seen.items():
        assert trust.judge(case, found, want)[0] == status
    assert trust.judge(case, [good, lacks], want)[0] == "silent"
    assert trust.judge(case, [good, ours], want)[0] == "bare"
    must = lab.Case("one", "cases", lambda wrap: 0, refuse=True)
    assert trust.judge(must, [good, good], want) == ("silent", "not refused")
    can = lab.Case("one", "cases", lambda wrap: 0, right=True)
    assert trust.judge(can, [ours, ours], want)[0] == "lost"
