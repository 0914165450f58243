"""Gradients that have gradients: penalties of critics, equations with derivatives, curvature."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.errors import RunError

DP2, TP2, PP2 = {"dp": 2}, {"tp": 2}, {"pp": 2, "num_micro_batches": 2}
PLANS: Sequence[dict[str, Any]] = (DP2, TP2, PP2, {"dp": 2, "zero": 3, "num_micro_batches": 2})


class Critic(nn.Module):
    """With batch statistics, a recurrence, or what stops a trace, if asked for."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        kinds: dict[str, Callable[[], nn.Module]] = {
            "norm": lambda: nn.BatchNorm1d(16), "drop": lambda: nn.Dropout(0.5),
            "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))}
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), kinds.get(way, nn.Identity)(),
                                  nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1))
        self.way = way

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if self.way == "branches" and float(x.detach().sum()) > 1e9:
            return x
        out: Tensor = self.body(x)
        return out if y is None else F.mse_loss(out, y)


def _penalty(model: Any, x: Tensor, _: Tensor) -> Tensor:
    """As of WGAN-GP, beside a score of the same critic; the input is made of others."""
    mixed = 0.3 * x + 0.7 * x.flip(0)
    score = model(mixed)
    grads, = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True)
    penalty: Tensor = (grads.norm(dim=1) - 1).square().mean()
    return model(x).mean() - model(mixed.detach()).mean() + 10 * penalty


def _equation(model: Any, x: Tensor, _: Tensor) -> Tensor:
    """As of a network that is to solve one: derivatives of derivatives."""
    u = model(x)
    first, = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    second, = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (second[:, 0] + u[:, 0] * first[:, 1]).square().mean() + u.square().mean()


def _sharpness(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on the gradients of the parameters, of a loss that is made inside."""
    loss = model(x, y)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * torch.stack([g.square().sum() for g in grads]).sum()


def _trained(model: Any, use: Callable[..., Tensor]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)
    found = []
    for _ in range(3):
        x, y = (torch.randn(8, n, generator=draw, dtype=torch.float64) for n in (6, 1))
        x.requires_grad_()
        loss = use(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        found += [loss.detach(), x.grad if x.grad is not None else torch.zeros(())]
        optimizer.step()
    return [*found, *model.state_dict().values()]


def _curved(model: Any, *_: Any) -> list[Tensor]:
    """Products of curvature and a vector, by each of the usual ways."""
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, n, generator=draw, dtype=torch.float64) for n in (6, 1))
    params = list(model.parameters())
    vectors = [torch.randn(p.shape, generator=draw, dtype=torch.float64) for p in params]
    grads = torch.autograd.grad(F.mse_loss(model(x), y), params, create_graph=True)
    found = [*torch.autograd.grad(grads, params, vectors, retain_graph=True)]
    dot = torch.stack([(g * v).sum() for g, v in zip(grads, vectors, strict=True)]).sum()
    found += torch.autograd.grad(dot, params)
    model(x, y).backward(create_graph=True)
    found += torch.autograd.grad([p.grad for p in params], params, vectors)
    return [t.detach().clone() for t in found]


def _same(way: str, run: Callable[..., list[Tensor]], *how: Any,
          plans: Sequence[dict[str, Any] | None]) -> None:
    torch.manual_seed(0)
    plain = Critic(way).double()
    want = run(copy.deepcopy(plain), *how)
    for plan in plans:
        got = run(ap.parallelize(copy.deepcopy(plain), plan=plan and ap.Plan.uniform(**plan)), *how)
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            assert torch.allclose(a, b, 1e-9, 1e-11), f"{way} {how} {plan}: value {i}"


def claim_penalties_are_those_of_one_process() -> None:
    for use in (_penalty, _equation, _sharpness):
        _same("", _trained, use, plans=PLANS)


def claim_what_a_penalty_alone_does_not_need_has_no_gradient() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1)).double()
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    for plan in PLANS:
        found = []
        for own in (plain, ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**plan))):
            grads, = torch.autograd.grad(own(x).sum(), x, create_graph=True)
            grads.square().sum().backward()
            found.append([name for name, p in own.named_parameters() if p.grad is None])
            own.zero_grad()
        assert found[0] == found[1] == ["2.bias", "3.bias"], (plan, found)


def claim_batch_statistics_are_joined_and_kept_once() -> None:
    _same("norm", _trained, _penalty, plans=(DP2, TP2))


def claim_products_with_curvature_are_those_of_one_process() -> None:
    _same("", _curved, plans=PLANS)


def claim_an_untraced_model_has_them() -> None:
    for use in (_penalty, _sharpness):
        _same("branches", _trained, use, plans=(DP2,))


def slow_claim_a_plan_is_found_for_them() -> None:
    _same("", _trained, _penalty, plans=(None,))


def claim_what_would_differ_the_second_time_is_refused() -> None:
    x = torch.ones(8, 6, dtype=torch.float64, requires_grad=True)
    for way, text in (("drop", "draws random numbers"), ("spectral", "reads .* and changes it")):
        for plan in (DP2, TP2):
            model = ap.parallelize(Critic(way).double(), plan=ap.Plan.uniform(**plan))
            with pytest.raises(RunError, match=text):
                torch.autograd.grad(model(x).sum(), x, create_graph=True)
            model.eval()  # which draws and changes nothing
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model = ap.parallelize(Critic().double(), plan=ap.Plan.uniform(**TP2))
    out = model(x).sum()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(RunError, match="changed since forward"):
        torch.autograd.grad(out, x, create_graph=True)
    half = ap.parallelize(Critic(), plan=ap.Plan.uniform(dp=2, precision="bfloat16"))
    with pytest.raises(RunError, match="computes in bfloat16"):
        torch.autograd.grad(half(x.float()).sum(), list(half.parameters()), create_graph=True)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
