"""Right, or refused: batches, random numbers, NaN, drift, ranks that are not started alike."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
import zoo
from autopar_torch.run import world
from autopar_torch.run.agree import checksum, weighed
from ranks import run_ranks
from texts import (
    DP2,
    PLANS,
    PP2,
    TP2,
    Lines,
    Text,
    everyone,
    learner,
    parallelized,
    refuses,
    same,
    states,
    windows,
)

# --- one batch on all ranks -----------------------------------------------------------------------


def claim_ranks_that_are_called_otherwise_are_told() -> None:
    rank, good = dist.get_rank(), windows()
    fewer = {name: value[:4] for name, value in good.items()}
    flipped = {name: value.flip(0) for name, value in good.items()}
    odd: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        (fewer, ("rows: rank 0: 8; rank 1: 4", "DistributedSampler")),
        ({**good, "idx": good["idx"] + 1}, ("values of idx", "a seed per rank")),
        (flipped, ("values of idx", "values of targets", "shuffle")),
        ({"idx": good["idx"]}, ("arguments: rank 0: idx, targets; rank 1: idx",)),
        ({**good, "targets": good["targets"].int()}, ("shape of targets", "int32")),
        ({}, ("arguments", "rank 1: the batch holds no tensor")),
        ({**good, "scale": 2.0}, ("scale: rank 0: none; rank 1: 2.0",)),
    ]
    for degrees in PLANS:
        model = parallelized(Text(0.1), degrees)
        for _ in range(2):
            for batch, words in odd:
                call = partial(model, **(batch if rank else good))
                refuses(call, *words, 'guards={"batches": False}')
            assert same(float(model(**good))), degrees
            model.same_batch.num_calls = 0  # values are compared once more
        model.train(rank == 0)
        refuses(partial(model, **good), "training: rank 0: True")


def slow_claim_values_are_compared_sparsely_later() -> None:
    rank, good = dist.get_rank(), zoo.batch("nanogpt", 4)
    other = zoo.batch("nanogpt", 4, seed=1 + rank)
    model, loose = (parallelized(zoo.build("nanogpt"), DP2, guards={"batches": on})
                    for on in (True, False))
    for _ in range(10):
        model(**good)
    model(**other)
    loose(**good)
    loose(**other)
    model.same_batch.num_calls = 99
    refuses(partial(model, **other), "call 100 of the model")


def claim_numbers_without_order_or_address_are_no_difference() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, kinds: Any, call: Any) -> Tensor:
            return self.layer(x).square().mean()

    model = parallelized(Words(), DP2)
    x = torch.tensor([[float("nan"), -0.0, 1.0, 2.0]] * 2)
    assert same(len(f"{model(x, {'alpha', 'beta', 'gamma'}, lambda: 1)}"))


# --- NaN, drift -----------------------------------------------------------------------------------


def claim_a_loss_that_is_no_number_is_named_at_its_step() -> None:
    x = torch.arange(32.0).view(8, 4) / 32
    bad = x.clone()
    bad[5, 0] = float("nan")
    zeros = torch.zeros(8, 2)
    for degrees, rows, teller in ((TP2, "4 to 7", 0), (PP2, "4 to 7", 1), (DP2, "4 to 5", 1)):
        net, quiet = (
            parallelized(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
                      {**degrees, "num_micro_batches": 2}, loss_fn=F.mse_loss, guards={"nan": on})
            for on in (True, False)
        )
        with Lines() as lines:
            for batch in (x, bad, bad, x, bad):
                net(batch, target=zeros).backward()
            for batch in (x, bad):
                quiet(batch, target=zeros)
        said = everyone([line for line in lines if line.startswith("the loss")])
        assert [line[12:25] for line in said[0]] == ["step 2 is nan", "step 5 is nan"], said
        assert all(f"rows {rows} made it" in line for line in said[teller]), (degrees, said)
        assert len(said[teller]) == 2 and len(said[0] + said[1]) == 2 + 2 * teller, said


def claim_a_flipped_bit_is_found() -> None:
    rank = dist.get_rank()
    for degrees in (DP2, TP2):
        model = parallelized(Text(0.1), degrees, guards={"drift_every": 2})
        step = learner(model)
        for _ in range(5):
            step(**windows())
        names = _on_both(model)
        name = names[len(names) // 2]
        if rank == 1:
            model.store.held[name].part.data.view(torch.int32).view(-1)[3] ^= 1
        words = f"before step 6 {name}", "rank 0: ", "rank 1: ", "drift_every"
        refuses(partial(step, **windows()), *words)


def _on_both(model: Any) -> list[str]:
    """What both ranks have the same elements of."""
    alike = {name: [held.cuts for held in everyone]
             for name, everyone in model.store.holdings.items()}
    return [name for name, held in model.store.held.items()
            if not held.share.zero and alike[name] == [alike[name][0]] * 2]


def slow_claim_a_weight_tied_over_stages_may_not_drift() -> None:
    model, batch = parallelized(zoo.build("nanogpt"), PP2), zoo.batch("nanogpt", 8)
    model(**batch)
    tied = _on_both(model)
    assert len(tied) == 1
    if dist.get_rank() == 1:
        model.store.held[tied[0]].part.data[2, 2] += 1e-6
    refuses(partial(model, **batch), f"before step 2 {tied[0]}")


# --- ranks that are not started alike -------------------------------------------------------------


def claim_ranks_that_are_started_otherwise_are_told() -> None:
    rank = dist.get_rank()
    plan = ap.Plan.uniform(dp=2)
    odd: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"plan": ap.Plan.uniform(tp=2) if rank else plan}, ("plan: rank 0: ",)),
        ({"model": nn.Linear(4, 4 + rank)},
         ("weight: rank 0: (4, 4) float32, trained; rank 1: (5, 4)",)),
        ({"model": nn.Linear(4, 4).requires_grad_(rank == 0)}, ("weight: ",)),
        ({"loss_fn": F.l1_loss if rank else F.mse_loss}, ("loss_fn: ", "mse_loss", "l1_loss")),
        ({"plan": None, "constraints": {"tp": 1 + rank}}, ("constraints: ",)),
        ({"guards": {"batches": bool(rank)}}, ("guards: ",)),
    ]
    usual = {"model": nn.Linear(4, 4), "plan": plan}
    for options, words in odd:
        refuses(partial(ap.parallelize, **{**usual, **options}), *words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPAR_CACHE", str(rank))  # only rank 0's is read
        ap.parallelize(**usual)
        patch.setenv("AUTOPAR_TRIED", str(rank))
        refuses(partial(ap.parallelize, **usual), "AUTOPAR_TRIED: rank 0: 0; rank 1: 1")


def search_with_trials(folder: str) -> list[bool]:
    """Measure, search and try plans: whether the user's generators stood still."""
    os.environ["AUTOPAR_CACHE"] = folder
    world.start()
    torch.manual_seed(11)
    batch = windows()
    limits = {"dp": 2, "zero": 0}
    model = ap.parallelize(Text(0.1), confirm=2, constraints=limits)
    before = states()
    model(**batch).backward()
    return [states() == before]


@pytest.mark.slow
def test_measuring_and_trying_plans_moves_no_generator(tmp_path: Path) -> None:
    assert run_ranks(2, "test_batches:search_with_trials", str(tmp_path)) == [[True], [True]]


# --- alone ----------------------------------------------------------------------------------------


def test_a_checksum_tells_order_and_single_bits_on_any_device() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        x = torch.arange(12).view(4, 3).to(dtype)
        for of in (checksum, lambda t: weighed(t.reshape(-1))):
            assert of(x) == of(x.clone()) and of(x) == of(x.t().contiguous().t())
            assert of(x) != of(x.roll(1, 0)) or dtype == torch.bool, dtype
        one, other = torch.tensor([[1, 2, 2, 1], [2, 1, 1, 2]]).to(dtype)
        assert weighed(one) != weighed(other) or dtype == torch.bool, dtype
    for dtype in (torch.float32, torch.float64):
        x = torch.zeros(5, dtype=dtype)
        assert weighed(x) != weighed(-x) and checksum(x) != checksum(-x)
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(0))


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
