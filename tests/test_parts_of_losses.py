"""A number beside other outputs is the loss if it has all of them learn, else a part of a loss that
the loop makes of what the model returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import autopar_torch as ap
import claims
from autopar_torch.trace.form import take_outputs
from nets import DP2, PP2, TP2, ZERO3, refused

Loss = Callable[[Any, Tensor], Tensor]


class Encoder(nn.Module):
    """What it returns is picked by name; one that stops the trace has to be trained untraced."""

    def __init__(self, form: str, stops: bool = False) -> None:
        super().__init__()
        self.form, self.stops = form, stops
        self.code, self.mix, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Any:
        z = self.code(x).tanh()
        if self.stops and float(z.sum().detach()) > 1e9:
            z = 2 * z
        y = self.head(self.mix(z).relu())
        if self.form == "output, mean of some":
            some = x[:, 0] > 0
            return y, (z[:, 0] * some).sum() / some.sum().clamp(min=1)
        mse, kl = F.mse_loss(y, x), (z**2).mean()
        right = (y.detach() > 0).to(x.dtype).mean()
        decay = sum(p.pow(2).sum() for p in self.parameters())
        return {"output, penalty": (y, decay), "penalty, output": (decay, y),
                "output, part": [y, kl], "output, metric": (y, right), "metric, output": (right, y),
                "parts": (mse, kl), "sum, parts": (mse + kl, mse, kl),
                "parts, sum": (mse, kl, mse + kl), "output, loss": (y, mse),
                "loss, scores": (mse, y.softmax(-1)), "nested": (y, (kl, z)),
                "output, parameter": (y, self.code.weight), "penalty": decay,
                "output, constant": (y, torch.tensor(3.0))}[self.form]


mse = F.mse_loss
LOSSES: dict[str, Loss] = {
    "output, penalty": lambda out, x: mse(out[0], x) + out[1] / 1000,
    "penalty, output": lambda out, x: mse(out[1], x) + out[0] / 1000,
    "output, part": lambda out, x: mse(out[0], x) + out[1] / 9,
    "output, metric": lambda out, x: mse(out[0], x) + 0 * out[1],
    "metric, output": lambda out, x: mse(out[1], x),
    "parts": lambda out, x: out[0] + out[1] / 3,
    "sum, parts": lambda out, x: out[0],
    "parts, sum": lambda out, x: out[2],
    "output, loss": lambda out, x: out[1],
    "loss, scores": lambda out, x: out[0],
    "output, parameter": lambda out, x: mse(out[0], x) + out[1].square().mean(),
    "penalty": lambda out, x: out, "output, constant": lambda out, x: mse(out[0], x),
    "nested": lambda out, x: mse(out[0], x) + out[1][0] / 9 + out[1][1].abs().mean()}
INSIDE = {"penalty", "sum, parts", "output, loss", "loss, scores"}  # the schedule runs at once


def trained(model: nn.Module, form: str) -> list[float]:
    gen = torch.Generator().manual_seed(1)
    optimizer, found = torch.optim.AdamW(model.parameters(), 1e-2), []
    for rows in (8, 8, 7):
        x = torch.randn(rows, 12, generator=gen, dtype=torch.float64)
        loss = LOSSES[form](model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    with torch.no_grad():
        found += [float(own.sum()) for own in tree_leaves(model.eval()(x[:5]))]
    return [*found, sum(float(p.detach().double().pow(2).sum()) for p in model.parameters())]


def made(form: str, stops: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Encoder(form, stops).double()


def same(degrees: dict[str, int] | None) -> None:
    """None: forward stops the trace."""
    options: Any = {"plan": ap.Plan.uniform(**degrees)} if degrees else {}
    for form in LOSSES.keys() - ({"penalty"} if degrees == PP2 else set()):  # it is one block
        want = trained(made(form), form)
        got = trained(ap.parallelize(made(form, not degrees), **options), form)
        assert all(abs(a - b) < 1e-10 for a, b in zip(got, want, strict=True)), (form, got, want)


def claim_replicas_train_on_every_form() -> None:
    same(DP2)


def slow_claim_pipelines_train_on_every_form() -> None:
    same(PP2)


def slow_claim_untraced_models_train_on_every_form() -> None:
    same(None)


def slow_claim_tensor_parallelism_and_zero_train_on_every_form() -> None:
    same(TP2)
    same(ZERO3)


def claim_a_mean_of_some_rows_is_refused_where_nothing_is_traced() -> None:
    model = ap.parallelize(made("output, mean of some", True))
    said = refused(lambda: trained(model, "output, part"))
    assert "cannot be shared out" in said and "rows apart" in said, said


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


@pytest.mark.parametrize("form", LOSSES)
def test_what_has_all_learn_is_the_loss(form: str) -> None:
    named = take_outputs(made(form)(torch.ones(8, 12, dtype=torch.float64)))[1]
    assert ("loss" in named) == (form in INSIDE)
