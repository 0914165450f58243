"""The loss is made outside of the model: losses, gradients and weights as in one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar_torch as ap
import claims
from autopar_torch.run import step
from nets import ALL, PP2, TP2, Net, batch, near, net, parallel, refused

Loss = Callable[[Any, int], Tensor]


class Heads(nn.Module):
    """Returns a dict: two heads, of which one leaves early, a number for all rows, an echo."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.early, self.head = nn.Linear(8, 4), nn.Linear(8, 4)
        self.heat = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        early = None
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            early = self.early(x) if early is None else early
        return {"early": early, "late": self.head(x), "heat": self.heat.exp() * torch.ones(1),
                "rows": x.shape[0]}


class Logits(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def trained(model: nn.Module, loss_of: Loss, calls: int = 4) -> list[Tensor]:
    """Losses, gradients and, at the end, weights; the last batch is smaller."""
    opt, found = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), []
    for number in range(calls):
        loss = loss_of(model, number)
        loss.backward()
        found += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
        found += [torch.tensor(-1.0) if p.grad is None else p.grad.norm()
                  for p in model.parameters()]
        opt.step()
        opt.zero_grad()
    return [*found, *model.state_dict().values()]


def same(kind: type[nn.Module], loss_of: Loss) -> None:
    want = trained(net(kind), loss_of)
    for degrees in ALL:
        got = trained(parallel(degrees, kind), loss_of)
        assert len(got) == len(want)
        assert all(near(a, b, 1e-4) for a, b in zip(got, want, strict=True)), degrees


def claim_a_criterion_of_the_output() -> None:
    def loss_of(model: Any, number: int) -> Tensor:
        x, y = batch(5 if number == 3 else 8, number)
        return F.cross_entropy(model(x), y, label_smoothing=0.1)

    same(Logits, loss_of)


def claim_two_forwards_before_one_backward() -> None:
    def loss_of(model: Any, number: int) -> Tensor:
        (x, y), (other, _) = batch(8, number), batch(6, 9)
        a, b = F.normalize(model(x), dim=-1), F.normalize(model(other), dim=-1)
        return F.cross_entropy(a @ b.t(), y.clamp(max=5)) + a.logsumexp(0).max()

    same(Logits, loss_of)


def slow_claim_every_call_may_use_other_outputs() -> None:
    def loss_of(model: Any, number: int) -> Tensor:
        x, y = batch(8, number)
        out = model(x)
        late = F.cross_entropy(out["late"] * out["heat"], y, reduction="sum") / out["rows"]
        early = F.cross_entropy(out["early"], y)
        return (late, early, late + 0.3 * early, late)[number]

    same(Heads, loss_of)


def slow_claim_the_same_model_with_labels_and_without() -> None:
    def loss_of(model: Any, number: int) -> Tensor:
        x, y = batch(8, number)
        model.train(number != 2)  # a backward in eval mode, too
        if number == 1:
            loss: Tensor = model(x, y)[1]
            return loss
        return F.cross_entropy(model(x)[0], y)

    same(Net, loss_of)


def slow_claim_gradients_add_up_and_an_unused_forward_leaves_nothing() -> None:
    def loss_of(model: Any, number: int) -> Tensor:
        (x, y), (other, z) = batch(8, number), batch(4, number + 7)
        (F.cross_entropy(model(other), z) / 2).backward()
        model(x)
        return F.cross_entropy(model(x), y) / 2

    same(Logits, loss_of)


def claim_another_gradient_on_one_rank_is_refused() -> None:
    for degrees in (TP2, PP2):
        model = parallel(degrees, Logits)
        loss = F.cross_entropy(model(batch()[0]), batch()[1]) * (1 + dist.get_rank())
        said = refused(loss.backward)
        assert "differ between ranks" in said, said


def claim_what_cannot_be_right_is_refused() -> None:
    model = parallel(PP2, outputs=("0",))
    logits, _ = model(*batch())
    assert "returns its loss" in refused(lambda: logits.sum().backward())
    for degrees in ALL:
        model = parallel(degrees, Logits)
        out = model(batch()[0])
        out.sum().backward()
        assert "already called" in refused(lambda z=out: z.sum().backward())
        out = model(batch()[0])
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert "changed between" in refused(lambda z=out: z.sum().backward()), degrees


class Featured(nn.Module):
    """Returns logits, and the features that they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.c(torch.relu(h)), h


def claim_a_gradient_at_an_output_that_another_is_made_of_is_refused() -> None:
    plain = net(Featured)
    for degrees in ALL:
        model, (x, _) = parallel(degrees, Featured), batch()
        for ask in (lambda o: torch.autograd.grad(o[0].sum() + o[1].sum(), o[1]),
                    lambda o: o[1].retain_grad(), lambda o: o[1].register_hook(torch.neg)):
            said = refused(lambda m=model, a=ask, x=x: a(m(x)))
            assert "output 1, of which 0 is made" in said, (degrees, said)
        for alone in (lambda o: o[1].clone(), lambda o: o[0]):
            found = [torch.autograd.grad((end := alone(out)).square().sum() + out[1].sum(), end)
                     for out in (model(x), plain(x))]
            assert near(*(grad for grad, in found)), degrees
    same(Featured, lambda model, number: sum(
        out.square().mean() for out in model(batch(seed=number)[0])))


def slow_claim_a_step_without_rows_for_a_replica() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees, Logits), net(Logits)
        for m in (model, plain):
            F.cross_entropy(m(batch(1)[0]), batch(1)[1]).backward()
        assert all(near(p.grad.norm(), q.grad.norm(), 1e-4) for p, q in zip(
            model.parameters(), plain.parameters(), strict=True)), degrees


def _averaged(model: Any) -> list[Tensor]:
    """Losses of a model and of two averages of its weights; a copy is trained apart from it."""
    model(*batch())
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
                AveragedModel(model, use_buffers=True)]
    opt, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(2):
        loss = model(*batch(8, number))[1]
        loss.backward()
        opt.step()
        opt.zero_grad()
        for average in averages:
            average.update_parameters(model)
            with torch.no_grad():
                found.append(average.eval()(*batch(8, 9))[1])
    twin = copy.deepcopy(model)
    twin(*batch())[1].backward()
    assert all(p.grad is None for p in model.parameters())
    return [*found, *(p.grad.norm() for p in twin.parameters()),
            *averages[0].module.state_dict().values()]


def slow_claim_a_copy_holds_its_own_parts_as_averages_need() -> None:
    want = _averaged(net())
    for degrees in ALL:
        got = _averaged(parallel(degrees))
        assert all(near(a, b, 1e-4) for a, b in zip(got, want, strict=True)), degrees


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


def test_the_costs_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    step._tell_costs.cache_clear()
    with caplog.at_level(logging.WARNING, "autopar_torch"):
        for _ in range(2):
            model = ap.parallelize(net(Logits))
            model(batch()[0])
            model(batch()[0])
    assert sum("loss_fn=" in record.message for record in caplog.records) == 1


def test_a_plan_keeps_all_micro_batches_where_the_loss_is_outside() -> None:
    found = ap.plan(net(Logits), (batch()[0],), "2x4xH100", constraints={"pp": 2}).plan
    assert found.schedule == "gpipe"
