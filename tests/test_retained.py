"""`backward(retain_graph=True)`: several losses, one backward each, through one forward."""

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
from autopar_torch.errors import RunError

DP2, TP2, PP2 = {"dp": 2}, {"tp": 2}, {"pp": 2, "num_micro_batches": 2}
PLANS = (DP2, TP2, PP2, {"dp": 2, "zero": 3, "num_micro_batches": 2},
         {"pp": 2, "num_micro_batches": 2, "recompute": True},
         {"tp": 2, "recompute": 0.3}, {"dp": 2, "zero": 3, "recompute": 0.3})


class Tasks(nn.Module):
    """Two heads on one trunk, as several tasks have."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(),
                                                 nn.Linear(32, 16)) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))
        self.branches = branches

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        if self.branches and float(x.detach().sum()) > 1e9:
            return x
        for layer in self.trunk:
            x = x + layer(x)
        outs = [head(x) for head in self.heads]
        return tuple(outs) if y is None else F.cross_entropy(outs[0] + outs[1], y)


def _one_after_the_other(model: Any, x: Tensor, y: Tensor) -> None:
    first, second = model(x)
    F.cross_entropy(first, y).backward(retain_graph=True)
    (F.cross_entropy(second, y) + first.square().mean()).backward()


def _projected(model: Any, x: Tensor, y: Tensor) -> None:
    """Gradients of each task alone, of which what points against the other is taken away."""
    params, found = list(model.parameters()), []
    losses = [F.cross_entropy(out, y) * (1 + k) for k, out in enumerate(model(x))]
    for loss in losses:
        grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        found.append([torch.zeros_like(p) if g is None else g
                      for p, g in zip(params, grads, strict=True)])
    dot = sum((a * b).sum() for a, b in zip(*found, strict=True))
    norm = sum(b.square().sum() for b in found[1])
    for p, a, b in zip(params, *found, strict=True):
        p.grad = a + b - torch.clamp(dot / norm, max=0.1) * b


def _inside(model: Any, x: Tensor, y: Tensor) -> None:
    loss = model(x, y)
    (2 * loss).backward(retain_graph=True)
    loss.backward(retain_graph=True)
    (loss / 2).backward()


def _always(model: Any, x: Tensor, y: Tensor) -> None:
    """As scripts say that do not need it."""
    F.cross_entropy(model(x)[0], y).backward(retain_graph=True)


USES = _one_after_the_other, _projected, _inside, _always


def _trained(model: Any, use: Callable[..., None]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for rows in (8, 7):
        use(model, torch.randn(rows, 16, generator=draw, dtype=torch.float64),
            torch.randint(0, 4, (rows,), generator=draw))
        optimizer.step()
        optimizer.zero_grad()
    return list(model.state_dict().values())


def same(*plans: dict[str, Any], branches: bool = False) -> None:
    for plan in plans:
        for use in USES:
            torch.manual_seed(0)
            plain = Tasks(branches).double()
            model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**plan))
            for want, got in zip(_trained(plain, use), _trained(model, use), strict=True):
                assert torch.allclose(want, got, 1e-9, 1e-11), (plan, use.__name__)


def claim_two_backwards_are_those_of_one_process() -> None:
    same(DP2, TP2, PP2)


def slow_claim_they_are_under_other_plans() -> None:
    same(*PLANS[3:])


class Fork(nn.Module):
    """A block whose two results keep values of their own, and one in common."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.first, self.second = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.tanh(self.both(a + b)).exp()
        return self.first(own.sin()).cos(), self.second(own.cos()).sin()


class Forks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Fork() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x, x
        for layer in self.layers:
            a, b = layer(a, b)
        return a, b


def claim_values_that_are_made_again_are_made_for_each() -> None:
    torch.manual_seed(0)
    plain, x = Forks().double(), torch.randn(8, 16, dtype=torch.float64)
    for part in (0.2, 0.5, 0.9):
        model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(dp=2, recompute=part))
        for own in (plain, model):
            own.zero_grad()
            first, second = own(x)
            first.sum().backward(retain_graph=True)
            first.square().sum().backward(retain_graph=True)
            (first * second).sum().backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, 1e-9, 1e-11), part


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(16, 16)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        z = self.code(torch.cat([a, b])).view(2, len(a), 16)
        return F.cross_entropy(z[0] @ z[1].t(), torch.arange(len(a))), z.square().mean()


def claim_they_are_of_what_replicas_do_together() -> None:
    torch.manual_seed(0)
    plain, (a, b) = Contrast().double(), torch.randn(2, 8, 16, dtype=torch.float64)
    model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**DP2))
    for own in (plain, model):
        first, second = own(a, b)
        first.backward(retain_graph=True)
        (first + second).backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, 1e-9, 1e-11)


def claim_they_are_of_an_untraced_model() -> None:
    same(DP2, branches=True)


def claim_a_second_one_without_it_is_refused() -> None:
    model = ap.parallelize(Tasks(), plan=ap.Plan.uniform(**DP2))
    x, y = torch.ones(4, 16), torch.arange(4)
    for end in (model(x)[0].sum(), model(x, y)):
        end.backward()
        with pytest.raises(RunError, match="retain_graph=True"):
            end.backward()


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
