"""What Python decides by values of the batch: each answer has a trace of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.errors import TraceError
from autopar_torch.run import tracing
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from nets import DP2, PP2, TP2, ZERO3, counted, near


class Deciding(nn.Module):
    """`loss` asks something of the batch."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("warm", torch.tensor(False))
        self.loss, self.stack = loss, nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.loss(self, h, t)


def _if_any(m: Deciding, h: Tensor, t: Tensor) -> Tensor:
    found, loss = t > 1, m.c(h).logsumexp(-1).mean()
    if found.any():
        loss = loss + F.cross_entropy(m.c(h)[found], t[found])
    return loss


def _if_number(m: Deciding, h: Tensor, t: Tensor) -> Tensor:
    num = (t > 1).sum().item()
    if num == 0:
        return m.c(h).sum() * 0
    return F.cross_entropy(m.c(h), t, reduction="sum") / (num if num > 3 else 2 * num)


def _if_picked(m: Deciding, h: Tensor, t: Tensor) -> Tensor:
    places = (t > 1).nonzero().squeeze(1)
    return m.c(h[places]).square().mean() if len(places) else h.mean()


def _in_layers(m: Deciding, h: Tensor, t: Tensor) -> Tensor:
    for number, layer in enumerate(m.stack):
        if (t > 1).any() and not bool((t == number).all()):
            h = h + torch.tanh(layer(h))
    return m.c(h).square().mean()


def _if_warm(m: Deciding, h: Tensor, t: Tensor) -> Tensor:
    return m.c(h).square().mean() if m.warm else h.square().mean() + m.c(h).mean()


def _cannot_be_traced(m: Deciding, h: Tensor, t: Tensor) -> Tensor:
    if (t > 3).any():
        h = torch.tensor(h.tolist())
    return m.c(h).mean()


EACH = (_if_any, _if_number, _if_picked, _in_layers, _if_warm, _cannot_be_traced)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Both answers, by turns."""
    found = []
    for seed, high in enumerate((4, 2, 4, 2, 1)):
        draw = torch.Generator().manual_seed(seed)
        found.append((torch.randn(8, 8, generator=draw, dtype=torch.float64),
                      torch.randint(0, high, (8,), generator=draw)))
    return found


def _steps(model: Any, module: Deciding) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number, given in enumerate(batches()):
        module.warm.fill_(number > 2)
        loss = model(*given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            losses += [loss.detach(), model.eval()(*given)]
        model.train()
    return [*losses, *model.state_dict().values()]


def _as_alone(loss: Callable[..., Tensor], *plans: dict[str, Any]) -> None:
    plain = Deciding(loss).double()
    want = _steps(plain, plain)
    for degrees in plans:
        module = Deciding(loss).double()
        model = ap.parallelize(module, plan=ap.Plan.uniform(**degrees))
        got = _steps(model, module)
        assert not model.fallback_reason, (loss.__name__, degrees, model.fallback_reason)
        assert all(near(a, b, 1e-9) for a, b in zip(got, want, strict=True)), (
            loss.__name__, degrees)


def claim_values_of_the_batch_decide_as_in_one_process() -> None:
    for loss in (_if_number, _in_layers):
        _as_alone(loss, DP2, TP2)
    _as_alone(_if_any, PP2)


def slow_claim_values_of_the_batch_decide_as_in_one_process_under_each_plan() -> None:
    for loss in EACH:
        _as_alone(loss, DP2, ZERO3, TP2, {"pp": 2}, {"dp": 2, "num_micro_batches": 2})


def claim_each_answer_is_traced_once() -> None:
    module = Deciding(_if_any).double()
    model = ap.parallelize(module, plan=ap.Plan.uniform(**DP2))
    model(*batches()[0])
    with counted(model) as times:
        for _ in range(3):
            for given in batches():
                model(*given)
    assert times == [1], times


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


def _if_learnt(m: Deciding, h: Tensor, t: Tensor) -> Tensor:
    return m.c(h).mean() if h.mean() > 0 else h.mean()


def _by_chance(m: Deciding, h: Tensor, t: Tensor) -> Tensor:
    return m.c(h).mean() if torch.rand(()) > 0.5 else h.mean()


def _after_a_write(m: Deciding, h: Tensor, t: Tensor) -> Tensor:
    m.warm.logical_not_()
    return m.c(h).mean() if m.warm else h.mean()


def _after_a_write_to_a_view(m: Deciding, h: Tensor, t: Tensor) -> Tensor:
    m.warm.view(-1).logical_not_()
    return m.c(h).mean() if m.warm else h.mean()


@pytest.mark.parametrize("loss", [_if_learnt, _by_chance, _after_a_write, _after_a_write_to_a_view])
def test_what_is_not_known_before_the_batch_runs_is_refused(loss: Callable[..., Tensor]) -> None:
    call, _ = take_apart(batches()[0], {})
    with pytest.raises(TraceError, match="data-dependent") as told:
        trace(Deciding(loss).double(), call)
    assert "test_decisions.py" in told.value.where


def _for_ever(m: Deciding, h: Tensor, t: Tensor) -> Tensor:
    while (t < 40).any():
        t, h = t + 1, h + 1
    return m.c(h).mean()


def test_a_loop_that_values_end_is_refused() -> None:
    model = Deciding(_for_ever).double()
    call, tensors = take_apart(batches()[0], {})
    own = tracing.tracer(model, torch.device("cpu"), None, "float32", False)
    with pytest.raises(TraceError, match="data-dependent"):
        tracing.for_batch(own, {}, call, tensors, True, ("loss",))
