"""Modes, statistics of batches and torch.func, where scripts go around the wrapper."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import autopar_torch as ap
import claims
from nets import ALL, DP2, PP2, TP2, ZERO3, near, refused


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


WAYS: dict[str, Any] = {
    "of the module": lambda model, module: getattr(model, "module", model).eval(),
    "of the name from before": lambda model, module: module.eval(),
    "of each": lambda model, module: model.apply(lambda own: own.eval()),
    "of the wrapper": lambda model, module: model.eval(),
}


def claim_a_mode_is_that_of_the_module_whoever_sets_it() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    for degrees in (DP2, TP2, {"pp": 2}):
        for name, switch in WAYS.items():
            plain, module = Normed(), Normed()
            model = ap.parallelize(module, plan=ap.Plan.uniform(**degrees))
            for own, inner in ((plain, plain), (model, module)):
                own(x).square().mean().backward()
                switch(own, inner)
            assert not model.training
            with torch.no_grad():
                assert near(model(x), plain(x)), (degrees, name)
            model.train()
            assert module.training and module.norm.training


class Prototypes(nn.Module):
    """Normalises rows, and prototypes, of which there are as many for any batch."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own, self.norm = nn.Parameter(torch.randn(3, 8)), nn.BatchNorm1d(8)
        self.grouped = grouped

    def forward(self, x: Tensor) -> Tensor:
        z, own = self.norm(x), self.norm(self.own)
        if self.grouped:
            z = z.view(2, 4, 8).mean(1)  # numbers of rows that are written
        return (z @ own.t() + 1).pow_(2).mean()


def claim_statistics_are_joined_where_there_are_rows_and_kept_everywhere() -> None:
    """Where rows cannot be told apart the batch is one, and a replica has nothing to do."""
    for grouped in (False, True):
        for degrees in (DP2, ZERO3, TP2):
            plain, x = Prototypes(grouped).double(), torch.randn(8, 8, dtype=torch.float64)
            model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**degrees))
            for _ in range(2):
                losses = [own(x) for own in (plain, model)]
                for loss in losses:
                    loss.backward()
                assert near(*losses, 1e-9), (grouped, degrees)
            for name, value in plain.norm.named_buffers():
                assert near(model.state_dict()[f"norm.{name}"], value, 1e-9), (grouped, degrees)
            assert near(model.module.own.grad, plain.own.grad, 1e-9), (grouped, degrees)


class Anchors(nn.Module):
    """Rows gather from a grid, an op with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        grid = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1)
        nearest = torch.cdist(x[:, :2], grid.flatten(0, 1)).argmin(1)
        return F.mse_loss(self.head(x), grid.flatten(0, 1)[nearest])


def claim_rows_may_gather_from_a_grid() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    for degrees in (DP2, PP2):
        torch.manual_seed(0)
        plain = Anchors()
        model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**degrees))
        assert near(model(x), plain(x)) and not model.fallback_reason, degrees


def claim_torch_func_sees_whole_parameters() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    for degrees in ALL:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))
        model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**degrees))
        model(x)
        found = []
        for inner in (plain, model.module):
            params = {name: p.detach() for name, p in inner.named_parameters()}

            def loss(values: dict[str, Tensor], inner: Any = inner) -> Tensor:
                return functional_call(inner, values, (x,)).square().mean()

            found.append([*grad(loss)(params).values(), vmap(torch.sum)(params["0.weight"])])
        assert all(near(a, b) for a, b in zip(*found, strict=True)), degrees
        assert "functional_call(model.module" in refused(lambda own=model: vmap(own)(x[:, None]))


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
