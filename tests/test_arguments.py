"""Claims about what forward does to its arguments, and about the names of what it returns."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.errors import AutoparError

PLANS = {"tp2": ap.Plan.uniform(tp=2), "pp2": ap.Plan.uniform(pp=2), "dp2": ap.Plan.uniform(dp=2)}


class Net(nn.Module):
    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
        self.does = does

    def forward(self, *given: Any) -> Any:
        return self.does(self.net, *given)


def _x() -> Tensor:
    return torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


def _normed(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    batch["x"] = batch["x"] - 0.5
    return net(batch["x"])


def _kept(net: nn.Module, x: Tensor, kept: list[Tensor]) -> Tensor:
    kept.append(net(x))
    return kept[0]


def claim_what_forward_puts_into_an_argument_is_refused() -> None:
    cases: list[tuple[Any, tuple[Any, ...]]] = [(_normed, ({"x": _x()},)), (_kept, (_x(), []))]
    for does, given in cases:
        for plan in PLANS.values():
            with pytest.raises(AutoparError, match="forward changes its argument"):
                ap.parallelize(Net(does), plan=plan)(*given)


def claim_an_argument_may_be_emptied_and_returned() -> None:
    def does(net: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        y = batch.pop("y")
        batch["loss"] = F.mse_loss(net(batch["x"]), y)
        return batch

    for plan in PLANS.values():
        loss = ap.parallelize(Net(does), plan=plan)({"x": _x(), "y": _x().cos()})["loss"]
        torch.testing.assert_close(loss.detach(), Net(does)({"x": _x(), "y": _x().cos()})["loss"])


def claim_the_look_at_the_first_step_leaves_the_batch_alone() -> None:
    for plan in PLANS.values():
        model, x = ap.parallelize(Net(lambda net, x: net(x.mul_(2))), plan=plan), _x()
        got = model(x)
        got.square().mean().backward()
        torch.testing.assert_close(x, _x())
        torch.testing.assert_close(got.detach(), Net(lambda net, x: net(2 * x))(x))


def claim_the_look_at_the_first_step_sees_a_tensor_that_is_given_twice() -> None:
    model, x = ap.parallelize(Net(lambda net, x, y: net(x.mul_(2)) + y), plan=PLANS["dp2"]), _x()
    with pytest.raises(AutoparError, match="off by"):
        model(x, x)


def claim_a_named_tuple_may_be_made_in_forward() -> None:
    def does(net: nn.Module, x: Tensor) -> Any:
        made = namedtuple("made", ["first", "second"])  # a class of its own for each call
        return made(net(x), net(2 * x))

    for plan in PLANS.values():
        found = ap.parallelize(Net(does), plan=plan)(_x())
        for got, want in zip(found, Net(does)(_x()), strict=True):
            torch.testing.assert_close(got.detach(), want)
        assert found.second is found[1] and type(found).__name__ == "made"


def claim_names_of_outputs_may_clash() -> None:
    def does(net: nn.Module, x: Tensor) -> Any:
        return {"a.0": net(x), "a": [net(2 * x)]}

    for plan in PLANS.values():
        found, want = ap.parallelize(Net(does), plan=plan)(_x()), Net(does)(_x())
        torch.testing.assert_close(found["a.0"].detach(), want["a.0"])
        torch.testing.assert_close(found["a"][0].detach(), want["a"][0])


class Codebook(nn.Module):
    """Moves its buffers by what gradients flow through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8)).double()
        self.register_buffer("sums", torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        self.sums.data.mul_(0.9).add_(h.sum(0), alpha=0.1)
        return (h * self.sums).square().mean()


def claim_buffers_are_moved_through_data() -> None:
    for plan in PLANS.values():
        plain = Codebook()
        model = ap.parallelize(copy.deepcopy(plain), plan=plan)
        for _ in range(2):
            for own in (plain, model):
                own.zero_grad()
                own(_x()).backward()
                torch.optim.SGD(own.parameters(), lr=0.1).step()
        torch.testing.assert_close(dict(model.state_dict()), plain.state_dict())


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
