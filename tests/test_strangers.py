"""What models and loops of strangers ask of autograd, of rows, and of torch's own functions."""

from __future__ import annotations

import copy
import logging
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.find.following import Deed
from autopar_torch.run import world
from nets import ALL, DP2, PP2, TP2, ZERO3, Net, batch, near, net, parallel, refused, step


class WithMethod(Net):
    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x)[0], y)


def claim_a_method_that_trains_the_whole_module_is_told_of() -> None:
    said: list[logging.LogRecord] = []
    log, handler = logging.getLogger("autopar_torch"), logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    log.addHandler(handler)
    for call in (lambda model: model.training_step(*batch()), lambda model: model(*batch())[1]):
        model = parallel(DP2, WithMethod)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            call(model).backward()
            optimizer.step()
    log.removeHandler(handler)
    told = [own for own in said if "the model was never called" in own.getMessage()]
    assert len(told) == (world.start()[0] == 0), [own.getMessage() for own in said]


class Graph(nn.Module):
    """Nodes and their matrix: both have as many rows, and the matrix as many columns."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return F.log_softmax(edges @ self.late(F.relu(edges @ self.early(x))), 1)


def nodes(count: int) -> tuple[Tensor, Tensor]:
    made = torch.arange(count * 12.0).view(count, 12).cos()
    return made, (made @ made.T > 0).float() / count


def claim_a_graph_and_its_matrix_are_one_row() -> None:
    for degrees in (TP2, PP2, DP2, ZERO3, {"tp": 2, "num_micro_batches": 2}):
        plain = net(Graph)
        model = parallel(degrees, Graph)
        for count in (20, 20, 13):
            got, want = model(*nodes(count)), plain(*nodes(count))
            assert near(got, want), degrees
            for own, loss in ((model, got[:, 0].mean()), (plain, want[:, 0].mean())):
                own.zero_grad()
                loss.backward()
            assert all(near(a.grad, b.grad) for a, b in zip(
                model.parameters(), plain.parameters(), strict=True)), degrees
        model.eval()
        with torch.no_grad():
            assert near(model(*nodes(20)), plain(*nodes(20)))
            assert near(copy.deepcopy(model)(*nodes(20)), plain(*nodes(20)))


def test_a_graph_is_planned_as_one_row(caplog: pytest.LogCaptureFixture) -> None:
    found = ap.plan(Graph(), nodes(20), "2xL4", global_batch_size=20)
    assert len(found.plan.replicas) == 1 and found.plan.num_micro_batches == 1
    assert "rows of the batch cannot be told apart" in caplog.text


def test_nothing_is_cut_by_zero_where_nothing_trains(caplog: pytest.LogCaptureFixture) -> None:
    found = ap.plan(net().requires_grad_(False), batch()[0], "2xL4",
                    constraints={"zero": 3, "dp": 2})
    assert found.plan.zero == 0 and "not honoured: zero=3" in caplog.text


class Asking(Net):
    """Forward asks what gradients there are, in training and in evaluation."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x = x * self.head.bias.cos().sum()
        if torch.is_grad_enabled() and x.requires_grad:
            x = 2 * x
        x = x if x.grad_fn is None else x + 1
        out, loss = super().forward(x - x.mean(1, keepdim=True).data, y)
        return out, loss if loss is None or not loss.requires_grad else 3 * loss


def claim_gradients_that_forward_asks_for_are_those_of_the_call() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees, Asking), net(Asking)
        assert step(model, plain)
        for own in (model, plain):
            own.eval()
        assert near(model(*batch())[1], plain(*batch())[1])
        with torch.no_grad():
            assert near(model(*batch())[1], plain(*batch())[1])


class Hooked(Net):
    kind = "register_hook"

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        if self.kind == "saved":
            with torch.autograd.graph.saved_tensors_hooks(
                    lambda own: 2 * own if own.is_floating_point() else own, lambda own: own):
                return super().forward(x, y)
        out, loss = super().forward(x, y)
        if loss is not None and loss.requires_grad:
            loss.register_hook(lambda grad: 0.5 * grad)
        return out, loss


class Saved(Hooked):
    kind = "saved"


def claim_hooks_that_forward_sets_are_kept_or_refused() -> None:
    for kind in (Hooked, Saved):
        for degrees in (TP2, PP2):
            assert "which a trace does not keep" in refused(
                lambda degrees=degrees, kind=kind: parallel(degrees, kind)(*batch()))
        assert step(parallel(DP2, kind), net(kind))


