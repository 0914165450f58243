"""Copies of a model, as averages of weights and teachers are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims

DP2, TP2, PP2 = {"dp": 2}, {"tp": 2}, {"pp": 2, "num_micro_batches": 2}
ZERO3 = {"dp": 2, "zero": 3}


class One(nn.Module):
    """With a parameter of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Net(nn.Sequential):
    """With batch statistics, and what stops a trace if asked for."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__(nn.Linear(8, 32), nn.BatchNorm1d(32) if not branches else nn.Identity(),
                         nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4), One())
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and float(x.detach().sum()) > 1e9:
            return x
        return super().forward(x)


def _batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 8, generator=draw, dtype=torch.float64),
             torch.randint(0, 4, (8,), generator=draw)) for _ in range(3)]


def _averaged(model: Any) -> list[Tensor]:
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    for x, y in _batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    average.eval()
    with torch.no_grad():
        return [average(x), *average.module.state_dict().values()]


def _averaged_in_place(model: Any) -> list[Tensor]:
    """Written into the tensors of state_dict(), taken at each step or kept, as some averages do."""
    averages = [copy.deepcopy(model).eval() for _ in range(2)]
    kept: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scores = []
    for x, y in _batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        now = model.state_dict()
        kept = kept or averages[1].state_dict()
        for own in (averages[0].state_dict(), kept):
            for name, value in own.items():
                value.copy_(0.9 * value + 0.1 * now[name])
        with torch.no_grad():
            scores += [own(x) for own in averages]
    return [*scores, *averages[0].state_dict().values(), *averages[1].state_dict().values()]


def _taught(model: Any) -> list[Tensor]:
    """A teacher that is a moving average, asked before the student is, as in mean teachers."""
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in _batches():
        with torch.no_grad():
            told = teacher(x)
        out = model(x)
        loss = F.cross_entropy(out, y) + F.mse_loss(out, told)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for own, new in zip(teacher.parameters(), model.parameters(), strict=True):
                own.mul_(0.9).add_(new, alpha=0.1)
        losses.append(loss.detach())
    return [*losses, *teacher.state_dict().values()]


def _frozen(model: Any) -> list[Tensor]:
    """A copy that is detached, as libraries of moving averages do."""
    other = copy.deepcopy(model)
    for param in other.parameters():
        param.detach_()
    found = _taught(model)
    with torch.no_grad():
        for own, new in zip(other.parameters(), model.parameters(), strict=True):
            own.lerp_(new, 0.5)
    return [*found, *other.state_dict().values()]


def _two(model: Any) -> list[Tensor]:
    """Two of a kind, of which each trains, the copy first."""
    other = copy.deepcopy(model)
    for own in (other, model):
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        for x, y in _batches():
            F.cross_entropy(own(x * (2 if own is other else 1)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*model.state_dict().values(), *other.state_dict().values()]


def same(*plans: dict[str, Any] | None, branches: bool = False) -> None:
    for plan in plans:
        for use in (_averaged, _averaged_in_place, _taught, _frozen, _two):
            torch.manual_seed(0)
            plain = Net(branches).double()
            given = plan and ap.Plan.uniform(**plan)
            model = ap.parallelize(copy.deepcopy(plain), plan=given)
            for want, got in zip(use(plain), use(model), strict=True):
                assert torch.allclose(want.double(), got.double(), 1e-8, 1e-10), (plan, use)


def claim_a_copy_before_the_first_batch_takes_up_the_plan() -> None:
    one_batch = {"pp": 2, "num_micro_batches": 1}
    same(DP2, TP2, one_batch, ZERO3)


def claim_it_takes_up_the_plan_that_is_found() -> None:
    same(None)


def claim_an_untraced_model_has_copies() -> None:
    same(DP2, branches=True)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
