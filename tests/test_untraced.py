"""Models that cannot be traced: replicas of the module as it is, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import autopar_torch as ap
import claims
from autopar_torch.errors import PlanError

TP2 = {"tp": 2}
PP2 = {"pp": 2, "num_micro_batches": 2}
ZERO3 = {"dp": 2, "zero": 3}


ASKED = {"tp": 2, "num_micro_batches": 2, "recompute": True, "precision": "bfloat16"}


def _near(a: Tensor | float, b: Tensor | float, tolerance: float = 1e-5) -> bool:
    a, b = torch.as_tensor(a).detach().double(), torch.as_tensor(b).detach().double()
    return float((a - b).abs().max()) <= tolerance * max(1e-3, float(b.abs().max()))


class Branching(nn.Module):
    """Looks at data while it runs, so it cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return self.a(x).sum()
        return (self.a(x)[:, 0] - y).square().mean()


def claim_a_model_that_cannot_be_exported_trains_and_says_why() -> None:
    torch.manual_seed(0)
    plain = Branching()
    model = ap.parallelize(Branching(), plan=ap.Plan.uniform(dp=2))
    model.module.load_state_dict(plain.state_dict())
    x, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.arange(5.0)
    loss, want = model(x, y), plain(x, y)
    loss.backward()
    want.backward()
    assert _near(loss, want) and _near(model.module.a.weight.grad, plain.a.weight.grad)
    assert "x.sum() > 1e9" in model.fallback_reason


class Recording(Branching):
    """Keeps the largest value that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.max())
        return super().forward(x, y)


class Together(Branching):
    """Every row looks at all rows."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.softmax(0), y)


class Second(Branching):
    """Has its rows in the second dim, and a place for each of 5 in the first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + torch.arange(5.0)[:, None], y)


def claim_rows_that_depend_on_each_other_are_not_shared_out() -> None:
    x, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.arange(5.0)
    for kind, said in ((Together, "the loss of few rows"), (Recording, "buffer largest"),
                       (Second, "4 of 5 rows alone do not run")):
        model = ap.parallelize(kind(), plan=ap.Plan.uniform(dp=2))
        before = torch.get_rng_state()
        with pytest.raises(PlanError, match=said):
            model(x, y)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(not b.any() for b in model.module.buffers())


class _Branches(nn.Linear):
    """Cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum() if x.sum() > 1e9 else super().forward(x).mean()


def test_the_plan_of_an_untraceable_model_says_what_is_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parallel = ap.parallelize(_Branches(4, 4), constraints=ASKED)
    parallel(torch.ones(4, 4)).backward()
    assert parallel.fallback_reason
    assert parallel.plan.num_micro_batches == 1 and parallel.plan.precision == "float32"
    assert not parallel.plan.replicas[0].stages[0].recompute
    assert "cannot be traced: precision, num_micro_batches, recompute" in caplog.text


def test_an_untraceable_model_gets_its_weights(tmp_path: Path) -> None:
    given = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    save_file(given, str(tmp_path / "own.safetensors"))
    parallel = ap.parallelize(_Branches(4, 4), weights=tmp_path)
    parallel(torch.ones(4, 4))
    assert parallel.fallback_reason
    assert all(torch.equal(parallel.state_dict()[n], v) for n, v in given.items())


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
