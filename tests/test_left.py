"""What forward leaves in attributes of modules is there after each call, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.errors import RunError

PLANS: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"pp": 2, "num_micro_batches": 2},
                               {"dp": 2, "zero": 3, "num_micro_batches": 2}]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        self.penalty, self.map = h.square().mean(), h.softmax(-1)
        return x + self.down(h)


class Net(nn.Module):
    """As llama2.c: the loss is left in an attribute, and none where there are no targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(8, 5)
        self.last_loss: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        self.last_loss = None if y is None else F.cross_entropy(x, y)
        return x


class WithLoss(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = super().forward(x, y)
        return out if self.last_loss is None else self.last_loss


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    rows = (8, 7, 8)[step]
    return torch.randn(rows, 8, generator=draw).double(), torch.randint(5, (rows,), generator=draw)


def trained(model: Any, module: Any, adds: bool) -> list[Tensor]:
    """Losses with penalties from attributes, what is looked at in between, and the weights."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), list[Tensor]()
    for step in range(3):
        out = model(*batch(step))
        penalties = [layer.penalty for layer in module.layers]
        loss = model.last_loss + sum(penalties) if adds else out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), model.last_loss.detach(), *(x.detach() for x in penalties)]
        model.eval()
        with torch.no_grad():
            found += [model(batch(0)[0]), module.layers[2].map]
        assert model.last_loss is None
        model.train()
    return found + [x.detach() for x in model.state_dict().values()]


def claim_numbers_that_are_left_are_those_of_the_batch_and_may_be_trained_with() -> None:
    plain = Net().double()
    want = trained(plain, plain, adds=True)
    for degrees in PLANS:
        module = Net().double()
        model = ap.parallelize(module, plan=ap.Plan.uniform(**degrees))
        assert not model.fallback_reason
        torch.testing.assert_close(trained(model, module, adds=True), want)


def claim_numbers_are_left_beside_a_loss_too() -> None:
    plain = WithLoss().double()
    want = trained(plain, plain, adds=False)
    for degrees in PLANS:
        module = WithLoss().double()
        model = ap.parallelize(module, plan=ap.Plan.uniform(**degrees))
        torch.testing.assert_close(trained(model, module, adds=False), want)


def claim_what_is_no_number_says_in_training_that_it_is_not_there() -> None:
    module = Net().double()
    model = ap.parallelize(module, plan=ap.Plan.uniform(dp=2))
    model(*batch(0))
    with pytest.raises(RunError, match=r"layers.1.map is left by forward"):
        module.layers[1].map + 1


def claim_what_forward_reads_before_it_writes_is_still_refused_a_trace() -> None:
    class Counting(Net):
        total = 0.0

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            out = super().forward(x, y)
            self.total = self.total + out.mean()
            return F.cross_entropy(out, y)  # type: ignore[arg-type]

    assert "total" in ap.parallelize(Counting().double(), batch(0), plan=ap.Plan.uniform(
        dp=2)).fallback_reason


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
