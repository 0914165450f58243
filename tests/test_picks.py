"""Sizes that depend on the data: what reads them is one op, up to values of known sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.errors import TraceError
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from nets import DP2, PP2, TP2, ZERO3, near, refused


class Finding(nn.Module):
    """A small detector: scores of classes and boxes, and a loss of what is picked."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.scores, self.boxes = nn.Linear(16, 4), nn.Linear(16, 4)
        self.loss = loss

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        h = self.body(x)
        return self.loss(self, h, self.scores(h), self.boxes(h), t, y)


def _mean(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    found = t > 0
    return F.smooth_l1_loss(b[found], y[found]) + F.cross_entropy(s[t != 2], t[t != 2])


def _through_a_layer(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    found = t > 1
    made = h.clone()
    made[found] = m.experts[0](h[found])
    return F.mse_loss(m.boxes(made), y) + F.mse_loss(m.scores(h[found]), y[found])


def _by_experts(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    made, mine = torch.zeros_like(h), h.argmax(-1) % 2
    for number, expert in enumerate(m.experts):
        (places,) = torch.where(mine == number)
        made = made.index_add(0, places, torch.tanh(expert(h[places])))
    return F.mse_loss(m.boxes(made), y)


def _numbers(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    found = b[t > 0]
    off = (found - y[t > 0]).abs().sum()
    return off / found.shape[0] + off / max(1, found.numel()) + (b * y)[y > 0].sum() / (y > 0).sum()


def _labels(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    known = torch.where(t == 1, -100, t)
    return F.cross_entropy(s[t != 2], known[t != 2]) + F.nll_loss(
        s[t != 0].log_softmax(-1), t[t != 0], reduction="sum")


def _places(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    places = (t > 0).nonzero().squeeze(1)
    (others,) = torch.where(t == 0)
    return F.l1_loss(b[places], y[places]) + b[others].mean() + b.masked_select(y > 0).mean()


def _without_gradients(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        share, own = y[t > 0].mean(), b[t > 0].square().sum()
    return F.mse_loss(b, y) * share + own + s.mean()


def _by_what_is_learnt(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    found = h.sum(-1) > 0
    return (b[found] - y[found]).square().sum() + s.sum()


def _written_in_turn(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    nearest = torch.full_like(b, 9.0)
    for number in range(3):
        far = (b - number).square()
        nearer = far < nearest
        nearest[nearer] = far[nearer]
    return nearest.mean()


def _hardest(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(s, t, reduction="none")
    weight = torch.arange(1.0, 5.0, dtype=s.dtype)
    return (b.sum() / m.scores(h)[h.sum(-1) < 9].numel() + each[each > 1.0].mean()
            + b[t > 0].std() + F.cross_entropy(s[t != 2], t[t != 2], weight=weight))


def _centers(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    loss = s.mean() + b[t.unique()].sum()
    for kind in range(4):
        own = b[t == kind]
        loss = loss + (own - own.mean(0)).square().sum()
    return loss + b[t > 1].mean(0).square().sum() + torch.cat([b[t > 2], b]).max(0).values.sum()


EACH = {"a mean": _mean, "a layer": _through_a_layer, "experts": _by_experts, "numbers": _numbers,
        "labels": _labels, "places": _places, "no gradients": _without_gradients,
        "learnt": _by_what_is_learnt}


def batch(seed: int, rows: int = 8) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 8, generator=draw, dtype=torch.float64),
            torch.randint(0, 4, (rows,), generator=draw),
            torch.randn(rows, 4, generator=draw, dtype=torch.float64))


def _steps(model: Any, batches: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for given in batches:
        loss = model(*given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def _as_alone(loss: Callable[..., Tensor], *plans: dict[str, Any] | None) -> None:
    batches = [batch(0), batch(1), batch(3, 6)]
    plain = Finding(loss).double()
    start = copy.deepcopy(plain)
    want = _steps(plain, batches)
    for degrees in plans:
        plan = None if degrees is None else ap.Plan.uniform(**degrees)
        model = ap.parallelize(copy.deepcopy(start), plan=plan)
        got = _steps(model, batches)
        assert not model.fallback_reason, (loss.__name__, degrees, model.fallback_reason)
        assert all(near(a, b, 1e-9) for a, b in zip(got, want, strict=True)), (
            loss.__name__, degrees)


def claim_what_is_picked_counts_as_in_one_process() -> None:
    for loss in (_mean, _through_a_layer, _numbers):
        _as_alone(loss, DP2, PP2)
    _as_alone(_by_experts, TP2)


def slow_claim_what_is_picked_counts_as_in_one_process_under_each_plan() -> None:
    for loss in EACH.values():
        _as_alone(loss, DP2, ZERO3, TP2, PP2, {**PP2, "recompute": True},
                  {**PP2, "num_micro_batches": 3}, {"dp": 2, "num_micro_batches": 2})
    _as_alone(_mean, None, {**PP2, "schedule": "zero_bubble"})


def claim_what_depends_on_all_that_is_picked_sees_the_whole_batch() -> None:
    _as_alone(_hardest, DP2, TP2, {"pp": 2})
    _as_alone(_written_in_turn, TP2, {"pp": 2})
    _as_alone(_centers, DP2, {"pp": 2})
    model = ap.parallelize(Finding(_hardest).double(), plan=ap.Plan.uniform(**PP2))
    assert "statistics of the whole batch" in refused(lambda: model(*batch(0)))


def claim_nothing_may_be_picked() -> None:
    for degrees in (DP2, PP2):
        plan, (x, t, y) = ap.Plan.uniform(**degrees), batch(0)
        for loss in (_by_experts, _through_a_layer, _mean):
            plain = Finding(loss).double()
            model = ap.parallelize(Finding(loss).double(), plan=plan, guards=ap.Guards(nan=False))
            for given in ((x, t, y), (x, torch.zeros_like(t), y)):
                got, want = model(*given), plain(*given)
                assert near(got, want, 1e-9) or (got.isnan() and want.isnan()), (degrees, loss)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


def _returned(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    return b[t > 0]


def _dropped(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    return F.dropout(b[t > 0], 0.5).sum()


def _written(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    view = b.view(-1)
    b[t > 0] = y[t > 0] * 2
    return view.sum()


def _written_later(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    h = h.clone()
    found = h[t > 0]
    h.mul_(2)
    return m.boxes(found).square().mean() + h.mean()


def _under_autocast(m: Finding, h: Tensor, s: Tensor, b: Tensor, t: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.mse_loss(m.boxes(h[t > 0]), y[t > 0])


@pytest.mark.parametrize("loss", [_under_autocast, _returned, _dropped, _written, _written_later])
def test_what_cannot_be_one_op_says_where(loss: Callable[..., Tensor]) -> None:
    call, _ = take_apart(batch(0), {})
    with pytest.raises(TraceError, match="a size depends on the data") as told:
        trace(Finding(loss).double(), call)
    assert "test_picks.py" in told.value.where
