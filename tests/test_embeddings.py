"""Tables of embeddings, with all that `torch.nn` lets one ask of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar_torch as ap
import claims
from nets import ALL, DP2, PP2, TP2, near, refused


class Words(nn.Module):
    """The mean of a row's embeddings, and a linear layer."""

    def __init__(self, bag: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = (nn.EmbeddingBag if bag else nn.Embedding)(20, 8, **options)
        self.out, self.bag = nn.Linear(8, 4), bag

    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids)
        return self.out(torch.tanh(found if self.bag else found.mean(1)))


def ids(seed: int = 0) -> Tensor:
    """Some of them are there often, and not in equal numbers in all rows."""
    return torch.randint(1, 9, (8, 5), generator=torch.Generator().manual_seed(seed))


def differs(degrees: dict[str, Any], **options: Any) -> bool:
    """Whether three steps and an evaluation are not those of one process."""
    model, plain = ap.parallelize(Words(**options), plan=ap.Plan.uniform(**degrees)), Words(
        **options)
    same = []
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, plain)]
    for seed in range(3):
        losses = [m.train()(ids(seed)).square().mean() for m in (model, plain)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            same += [near(*losses), near(model.eval()(ids(9)), plain.eval()(ids(9)))]
    return not all(same)


def slow_claim_tables_and_bags_are_split_exactly() -> None:
    asked: list[dict[str, Any]] = [
        {"bag": True}, {"bag": True, "mode": "sum"}, {"bag": True, "mode": "max"},
        {"padding_idx": 3}, {"bag": True, "padding_idx": 3}, {"sparse": True},
        {"bag": True, "sparse": True}]
    wrong = [(options, degrees) for options, degrees in itertools.product(asked, ALL)
             if differs(degrees, **options)]
    assert not wrong, wrong


def claim_gradients_that_depend_on_all_ids_are_not_shared_out() -> None:
    for degrees in (TP2, {"pp": 2}):
        assert not differs(degrees, scale_grad_by_freq=True), degrees
    for degrees, bag in itertools.product((DP2, PP2), (False, True)):
        said = refused(lambda d=degrees, b=bag: differs(d, bag=b, scale_grad_by_freq=True))
        assert "embedding" in said and "whole batch" in said, said


def claim_a_table_that_forward_rescales_is_refused_at_the_first_call() -> None:
    """Each rank would rescale what its own rows look up."""
    for degrees, reason in ((DP2, "would record the rows of one rank"), (TP2, "writes to a")):
        said = refused(lambda d=degrees: differs(d, max_norm=0.5))
        assert reason in said, said


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
