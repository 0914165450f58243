"""Gradients of what the model is given: of images that are attacked, of a prompt, of what another
model has made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims

TP2, DP2, PP2 = {"tp": 2}, {"dp": 2}, {"pp": 2, "num_micro_batches": 2}
ZERO3 = {"dp": 2, "zero": 3, "num_micro_batches": 2}
AGAIN = {"pp": 2, "num_micro_batches": 2, "schedule": "1f1b", "recompute": True}
LATE = {"pp": 2, "num_micro_batches": 4, "schedule": "zero_bubble"}
PLANS = DP2, TP2, PP2, ZERO3, AGAIN, LATE


class Net(nn.Module):
    """`late` goes past all blocks but the last; `way` says what comes of them."""

    def __init__(self, way: str = "", branches: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 4)
        self.way, self.branches = way, branches

    def forward(self, x: Tensor, late: Tensor | None = None, y: Tensor | None = None) -> Any:
        if self.branches and float(x.detach().sum()) > 1e9:
            return x
        h = (x - 0.5) * 2  # before any parameter
        for block in self.blocks:
            h = torch.tanh(block(h))
        h = self.head(h if late is None else h + late)
        if y is not None:
            return F.cross_entropy(h, y)
        return (h, x) if self.way == "both" else h


def _outside(model: Any, x: Tensor, *_: Tensor) -> Tensor:
    return model(x).square().sum()


def _inside(model: Any, x: Tensor, _: Tensor, y: Tensor) -> Tensor:
    return model(x, y=y)


def _prompt(model: Any, x: Tensor, prompt: Tensor, y: Tensor) -> Tensor:
    """One for all rows, and rows that require nothing."""
    return F.cross_entropy(model(x.detach(), prompt), y) + model(x.detach(), late=prompt, y=y)


def _both(model: Any, x: Tensor, *_: Tensor) -> Tensor:
    out, own = model(x)
    return out.square().mean() + own.pow(3).mean()


def _twice(model: Any, x: Tensor, *_: Tensor) -> Tensor:
    return model(x, x).square().mean()


def _made(model: Any, x: Tensor, prompt: Tensor, y: Tensor) -> Tensor:
    """Of tensors that are no leaves, by autograd.grad, which leaves `.grad` alone."""
    loss = F.cross_entropy(model(x * 2, late=prompt.expand(len(x), 8)), y)
    grad, = torch.autograd.grad(loss, x)
    return F.cross_entropy(model(x + 0.1 * grad.sign()), y)


USES: dict[str, Callable[..., Tensor]] = {
    own.__name__: own for own in (_outside, _inside, _prompt, _both, _twice, _made)}


def _gradients(model: Any, use: Callable[..., Tensor], rows: int) -> list[Tensor | None]:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    prompt = torch.randn(8, generator=draw, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 4, (rows,), generator=draw)
    loss = use(model, x, prompt, y)
    loss.backward()
    params = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [loss.detach(), x.grad, prompt.grad, *params]


def same(use: Callable[..., Tensor], *plans: dict[str, Any], frozen: bool = False,
         branches: bool = False) -> None:
    for plan in plans:
        torch.manual_seed(0)
        plain = Net(use.__name__.strip("_"), branches).double().requires_grad_(not frozen)
        model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**plan))
        for rows in (8, 7):
            want, got = _gradients(plain, use, rows), _gradients(model, use, rows)
            assert len(want) == len(got), (use.__name__, plan)
            for k, (a, b) in enumerate(zip(want, got, strict=True)):
                place = use.__name__, plan, rows, k
                assert (a is None) == (b is None), place
                assert a is None or b is None or torch.allclose(a, b, 1e-9, 1e-11), (place, a, b)


def claim_replicas_give_them() -> None:
    for use in USES.values():
        same(use, DP2)


def claim_tensor_groups_give_them() -> None:
    for use in USES.values():
        same(use, TP2)


def claim_pipelines_give_them() -> None:
    for use in USES.values():
        same(use, PP2)


def slow_claim_other_plans_give_them() -> None:
    for use in USES.values():
        same(use, ZERO3, AGAIN, LATE)


def claim_a_frozen_model_gives_them() -> None:
    for use in (_outside, _inside, _made):
        same(use, DP2, TP2, PP2, frozen=True)


def claim_untraced_replicas_give_them() -> None:
    for use in (_outside, _inside, _both, _made):
        same(use, DP2, branches=True)
    same(_outside, DP2, branches=True, frozen=True)


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 8))


class Judge(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.LeakyReLU(0.2),
                         nn.Linear(16, 1))


def _games(make: Any, judge: Any) -> list[float]:
    """Two networks against each other, as in the first paper about it."""
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2, eps=1e-4) for m in (make, judge)]
    draw, found = torch.Generator().manual_seed(1), []
    for _ in range(3):
        real = torch.randn(8, 8, generator=draw, dtype=torch.float64)
        fake = make(torch.randn(8, 4, generator=draw, dtype=torch.float64))
        judge.zero_grad()
        ones, zeros = torch.ones(8, 1).double(), torch.zeros(8, 1).double()
        wrong = F.binary_cross_entropy_with_logits(judge(real), ones)
        wrong += F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        wrong.backward()
        optimizers[1].step()
        make.zero_grad()
        seen = F.binary_cross_entropy_with_logits(judge(fake), ones)
        seen.backward()
        optimizers[0].step()
        found += [float(wrong.detach()), float(seen.detach())]
    return found


def claim_a_generator_learns_through_its_judge() -> None:
    for plan in (DP2, TP2, PP2):
        torch.manual_seed(0)
        plain = Generator().double(), Judge().double()
        micro = {**plan, "num_micro_batches": 1}  # batch statistics
        models = [ap.parallelize(copy.deepcopy(m), plan=ap.Plan.uniform(**own))
                  for m, own in zip(plain, (micro, plan), strict=True)]
        want, got = _games(*plain), _games(*models)
        assert torch.allclose(torch.tensor(want), torch.tensor(got), 1e-9), (plan, want, got)


def claim_a_plan_is_found_for_them() -> None:
    torch.manual_seed(0)
    plain = Net().double()
    model = ap.parallelize(copy.deepcopy(plain))
    for want, got in zip(_gradients(plain, _outside, 8), _gradients(model, _outside, 8),
                         strict=True):
        assert (want is None) == (got is None)
        assert want is None or got is None or torch.allclose(want, got, 1e-9, 1e-11)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
