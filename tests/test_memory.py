"""Memory limits on two ranks: what is called fitting fits, and what cannot fit is told."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs

import autopar_torch as ap
from autopar_torch.errors import AutoparError, SearchError
from autopar_torch.find import choose, measuring
from autopar_torch.search.space import SAFETY, Constraints
from autopar_torch.simulate import simulate
from problems import problem
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
from clock.accuracy import Side, pin, session_for
from models import gpt

PARTS = (0.8, 0.6)  # of what the fastest plan takes where memory is no concern


class Found(Side):
    """The plan that is found under a limit, ready to step."""

    def __init__(self, memory_bytes: int | None) -> None:
        model, self.batch = gpt(width=128, layers=3)
        limits = {"memory_bytes": memory_bytes}
        self.model = ap.parallelize(model, self.batch, constraints=limits)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def row(self) -> dict[str, Any]:
        self.step()
        return {"plan": self.model.plan.describe(), "measured": self.peak_bytes(),
                "predicted": self.model.found.memory_bytes}


def limited(cache: str) -> dict[str, Any]:
    """On a rank: plans under smaller and smaller limits, and what is said where none fits."""
    os.environ["AUTOPAR_CACHE"] = cache
    pin()
    torch.set_num_threads(1)
    free = Found(None).row()
    limits = [round(part * free["predicted"]) for part in PARTS]
    rows = [{"limit": limit, **Found(limit).row()} for limit in limits]
    try:
        Found(limits[0] // 20)
    except AutoparError as error:
        return {"free": free, "rows": rows, "error": str(error)}
    return {"free": free, "rows": rows, "error": ""}


@pytest.mark.slow
def test_a_plan_that_fits_stays_below_the_limit_and_a_miss_is_told(tmp_path: Path) -> None:
    first, other = run_ranks(2, "test_memory:limited", str(tmp_path))
    for one, two in zip(first["rows"], other["rows"], strict=True):
        assert max(one["measured"], two["measured"]) <= one["limit"], (one, two)
    assert "no plan fits" in first["error"] and "nearest: tp=" in first["error"]
    assert "refused to go on" in other["error"]


PLANS: list[dict[str, Any]] = [
    {"dp": 2, "zero": 2, "recompute": True},
    {"dp": 2, "zero": 3},
    {"dp": 2, "zero": 3, "num_micro_batches": 2},
    {"dp": 2, "num_micro_batches": 4},
    {"pp": 2, "num_micro_batches": 4},
    {"pp": 2, "num_micro_batches": 4, "recompute": True},
    {"pp": 2, "num_micro_batches": 4, "schedule": "zero_bubble"},
    {"tp": 2, "recompute": True},
    {"dp": 2, "num_micro_batches": 4, "precision": "bfloat16"},
    {"dp": 2, "num_micro_batches": 4, "precision": "bfloat16", "grad_dtype": "bfloat16"},
    {"pp": 2, "num_micro_batches": 4, "precision": "bfloat16", "grad_dtype": "bfloat16"},
]


def counted() -> list[tuple[float, float]]:
    """On a rank: (predicted, measured) bytes of every plan."""
    pin()
    torch.set_num_threads(1)
    sides = {str(plan): Side(lambda: gpt(width=128, layers=3), plan) for plan in PLANS}
    for side in sides.values():
        side.step()
    session = session_for(sides)
    session.round()
    profile, rank = session.profile(), dist.get_rank()
    found = []
    for side in sides.values():
        rows = next(iter(side.batch.values())).shape[0]
        timeline = simulate(side.model.plan, side.model.graph, profile, rows)
        found.append((float(timeline.memory[rank].peak_bytes), float(side.peak_bytes())))
    return found


@pytest.mark.slow
def test_predicted_bytes_are_those_of_the_process() -> None:
    for rank in run_ranks(2, "test_memory:counted"):
        for plan, (predicted, measured) in zip(PLANS, rank, strict=True):
            # Of gradients that stay in bfloat16 a pipeline is predicted a quarter too many.
            most = 1.25 if "pp" in plan and "grad_dtype" in plan else 1.08
            assert 1 / SAFETY < predicted / measured < most, plan


@pytest.mark.parametrize("seed", [5, 6, 7, 8, 9, 10])
def test_what_the_engine_finds_too_large_is_not_taken(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine sees a quarter more bytes than the formula that the search goes by."""
    graph, options, profile, num_rows, _ = problem(seed)
    known = measuring.Known(tuple(options), structs.replace(profile.profile, assumed=False))
    monkeypatch.setattr(choose, "lookup", lambda _: profile)
    monkeypatch.setattr(choose, "_simulated", lambda choices, *_: [
        structs.replace(c, memory_bytes=1.25 * c.memory_bytes) for c in choices])
    free = choose.best(graph, known, num_rows, Constraints())
    limits = Constraints(memory_bytes=int(0.9 * free.memory_bytes))
    try:
        found = choose.best(graph, known, num_rows, limits)
    except SearchError as error:
        assert "nearest" in str(error)
    else:
        assert max(c.memory_bytes for c in found.choices) <= limits.memory_bytes


@pytest.mark.parametrize("kept", [8, 12])
def test_as_many_plans_are_kept_as_are_to_be_tried(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, options, profile, num_rows, _ = problem(5)
    known = measuring.Known(tuple(options), structs.replace(profile.profile, assumed=False))
    monkeypatch.setattr(choose, "lookup", lambda _: profile)
    monkeypatch.setattr(choose, "_simulated", lambda choices, *_: choices)
    found = choose.best(graph, known, num_rows, Constraints(), kept)
    assert len(found.choices) == kept


def test_an_equal_question_is_not_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, options, profile, num_rows, _ = problem(5)
    known = measuring.Known(tuple(options), structs.replace(profile.profile, assumed=False))
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(choose, "lookup", lambda _: profile)
    monkeypatch.setattr(choose, "_simulated", lambda choices, *_: choices)
    first = choose.found_before(graph, known, num_rows, Constraints(), 8)
    monkeypatch.setattr(choose, "fastest", None)
    assert choose.found_before(graph, known, num_rows, Constraints(), 8) == first
    with pytest.raises(TypeError, match="not callable"):
        choose.found_before(graph, known, num_rows, Constraints(zero=0), 8)
