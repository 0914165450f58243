"""What forward keeps for its next call: tables that depend on sizes alone, or it is refused."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar_torch as ap
import claims
from autopar_torch.errors import TraceError
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from nets import ALL, near


class Keeping(nn.Module):
    """Adds what `table` gives for its input; the rest is two linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x) + self.table(x)))

    def table(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def ramp(x: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.empty(x.shape[-1], device=x.device)
        out.copy_(torch.arange(x.shape[-1]) * 0.1)
        return out


class AsAttribute(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = ramp(x)
        return self.kept


class AsRegistered(Keeping):
    """As models of rotary embeddings do it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ramp", None, persistent=False)

    def table(self, x: Tensor) -> Tensor:
        if self.ramp is None or self.ramp.shape[-1] < x.shape[-1]:
            self.register_buffer("ramp", ramp(x), persistent=False)
        return self.ramp[: x.shape[-1]]


class AsAssigned(AsRegistered):
    def table(self, x: Tensor) -> Tensor:
        if self.ramp is None:
            self.ramp = ramp(x)
        return self.ramp


class AsNew(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if not hasattr(self, "ramp"):
            self.register_buffer("ramp", ramp(x), persistent=False)
        return self.ramp


class AsMoved(Keeping):
    """As CLIP moves its mask to the type and the device of what it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.ramp = torch.arange(8, dtype=torch.float64) * 0.1

    def table(self, x: Tensor) -> Tensor:
        self.ramp = self.ramp.to(dtype=x.dtype, device=x.device)
        return self.ramp


class BySize(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {}

    def table(self, x: Tensor) -> Tensor:
        if x.shape[-1] not in self.kept:
            self.kept[x.shape[-1]] = ramp(x), ramp(x).cos()
        return sum(self.kept[x.shape[-1]])  # type: ignore[return-value]


@functools.lru_cache
def cached_ramp(size: int) -> Tensor:
    return torch.arange(size) * 0.1


class Cached(Keeping):
    def table(self, x: Tensor) -> Tensor:
        return cached_ramp(x.shape[-1])


RIGHT = [AsAttribute, AsRegistered, AsAssigned, AsNew, AsMoved, BySize, Cached]


def slow_claim_tables_that_forward_keeps_are_those_of_one_process() -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for kind, degrees in [(kind, degrees) for kind in RIGHT for degrees in ALL]:
        model, plain = ap.parallelize(kind(), plan=ap.Plan.uniform(**degrees)), kind()
        for _ in range(2):
            loss, want = model.train()(x).square().mean(), plain.train()(x).square().mean()
            loss.backward()
            want.backward()
            assert near(loss, want), (kind, degrees)
            with torch.no_grad():
                assert near(model.eval()(x), plain.eval()(x)), (kind, degrees)
        assert near(model.state_dict()["a.weight"], plain.a.weight), (kind, degrees)


def traced(model: nn.Module, rows: int = 6) -> None:
    trace(model, take_apart((torch.zeros(rows, 8),), {})[0])


@pytest.mark.parametrize("kind", RIGHT)
def test_a_trace_leaves_nothing_of_itself_in_the_model(kind: type[Keeping]) -> None:
    model, x = kind(), torch.randn(3, 8)
    before = copy.deepcopy(vars(model))
    traced(model)
    assert repr(vars(model)) == repr(before)
    want = model.b(torch.relu(model.a(x) + model.table(x)))
    traced(model)
    assert near(model(x), want), "what was kept before is as it was"


class Random(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.randn(8)
        return self.kept


class Fading(Keeping):
    def table(self, x: Tensor) -> Tensor:
        self.kept = ramp(x) if self.kept is None else self.kept * 0.9
        return self.kept


class FadingFromTheStart(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.arange(8) * 0.1

    def table(self, x: Tensor) -> Tensor:
        self.kept = self.kept.float() * 0.9
        return self.kept


class OfInputs(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = x.detach().mean()
        return self.kept


class OfParameters(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.a.bias.detach() * 2
        return self.kept


class OfParametersInEval(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept = None
            return self.a.bias * 2
        if self.kept is None:
            self.kept = self.a.bias * 2
        return self.kept


class Saved(Keeping):
    """It would be in the state_dict after the first forward."""

    def __init__(self) -> None:
        super().__init__()
        del self.kept
        self.register_buffer("kept", None)

    def table(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = ramp(x)
        return self.kept


class OfRows(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(x.shape[0])[:, None] * 0.1
        return self.kept


class OnlyOnce(Keeping):
    """What comes first is computed in another way."""

    def table(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = ramp(x)
            return self.kept * 2
        return self.kept


def claim_what_evaluation_keeps_of_parameters_follows_them() -> None:
    """As LeViT keeps its biases."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for degrees in ALL:
        model, plain = ap.parallelize(OfParametersInEval(), plan=ap.Plan.uniform(
            **degrees)), OfParametersInEval()
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
        for _ in range(2):
            losses = [m.train()(x).square().mean() for m in (model, plain)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                assert near(*losses) and near(model.eval()(x), plain.eval()(x)), degrees


@pytest.mark.parametrize("kind", [Random, Fading, FadingFromTheStart, OfInputs, OfParameters,
                                  OfRows, OnlyOnce, Saved])
def test_other_things_that_forward_keeps_are_refused(kind: type[Keeping]) -> None:
    model = kind()
    before = model.kept
    with pytest.raises(TraceError, match=r"forward changes the model\.kept"):
        traced(model)
    assert model.kept is before


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
