"""Batches that go through a model one behind the other, as the two views of contrastive learning
do, come apart again as in one process; and so do tokens that experts pick from all rows."""

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
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from nets import DP2, PP2, TP2, ZERO3

STEPS = 8, 6, 8  # rows
Loss = Callable[[Any, Tensor, Tensor], Tensor]


def _views(own: Any, *batches: Tensor) -> Tensor:
    return own.code(torch.cat(batches)).view(len(batches), len(batches[0]), 8)


def _experts(own: Any, a: Tensor, b: Tensor) -> Tensor:
    """Each expert takes the tokens that suit it best, of all rows."""
    z, k = own.code(a), len(a) // 2
    gate, chosen = torch.topk((z @ own.gates).softmax(-1).t(), k, -1)
    made = torch.bmm(z[chosen.flatten()].view(2, k, 8), own.experts) * gate[..., None]
    return z.index_add(0, chosen.flatten(), made.flatten(0, 1)).square().mean() + b.mean()


def _pairs(own: Any, a: Tensor, b: Tensor) -> Tensor:
    z = own.code(torch.stack([a, b], 1).flatten(0, 1))
    return F.mse_loss(z[0::2], z[1::2])


LOSSES: dict[str, Loss] = {
    "view": lambda own, a, b: F.mse_loss(*_views(own, a, b)),
    "unflatten": lambda own, a, b: F.mse_loss(
        *own.code(torch.cat([a, b])).unflatten(0, (2, len(a))).unbind()),
    "three views": lambda own, a, b: _views(own, a, b, a - b).mean(0).square().mean(),
    "one view twice": lambda own, a, b: _views(own, a, a).prod(0).mean() + _views(own, b).mean(),
    "slices": lambda own, a, b: (lambda z: F.mse_loss(z[:len(a)], z[len(a):]))(
        own.code(torch.cat([a, b]))),
    "slices of four": lambda own, a, b: (lambda z: F.mse_loss(z[len(a):3 * len(a)].sin(), torch.cat(
        [z[:len(a)], z[3 * len(a):]])))(own.code(torch.cat([a, b, b, a * b]))),
    "the last": lambda own, a, b: (lambda z: F.mse_loss(z[:-len(a)], z[-len(a):]))(
        own.code(torch.cat([a, b]))),
    "pairs": _pairs,
    "nested": lambda own, a, b: (lambda z: F.mse_loss(z[:, 0], z[:, 1]))(own.code(torch.cat(
        [torch.cat([a, b]), torch.cat([b, 2 * a])])).view(2, 2, len(a), 8))}
ALL_ROWS: dict[str, Loss] = {
    "contrast": lambda own, a, b: (lambda z: F.cross_entropy(
        z[0] @ z[1].t(), torch.arange(len(a))))(_views(own, a, b)),
    "uneven": lambda own, a, b: own.code(torch.cat([a, b, a[:2]])).square().mean(),
    "sorted": lambda own, a, b: (lambda z: (z[z[:, 0].argsort()].view(2, -1, 8) * own.experts[:, :1]
                                            ).square().mean())(own.code(a)),
    "halves": lambda own, a, b: torch.bmm(own.code(a).view(2, -1, 8), own.experts).square().mean(),
    "experts": _experts}


class Encoder(nn.Module):
    def __init__(self, loss: Loss, norm: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.loss = loss
        self.code = nn.Sequential(nn.Linear(16, 16), norm(16), nn.Tanh(), nn.Linear(16, 8))
        self.gates = nn.Parameter(torch.randn(8, 2))
        self.experts = nn.Parameter(torch.randn(2, 8, 8) / 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.loss(self, a, b)


def same(losses: dict[str, Loss], norm: type[nn.Module] = nn.Identity, **degrees: int) -> None:
    """Without a look at the first step: it would stop what is far off."""
    for name, loss in losses.items():
        torch.manual_seed(0)
        plain = Encoder(loss, norm).double()
        split = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**degrees),
                               guards={"first_step": False})
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, split)]
        for rows in STEPS:
            a, b = torch.randn(2, rows, 16, dtype=torch.float64)
            found = []
            for model, optimizer in zip((plain, split), optimizers, strict=True):
                optimizer.zero_grad()
                value = model(a, b)
                value.backward()
                optimizer.step()
                found.append(float(value.detach()))
            assert abs(found[0] - found[1]) < 1e-10, (name, degrees, rows, found)


def claim_replicas_tell_batches_apart() -> None:
    same(LOSSES | ALL_ROWS, **DP2)


def claim_statistics_of_the_batch_leave_batches_apart() -> None:
    losses = {**LOSSES, "contrast": ALL_ROWS["contrast"]}
    few = ("view", "unflatten", "slices of four", "contrast")
    same({name: losses[name] for name in few}, nn.BatchNorm1d, **DP2)


def slow_claim_they_do_under_all_plans() -> None:
    for degrees in (DP2, ZERO3, TP2):
        same({**LOSSES, "contrast": ALL_ROWS["contrast"]}, nn.BatchNorm1d, **degrees)


def slow_claim_micro_batches_tell_batches_apart() -> None:
    same(LOSSES, **PP2)


def slow_claim_zero_and_tensor_parallelism_tell_batches_apart() -> None:
    same(LOSSES | ALL_ROWS, **ZERO3)
    same(LOSSES | ALL_ROWS, **TP2)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


@pytest.mark.parametrize("name", LOSSES)
def test_rules_prove_that_rows_of_such_batches_are_independent(name: str) -> None:
    batch = torch.randn(2, 8, 16)
    call, _ = take_apart(tuple(batch), {})
    kinds = trace(Encoder(LOSSES[name]), call).graph.kinds.values()
    assert not any(kind.couples_rows or kind.tested for kind in kinds), name
