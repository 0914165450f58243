"""Right, or refused: batches, random numbers, NaN, drift, ranks that are not started alike."""

from __future__ import annotations

import logging
import os
import random
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import autopar_torch as ap
import claims
import zoo
from autopar_torch.errors import RunError
from autopar_torch.run import world
from autopar_torch.run.agree import checksum, weighed
from ranks import run_ranks

TP2 = {"tp": 2}
PP2 = {"pp": 2, "num_micro_batches": 2}
DP2 = {"dp": 2}
ZERO3 = {"dp": 2, "zero": 3}
PLANS = (TP2, PP2, DP2, ZERO3)


@pytest.fixture(scope="module")
def checked() -> dict[str, str]:
    return claims.checked("test_batches")


class _Text(nn.Module):
    """Tokens in, loss out, dropout on the way."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(61, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 32))
            for _ in range(3)
        )
        self.head = nn.Linear(32, 61)

    def forward(self, idx: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embedding(idx)
        for layer in self.layers:
            x = x + layer(x)
        return scale * F.cross_entropy(self.head(x).view(-1, 61), targets.view(-1))


class _Untraced(_Text):
    """The same where a number that was drawn is looked at, and dropout that runs twice."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.drop, self.weight = nn.Dropout(0.5), nn.Parameter(torch.ones(64))

    def forward(self, idx: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        self.drawn = float(torch.rand([]))
        self.seen = (random.random(), float(np.random.rand()))
        loss = super().forward(idx, targets, scale)
        x = checkpoint(self.drop, torch.ones(64) * self.weight, use_reentrant=False)
        self.mask = x.detach()
        return loss * 2 + x.mean() if self.drawn > 0.5 else loss + x.mean()


class _Masked(nn.Module):
    """Returns what its dropout left."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = F.dropout(x * self.weight, 0.5)
        return {"loss": y.mean(), "y": y}


def _parallel(module: nn.Module, degrees: dict[str, Any], **options: Any) -> Any:
    return ap.parallelize(module, plan=ap.Plan.uniform(**degrees), **options)


def _states() -> list[int]:
    """Of all generators that are the user's."""
    states = (torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode(),
              repr(np.random.get_state()).encode())
    return [zlib.crc32(state) for state in states]


def _everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _same(value: Any) -> bool:
    everyone = _everyone(value)
    return all(other == everyone[0] for other in everyone)


def _refuses(call: Callable[[], object], *words: str) -> None:
    """A RunError that says all of these words, within 10 s on every rank; all can go on then."""
    start, said = time.monotonic(), "nothing"
    try:
        call()
    except RunError as error:
        said = str(error)
    late = time.monotonic() - start > 10
    everyone = _everyone("" if all(word in said for word in words) and not late else said)
    assert not any(everyone), (words, everyone)


class _Lines(logging.Handler):
    """What the library says."""

    def __enter__(self) -> list[str]:
        self.lines = list[str]()
        logging.getLogger("autopar_torch").addHandler(self)
        return self.lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __exit__(self, *_: object) -> None:
        logging.getLogger("autopar_torch").removeHandler(self)


# --- random numbers -------------------------------------------------------------------------------


def _windows() -> dict[str, Tensor]:
    data = torch.arange(5000) % 61
    starts = torch.randint(len(data) - 17, (8,))
    idx, targets = (torch.stack([data[s + k : s + k + 16] for s in starts]) for k in (0, 1))
    return {"idx": idx, "targets": targets}


def _learner(model: Any) -> Callable[..., float]:
    """A step of training; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)

    def step(**batch: Tensor) -> float:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _train_on_windows(model: Any) -> tuple[list[float], list[int]]:
    torch.manual_seed(1337)
    step, batches = _learner(model), [_windows() for _ in range(5)]
    return [step(**batch) for batch in batches], [checksum(batch["idx"]) for batch in batches]


def _epochs(model: Any) -> tuple[list[float], list[int]]:
    """A loop with a shuffling loader, an odd last batch, and eval between the epochs."""
    torch.manual_seed(3)
    rows = torch.randint(61, (27, 17))
    loader = DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), batch_size=8, shuffle=True)
    step, losses, batches = _learner(model), list[float](), list[int]()
    for _ in range(3):
        model.train()
        for idx, targets in loader:
            losses.append(step(idx=idx, targets=targets))
            batches.append(checksum(idx))
        model.eval()
        with torch.no_grad():
            losses += [model(idx=idx, targets=targets).item() for idx, targets in loader]
    return losses, batches


def _off(got: list[float], want: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))


def _draw_as_one_process(script: Callable[[Any], tuple[list[float], list[int]]]) -> None:
    want, expected = script(_Text(0.0))
    for degrees in PLANS:
        losses, batches = script(_parallel(_Text(0.0), degrees))
        assert batches == expected and _off(losses, want) <= 1e-6, (degrees, losses, want)
        losses, batches = script(_parallel(_Text(0.1), degrees))
        assert batches == expected and _same(losses), degrees
        assert 1e-5 < _off(losses, want) < 0.1, (degrees, losses, want)


def claim_random_windows_are_the_same_on_all_ranks() -> None:
    _draw_as_one_process(_train_on_windows)


def claim_shuffled_epochs_are_those_of_one_process() -> None:
    _draw_as_one_process(_epochs)


def claim_generators_stay_the_users() -> None:
    batch = {"idx": torch.arange(64).view(4, 16) % 61, "targets": torch.ones(4, 16).long()}
    for kind, degrees in ((_Text, DP2), (_Text, PP2), (_Text, TP2), (_Untraced, DP2)):
        module, before = kind(0.1), _states()
        model = _parallel(module, degrees)
        for train in (True, True, False, True):
            model.train(train)
            loss = model(**batch)
            if train:
                loss.backward()
        if kind is _Untraced:  # forward draws as Python, on all ranks alike
            assert _same(_states())
        else:
            assert _states() == before, degrees


def claim_dropout_is_drawn_by_step_replica_and_part() -> None:
    x = torch.ones(8, 64)
    for degrees in (TP2, DP2, {"dp": 2, "num_micro_batches": 2, "recompute": True}):
        model = _parallel(_Masked(), degrees, outputs=("y",), guards={"drift_every": 1})
        seen = []
        for _ in range(4):
            out = model(x=x)
            out.loss.backward()
            if degrees is not TP2:  # backward, which may compute again, sees the same numbers
                gradient = model.module.weight.grad
                assert torch.allclose(gradient, out.y.sum(0) / out.y.numel()), degrees
            model.zero_grad()
            seen.append(out.y)
            assert _same(out.y.tolist()), degrees
        masks = torch.stack(seen) > 0
        assert abs(float(torch.stack(seen).mean()) - 1.0) < 0.1, degrees
        half = (32, 1) if degrees is TP2 else (4, 0)
        halves = [part for mask in masks[:2] for part in mask.split(*half)]
        for i, a in enumerate(halves):
            for b in halves[:i]:
                assert 0.3 < float((a == b).float().mean()) < 0.7, degrees


def claim_numbers_go_on_from_a_saved_state() -> None:
    x = torch.ones(8, 64)
    model = _parallel(_Masked(), DP2, outputs=("y",))
    model(x=x)
    state = model.numbers.state()
    first = model(x=x).y
    other = _parallel(_Masked(), DP2, outputs=("y",))
    other(x=x)
    other.numbers.load(state)
    assert torch.equal(other(x=x).y, first)
    assert not torch.equal(other(x=x).y, first)


def claim_untraced_numbers_are_shared_but_dropout_is_not() -> None:
    model = _parallel(_Untraced(0.1), DP2)
    torch.manual_seed(5)
    drawn = []
    for _ in range(4):
        model(**_windows()).backward()
        drawn.append((model.module.drawn, *model.module.seen))
        masks = torch.tensor(_everyone(model.module.mask.tolist()))
        assert 0.2 < float((masks[0] == masks[1]).float().mean()) < 0.8
        assert torch.allclose(model.module.weight.grad, masks.mean(0) / 64)
        model.zero_grad()
    assert _same(drawn) and len({d for step in drawn for d in step}) == 12, drawn


# --- one batch on all ranks -----------------------------------------------------------------------


def claim_ranks_that_are_called_otherwise_are_told() -> None:
    rank, good = dist.get_rank(), _windows()
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
        model = _parallel(_Text(0.1), degrees)
        for _ in range(2):
            for batch, words in odd:
                call = partial(model, **(batch if rank else good))
                _refuses(call, *words, 'guards={"batches": False}')
            assert _same(float(model(**good))), degrees
            model.same_batch.num_calls = 0  # values are compared once more
        model.train(rank == 0)
        _refuses(partial(model, **good), "training: rank 0: True")


def claim_values_are_compared_sparsely_later() -> None:
    rank, good = dist.get_rank(), zoo.batch("nanogpt", 4)
    other = zoo.batch("nanogpt", 4, seed=1 + rank)
    model, loose = (_parallel(zoo.build("nanogpt"), DP2, guards={"batches": on})
                    for on in (True, False))
    for _ in range(10):
        model(**good)
    model(**other)
    loose(**good)
    loose(**other)
    model.same_batch.num_calls = 99
    _refuses(partial(model, **other), "call 100 of the model")


def claim_numbers_without_order_or_address_are_no_difference() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, kinds: Any, call: Any) -> Tensor:
            return self.layer(x).square().mean()

    model = _parallel(Words(), DP2)
    x = torch.tensor([[float("nan"), -0.0, 1.0, 2.0]] * 2)
    assert _same(len(f"{model(x, {'alpha', 'beta', 'gamma'}, lambda: 1)}"))


# --- NaN, drift -----------------------------------------------------------------------------------


def claim_a_loss_that_is_no_number_is_named_at_its_step() -> None:
    x = torch.arange(32.0).view(8, 4) / 32
    bad = x.clone()
    bad[5, 0] = float("nan")
    zeros = torch.zeros(8, 2)
    for degrees, rows, teller in ((TP2, "4 to 7", 0), (PP2, "4 to 7", 1), (DP2, "4 to 5", 1)):
        net, quiet = (
            _parallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
                      {**degrees, "num_micro_batches": 2}, loss_fn=F.mse_loss, guards={"nan": on})
            for on in (True, False)
        )
        with _Lines() as lines:
            for batch in (x, bad, bad, x, bad):
                net(batch, target=zeros).backward()
            for batch in (x, bad):
                quiet(batch, target=zeros)
        said = _everyone([line for line in lines if line.startswith("the loss")])
        assert [line[12:25] for line in said[0]] == ["step 2 is nan", "step 5 is nan"], said
        assert all(f"rows {rows} made it" in line for line in said[teller]), (degrees, said)
        assert len(said[teller]) == 2 and len(said[0] + said[1]) == 2 + 2 * teller, said


def claim_a_flipped_bit_is_found() -> None:
    rank = dist.get_rank()
    for degrees in (DP2, TP2):
        model = _parallel(_Text(0.1), degrees, guards={"drift_every": 2})
        step = _learner(model)
        for _ in range(5):
            step(**_windows())
        names = _on_both(model)
        name = names[len(names) // 2]
        if rank == 1:
            model.store.held[name].part.data.view(torch.int32).view(-1)[3] ^= 1
        words = f"before step 6 {name}", "rank 0: ", "rank 1: ", "drift_every"
        _refuses(partial(step, **_windows()), *words)


def _on_both(model: Any) -> list[str]:
    """What both ranks have the same elements of."""
    alike = {name: [held.extent for held in everyone]
             for name, everyone in model.store.holdings.items()}
    return [name for name, held in model.store.held.items()
            if not held.share.zero and alike[name] == [alike[name][0]] * 2]


def claim_a_weight_tied_over_stages_may_not_drift() -> None:
    model, batch = _parallel(zoo.build("nanogpt"), PP2), zoo.batch("nanogpt", 8)
    model(**batch)
    tied = _on_both(model)
    assert len(tied) == 1
    if dist.get_rank() == 1:
        model.store.held[tied[0]].part.data[2, 2] += 1e-6
    _refuses(partial(model, **batch), f"before step 2 {tied[0]}")


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
        _refuses(partial(ap.parallelize, **{**usual, **options}), *words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPAR_CACHE", str(rank))  # only rank 0's is read
        ap.parallelize(**usual)
        patch.setenv("AUTOPAR_TRIED", str(rank))
        _refuses(partial(ap.parallelize, **usual), "AUTOPAR_TRIED: rank 0: 0; rank 1: 1")


def search_with_trials(folder: str) -> list[bool]:
    """Measure, search and try plans: whether the user's generators stood still."""
    os.environ["AUTOPAR_CACHE"] = folder
    world.start()
    torch.manual_seed(11)
    batch = _windows()
    limits = {"dp": 2, "zero": 0}
    model = ap.parallelize(_Text(0.1), confirm=2, constraints=limits)
    before = _states()
    model(**batch).backward()
    return [_states() == before]


@pytest.mark.slow
def test_measuring_and_trying_plans_moves_no_generator(tmp_path: Path) -> None:
    assert run_ranks(2, "test_batches:search_with_trials", str(tmp_path)) == [[True], [True]]


# --- alone ----------------------------------------------------------------------------------------


def test_one_process_draws_what_plain_pytorch_draws() -> None:
    plain, model = _Text(0.1), ap.parallelize(_Text(0.1))
    want, _ = _train_on_windows(plain)
    losses, _ = _train_on_windows(model)
    assert _off(losses, want) <= 1e-6


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


@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("claim_")])
def test_two_ranks(checked: dict[str, str], name: str) -> None:
    assert not checked[name], checked[name]