class Stubborn(nn.Module):
    """Runs in its own type only, cannot be traced, and compares all rows with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            return x.sum()
        out = self.early(x.bfloat16())
        return F.cross_entropy(out @ out.T, torch.arange(len(x)))


def claim_what_cannot_be_tried_in_float64_is_tried_as_it_is() -> None:
    model = ap.parallelize(Stubborn().bfloat16(), plan=ap.Plan.uniform(**DP2))
    assert "rows together is not that of the rows apart" in refused(lambda: model(*batch()))


def claim_copies_of_parameters_are_of_the_whole() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees), net()
        assert step(model, plain)
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            with torch.no_grad():
                made = torch.zeros_like(own)
                torch.maximum(own, -own, out=made)
                stacked = torch.stack([own, -own])
                largest, places = torch.zeros_like(own), own.new_empty(0).long()
                torch.max(stacked, 0, out=(largest, places))
            assert all(near(a, b) for a, b in (
                (torch.tensor(own), other), (own.new_tensor(own), other), (made, other.abs()),
                (largest, other.abs()), (places, (other < 0).long())))
            with torch.device("meta"):
                assert torch.tensor([1.0]).is_meta
            array = own.detach().numpy()
            np.testing.assert_allclose(array, other.detach().numpy(), rtol=1e-5, atol=1e-7)
            if type(own) is not nn.Parameter:
                with pytest.raises(ValueError, match="read-only"):
                    array[...] = 0


class Mirrored(nn.Module):
    """Its last stage uses two parameters of its first one in the other order, as RevIN does."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.c = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = (self.last(torch.tanh(self.first(x * self.w + self.c))) - self.c) * self.w
        return out, (out.mean(1) - y).square().mean()


class Small(Net):
    """A small number beside a mean over the rows, of a prediction that is nearly perfect."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = super().forward(x)[0]
        return out, ((1e-5 * (out - out.detach().roll(1, 1))).square().mean() + 1e-9).sqrt()


class Picking(Net):
    """Takes some of the tokens of each row, by their number among those of all rows."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        best = x.view(len(x), 4, 2).sum(2).argsort(1)[:, :2]
        places = torch.arange(len(x))[:, None] * 4 + best
        picked = x.reshape(-1, 2)[places.flatten()].view(len(x), 4)
        return super().forward(torch.cat([picked, x[:, :4]], 1), y)


def claim_gradients_small_numbers_and_places_are_those_of_one_process() -> None:
    for kind, plans in ((Mirrored, ALL), (Small, (TP2, DP2, ZERO3)), (Picking, ALL)):
        for degrees in plans:
            model, plain = parallel(degrees, kind, guards={"drift_every": 0}), net(kind)
            for seed in range(3):
                assert step(model, plain, seed), (kind, degrees)


WEIGHTS = np.ones(8, dtype=np.float32)


class Lists(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.factors = deque([1.0, 2.0]), np.ones(8, dtype=np.float32)
        self.more = [np.ones(8, dtype=np.float32), torch.ones(8)]

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x = x * torch.from_numpy(self.factors) * torch.as_tensor(WEIGHTS) * sum(self.last)
        return super().forward(x * torch.from_numpy(self.more[0]) * self.more[1], y)


class Large(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = np.ones(1 << 21, dtype=np.float32)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return super().forward(x * torch.from_numpy(self.table)[:8], y)


def claim_arrays_and_deques_that_change_are_followed() -> None:
    model, plain = parallel(DP2, Lists), net(Lists)
    assert step(model, plain)
    changes = (lambda own: own.last.append(0.5), lambda own: own.factors.__setitem__(2, 3.0),
               lambda _: WEIGHTS.__setitem__(1, 2.0), lambda own: own.more[0].__setitem__(3, 2.0),
               lambda own: own.more[1].mul_(2), lambda own: own.more.__setitem__(1, torch.ones(8)))
    for number, change in enumerate(changes):
        for own in (model.module, plain):
            change(own)
        assert step(model, plain, number), number
    assert "array of 2097152 numbers" in refused(lambda: parallel(TP2, Large)(*batch()))


def claim_a_frozen_copy_answers_as_the_model_did() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees), net()
        assert step(model, plain)
        teacher, other = (copy.deepcopy(own).eval().requires_grad_(False) for own in (model, plain))
        assert step(model, plain, 1)
        with torch.no_grad():
            assert near(teacher(*batch())[1], other(*batch())[1]), degrees


def claim_a_look_at_the_machines_draws_nothing() -> None:
    model = parallel(DP2)
    model(*batch())[1].backward()
    before = torch.get_rng_state()
    model.between._obey(Deed("look"))
    assert torch.equal(torch.get_rng_state(), before)


def claim_models_one_after_another_share_their_groups() -> None:
    for _ in range(2):
        model = parallel(TP2)
        model(*batch())[1].backward()
        count = len(world._opened)
    parallel(TP2)(*batch())
    assert len(world._opened) == count


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
