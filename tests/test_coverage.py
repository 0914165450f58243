"""Models that nobody here wrote are exact or refused, under every plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covered import table

ROOT = Path(__file__).resolve().parent.parent
PLANS = ["dp2", "tp2", "pp2"]


def rows_of(folder: Path, *options: str, timeout_s: float = 1400) -> list[dict[str, Any]]:
    out = folder / "rows.json"
    command = [sys.executable, str(ROOT / "profiling"), "coverage", "--json", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert out.exists(), done.stdout + done.stderr
    return list(json.loads(out.read_text()))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_tenth_architecture_is_wrong_in_silence_or_ends_raw(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--quick")
    cells = {(row["name"], plan): cell for row in rows for plan, cell in row["cells"].items()}
    assert len(rows) > 15
    assert {key: cell["status"] for key, cell in cells.items()
            if cell["status"] not in ("right", "refused", "hang")} == {}  # a busy machine is late


def row(name: str, *statuses: str, split: float = 1.0) -> table.Row:
    cells = {plan: {"plan": plan, "status": status, "detail": "", "about": {"split": split}}
             for plan, status in zip(PLANS, statuses, strict=True)}
    return table.Row("causal", name, cells)


def test_the_figures_count_what_is_exact_wrong_and_split() -> None:
    good, other = row("a", "right", "right", "right"), row("b", "right", "refused", "silent")
    told, met = table.figures([good], PLANS)
    assert met and "wrong=0" in told and "half_split=1.000" in told
    told, met = table.figures([good, other], PLANS)
    assert not met and "wrong=1" in told and "tp2_exact=0.500" in told
    assert not table.figures([], PLANS)[1]
    assert "half_split=0.000" in table.figures([row("c", *["right"] * 3, split=0.1)], PLANS)[0]
