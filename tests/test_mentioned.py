"""What forward and the loss read that is no part of the model: followed, or refused by name."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.errors import PlanError

PLANS: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"pp": 2}]


class Missing:
    """A package that is not installed."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"there is no {name}")


missing, criterion = Missing(), nn.CrossEntropyLoss()
given = nn.Parameter(torch.ones(3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        if re.sub(r"\d", "", "a1") == "b" or sys.flags.quiet or sys.version_info < (3, 8):
            missing.nothing()
        scores: Tensor = self.net(x)
        return scores


class Inside(Net):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        loss: Tensor = criterion(self.net(x), target)
        return loss


class Reading(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * given


class Shuffled(Net):
    """It holds texts in another order on each rank, as one that was made of a set does; it has a
    `parameters` of its own; and it makes a tensor of a list as long as the batch."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.texts = texts

    def parameters(self) -> Iterator[nn.Parameter]:  # type: ignore[override]
        return super().parameters()

    def forward(self, x: Tensor) -> Tensor:
        scores = F.dropout(self.net(x), 0.0) * (torch.tensor([1.0] * len(x)).sum() + torch.rand(()))
        return scores * len(self.texts)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(scores, target)
        self.mean.mul_(0.9).add_(loss.detach())
        return loss / self.mean


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.scale * scores, target)


def losses(model: Callable[..., Tensor], parameters: Any,
           weighted: nn.CrossEntropyLoss) -> list[float]:
    """Of three steps, after each of which the loss is another."""
    found, optimizer = [], torch.optim.SGD(parameters, lr=0.1)
    weighted.weight, weighted.label_smoothing = torch.tensor([1.0, 2.0, 0.5]), 0.0
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        loss = model(torch.randn(8, 8, generator=draw),
                     target=torch.randint(3, (8,), generator=draw))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
        weighted.weight *= torch.tensor([2.0, 1.0, 1.0])
        weighted.label_smoothing = 0.1 * step
    return found


def claim_a_loss_keeps_its_weights_and_settings_and_they_are_followed() -> None:
    weighted, plain = nn.CrossEntropyLoss(weight=torch.ones(3)), Net()
    want = losses(lambda x, target: weighted(plain(x), target), plain.parameters(), weighted)
    for degrees in PLANS:
        model = ap.parallelize(Net(), plan=ap.Plan.uniform(**degrees), loss_fn=weighted)
        assert losses(model, model.parameters(), weighted) == pytest.approx(want, rel=1e-5)


def claim_so_are_those_of_a_module_that_forward_names() -> None:
    plain = Inside()
    criterion.weight = torch.ones(3)
    want = losses(plain, plain.parameters(), criterion)
    for degrees in PLANS:
        model = ap.parallelize(Inside(), plan=ap.Plan.uniform(**degrees))
        assert losses(model, model.parameters(), criterion) == pytest.approx(want, rel=1e-5)


def claim_what_no_plan_trains_or_keeps_alike_is_refused() -> None:
    learned, x, target = Learned(), torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
    held, refused = [learned], "a parameter of sizes ()"
    for loss_fn, words in ((learned, refused), (lambda *pair: held[0](*pair), refused),
                           (functools.partial(learned), refused),
                           (Counting(), "writes to loss_fn.mean")):
        for degrees in PLANS:
            model = ap.parallelize(Net(), plan=ap.Plan.uniform(**degrees), loss_fn=loss_fn)
            with pytest.raises(PlanError, match=re.escape(words)):
                model(x, target=target)
    with pytest.raises(PlanError, match="a parameter of sizes"):
        ap.parallelize(Reading(), plan=ap.Plan.uniform(dp=2))(x)


def claim_a_teacher_outside_may_have_parameters_that_learn_elsewhere() -> None:
    teacher = nn.Linear(3, 3)

    def distilled(scores: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(scores)
        bias = teacher.bias.detach() + target[:, None]
        return F.mse_loss(scores, wanted) + F.mse_loss(scores, bias)

    x, target = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    want: list[float] = []
    for degrees in (None, *PLANS):
        torch.manual_seed(1)
        teacher.reset_parameters()
        net = Net()
        model = ap.parallelize(net, plan=ap.Plan.uniform(**degrees), loss_fn=distilled) if (
            degrees) else lambda x, target, net=net: distilled(net(x), target)
        got = []
        for _ in range(2):
            got.append(float(model(x, target=target).detach()))
            with torch.no_grad():
                teacher.weight.mul_(2.0)
        want = want or got
        assert got == pytest.approx(want, rel=1e-5), degrees


def claim_texts_in_another_order_and_lists_as_long_as_the_batch_train() -> None:
    texts = ["a", "b"] if dist.get_rank() else ["b", "a"]
    x = torch.ones(8, 8)
    for degrees in PLANS:
        model = ap.parallelize(Shuffled(texts), plan=ap.Plan.uniform(**degrees))
        for _ in range(2):
            ratio = (model(x) / (2 * Net()(x))).detach()
            assert ((ratio > 8 - 1e-3) & (ratio < 9 + 1e-3)).all(), (degrees, ratio)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
