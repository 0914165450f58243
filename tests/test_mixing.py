"""Whether a batch may be shared out, where its rows meet: so that each sees all of them."""

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
from nets import DP2, TP2, batch, near


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
    "half flipped": lambda x: 0.7 * x + 0.3 * x.flip(0),
    "pairs that are counted": lambda x: x / (x[:, :1] > x[:, 0]).sum(1).clamp(min=5)[:, None],
    "row number": lambda x: x + torch.arange(x.shape[0], dtype=x.dtype)[:, None],
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "minus the mean": lambda x: x - x.mean(0),
    "sort within": lambda x: x.sort(1).values,
    "roll within": lambda x: x.roll(1, 1),
    "pick": lambda x: x[torch.arange(x.shape[0]), x.argmax(1)][:, None].expand(-1, 8),
    "squeeze": lambda x: x[:, :1].sort(1).values.squeeze()[:, None] + x,
    "one hot": lambda x: F.one_hot(x.argmax(1), 8).float(),
}


class Experts(nn.Module):
    """Sorts tokens by their expert; with a capacity, an expert takes the first few of the batch."""

    def __init__(self, capacity: float = 0, balance: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.head, self.balance = nn.Linear(8, 3), nn.Linear(8, 4), balance
        self.own, self.capacity = nn.Parameter(torch.randn(3, 8, 8)), capacity

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        odds = self.gate(x).softmax(-1)
        weight, expert = odds.max(-1)
        order = expert.argsort()
        done = torch.bmm(x[order][:, None], self.own[expert[order]])[:, 0][order.argsort()]
        if self.capacity:
            place = F.one_hot(expert, 3).cumsum(0).gather(1, expert[:, None])
            most = self.capacity if self.capacity >= 1 else int(len(x) * self.capacity)
            done = done * (place <= most)
        loss = F.cross_entropy(self.head(x + weight[:, None] * done), y)
        return loss + self.balance * odds.mean(0).square().sum() if self.balance else loss


def claim_experts_that_sort_tokens_are_shared_out_exactly() -> None:
    for degrees in (DP2, TP2 | {"num_micro_batches": 4}):
        plain = Experts()
        model = ap.parallelize(Experts(), plan=ap.Plan.uniform(**degrees))
        loss, want = model(*batch()), plain(*batch())
        loss.backward()
        want.backward()
        assert near(loss, want)
        assert near(model.module.own.grad, plain.own.grad), degrees
        assert "sort" in " ".join(model.graph.tested)


def claim_experts_with_a_capacity_and_a_loss_of_all_rows_are_done_together() -> None:
    """No random batch of a few rows fills a capacity: one token everywhere does, of enough rows."""
    for options in {"capacity": 2}, {"capacity": 5}, {"capacity": 0.4}, {"balance": 0.5}:
        plain = Experts(**options)
        model = ap.parallelize(Experts(**options), plan=ap.Plan.uniform(**DP2))
        loss, want = model(*batch()), plain(*batch())
        loss.backward()
        want.backward()
        assert near(loss, want), options
        assert near(model.module.gate.weight.grad, plain.gate.weight.grad), options
        assert near(model.module.own.grad, plain.own.grad), options


def claim_a_loss_of_all_rows_may_be_told_to_look_at_those_of_a_part() -> None:
    allowed = ap.parallelize(Experts(balance=0.5), plan=ap.Plan.uniform(**DP2),
                             constraints={"batch_statistics": "local"})
    plain, (x, y) = Experts(balance=0.5), batch()
    half = len(x) // 2
    want = (plain(x[:half], y[:half]) * half + plain(x[half:], y[half:]) * (len(x) - half)) / len(x)
    loss = allowed(x, y)
    loss.backward()
    want.backward()
    assert near(loss, want) and near(allowed.module.gate.weight.grad, plain.gate.weight.grad)


def claim_a_batch_that_is_mixed_before_any_parameter_is_that_of_all_rows() -> None:
    for name, mix in {**MIXES, **APART}.items():
        for degrees in (DP2, TP2 | {"num_micro_batches": 4}):
            torch.manual_seed(0)
            plain = Mixing(mix)
            model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**degrees))
            loss, want = model(*batch()), plain(*batch())
            loss.backward()
            want.backward()
            assert near(loss, want), (name, degrees)
            assert near(model.module.head.weight.grad, plain.head.weight.grad), (name, degrees)


class Graph(nn.Module):
    """Its edges are numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        h = torch.zeros_like(h).index_add_(0, edges[1], h[edges[0]])
        return F.cross_entropy(self.b(torch.relu(h)), y)


def slow_claim_a_plan_is_found_for_a_graph() -> None:
    x, y = batch(14)
    edges = torch.randint(14, (2, 24), generator=torch.Generator().manual_seed(1))
    assert near(ap.parallelize(Graph())(x, edges, y), Graph()(x, edges, y))


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


def test_large_experts_are_tried_small() -> None:
    with torch.device("meta"):
        model = Experts()
        model.own = nn.Parameter(torch.empty(4096, 4096, 4096))
        model.gate, model.head = nn.Linear(4096, 4096), nn.Linear(4096, 4)
    example = (torch.empty(2, 4096), torch.empty(2, dtype=torch.int64))
    graph = api.case(model, example, "8xH100").graph
    assert graph.tested and not graph.coupled


class Attends(nn.Module):
    """The gradient of the bias of its keys is zero, but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 2, 4, 8)
        odds = (self.query(x) @ self.key(x).mT).softmax(-1)
        return (odds @ x).sum((1, 2, 3)) if odds.detach().numpy().size else x


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attends()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.inner(x) - y).square().mean()


def test_a_gradient_of_zero_may_come_out_as_any_noise() -> None:
    example = (torch.randn(4, 64), torch.randn(4))
    graph = api.case(Around(), example, "8xH100").graph
    assert graph.tested and not graph.coupled


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
