"""Every plan gives the numbers of one process. The whole table is `python profiling numbers`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import oracle
import zoo
from ranks import HANG_S, run_ranks
from slow import slowly

QUICK = ["nanogpt", "resnet"]


def run_table(models: list[str], plans: list[dict[str, Any]], pad: bool) -> list[list[Any]]:
    """In a rank: (model, plan, what was seen, worst difference)."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with oracle.traced_once():
        return [[name, oracle.text(plan), *oracle.row(name, plan, pad)]
                for name in models for plan in plans]


def bad_rows(
    num_ranks: int, models: list[str], pad: bool, timeout_s: float = HANG_S
) -> list[list[Any]]:
    rows = run_ranks(num_ranks, "test_numbers:run_table", models, oracle.PLANS[num_ranks], pad,
                     timeout_s=timeout_s)[0]
    assert rows, "nothing ran"
    ran = [row for row in rows if "does not apply" not in row[2]]
    assert len(ran) >= len(rows) // 2
    return [row for row in rows if not row[3] <= oracle.TOLERANCE]


@pytest.mark.parametrize("num_ranks", [2, *slowly(1, 4)])
def test_a_few_models_under_all_plans_match_one_process(num_ranks: int) -> None:
    assert bad_rows(num_ranks, QUICK if num_ranks < 4 else QUICK[:1], True) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_model_under_all_plans_matches_one_process(num_ranks: int) -> None:
    assert bad_rows(num_ranks, list(zoo.MODELS), True, 1400) == []


@pytest.mark.slow
def test_batches_without_padding_match_one_process() -> None:
    assert bad_rows(2, ["gpt2", "bert", "vit"], False) == []
