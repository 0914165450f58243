"""Whether a batch may be shared out: not where its rows meet before any parameter."""

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
import zoo
from autopar_torch import api
from autopar_torch.model import TensorInfo
from autopar_torch.trace import apart
from nets import DP2, TP2, batch, near, refused


class Mixing(nn.Module):
    """A batch input that meets the rest of the batch before it meets a parameter."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.head = mix, nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.mix(x)), y)


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "attention over rows": lambda x: (x @ x.T).softmax(0) @ x,
    "sort": lambda x: x.sort(0).values,
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "row number": lambda x: x + torch.arange(x.shape[0], dtype=x.dtype)[:, None],
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "minus the mean": lambda x: x - x.mean(0),
    "sort within": lambda x: x.sort(1).values,
    "roll within": lambda x: x.roll(1, 1),
    "pick": lambda x: x[torch.arange(x.shape[0]), x.argmax(1)][:, None].expand(-1, 8),
    "one hot": lambda x: F.one_hot(x.argmax(1), 8).float(),
}


def claim_a_batch_that_is_mixed_before_any_parameter_is_not_shared_out() -> None:
    _refuse_mixes(list(MIXES)[:2])


def slow_claim_any_way_of_mixing_is_found() -> None:
    _refuse_mixes(list(MIXES)[2:])


def _refuse_mixes(names: list[str]) -> None:
    for name, mix in ((name, MIXES[name]) for name in names):
        for degrees in (DP2, TP2 | {"num_micro_batches": 2}):
            plan = ap.Plan.uniform(**degrees)
            said = refused(lambda m=mix, p=plan: ap.parallelize(Mixing(m), plan=p)(*batch()))
            assert "whole batch" in said, (name, said)


def claim_a_batch_that_is_not_mixed_is_shared_out_exactly() -> None:
    for name, mix in APART.items():
        for degrees in (DP2, TP2 | {"num_micro_batches": 4}):
            torch.manual_seed(0)
            plain = Mixing(mix)
            model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**degrees))
            assert near(model(*batch()), plain(*batch())), (name, degrees)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", claims.names(__name__, "slow_claim_"))
def test_on_2_ranks_slowly(name: str) -> None:
    claims.hold(__name__, name)


def test_asking_does_not_make_up_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama of 405B has more than any machine that plans for it holds."""
    made: list[tuple[int, ...]] = []
    before = apart.made_up

    def made_up(info: TensorInfo, *rest: Any) -> Tensor:
        made.append(tuple(info.shape))
        return before(info, *rest)

    monkeypatch.setattr(apart, "made_up", made_up)
    model, batch = zoo.build("llama"), zoo.batch("llama", 4, pad=True)
    api.case(model, batch, "8xH100")
    assert made and not {tuple(p.shape) for p in model.parameters()} & set(made)
