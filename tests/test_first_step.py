"""The first step is compared with the module as it is: what was traced for another is refused."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.errors import RunError
from autopar_torch.run.first_step import FirstStep

PLANS: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"pp": 2}]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop = nn.Dropout(0.5)

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.features(x), y)


class Unseen(Net):
    """Its branch is on a number of Python's that does not tell where it comes from."""

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        return x.sin() if 0.1 * len(x) < 10 else x * 2


class Outside(Unseen):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.features(x)


class Dropping(Net):
    """It draws in many ways."""

    def features(self, x: Tensor) -> Tensor:
        x = self.drop(super().features(x)) + 0.1 * torch.randn_like(x)
        x = torch.distributions.Normal(x, 1.0).rsample() + x.new_empty(8).uniform_()
        x = x + 0.1 * F.gumbel_softmax(x)
        kept = x.new_empty(len(x), 1).bernoulli_(0.7)
        tokens = (x * kept + torch.randint(3, (8,))).unflatten(1, (2, 4))
        x = F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.3).flatten(1)
        return F.dropout(x * (torch.rand(len(x), 1) > 0.5), 0.4)


class DroppingUnseen(Unseen):
    def features(self, x: Tensor) -> Tensor:
        return self.drop(super().features(x))


class DroppingForExport(Net):
    """It does another thing in a trace."""

    def features(self, x: Tensor) -> Tensor:
        x = self.drop(super().features(x))
        return 2 * x if isinstance(x, FakeTensor) else x


class Asking(Net):
    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        exporting = torch.compiler.is_exporting()
        exporting |= False
        return 2 * x if exporting or is_compiling() else x


def batch(num_rows: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, 8, generator=draw), torch.randn(num_rows, 8, generator=draw)


def stepped(module: nn.Module, degrees: dict[str, Any], *given: Tensor, **options: Any) -> Tensor:
    model = ap.parallelize(module, plan=ap.Plan.uniform(**degrees), **options)
    loss: Tensor = model(*given).square().mean()
    loss.backward()
    return loss.detach()


def claim_another_loss_is_refused_on_all_ranks() -> None:
    for degrees in PLANS:
        with pytest.raises(RunError, match="`loss` is off by"):
            stepped(Unseen(), degrees, *batch())


def claim_other_outputs_are_refused_where_the_loss_is_made_outside() -> None:
    with pytest.raises(RunError, match="`output` is off by"):
        stepped(Outside(), {"dp": 2}, batch()[0])


def claim_it_can_be_left_out() -> None:
    stepped(Unseen(), {"dp": 2}, *batch(), guards={"first_step": False})


def claim_whether_torch_exports_changes_nothing() -> None:
    for degrees in PLANS:
        want = Net()(*batch()).square().mean().detach()
        torch.testing.assert_close(stepped(Asking(), degrees, *batch()), want)


def claim_the_trace_of_what_draws_numbers_is_looked_at() -> None:
    for kind in (DroppingUnseen, DroppingForExport):
        for degrees in PLANS:
            with pytest.raises(RunError, match="`loss` is off by"):
                stepped(kind(), degrees, *batch())


def claim_what_agrees_trains() -> None:
    for degrees in PLANS:
        stepped(Dropping(), degrees, *batch())
        stepped(Net(), degrees, *batch())
        stepped(Unseen(), degrees, *batch(128))


def claim_another_batch_than_that_of_planning_is_not_compared() -> None:
    module = Net()
    model = ap.parallelize(module, batch(8), plan=ap.Plan.uniform(dp=2))
    assert float(model(*batch(6)).detach()) == pytest.approx(float(Net()(*batch(6)).detach()))


def claim_parameters_that_come_from_elsewhere_are_not_those_of_the_module() -> None:
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(place)
    plan, [folder] = ap.Plan.uniform(dp=2), place
    trained = ap.parallelize(Net(), plan=plan)
    optimizer = torch.optim.SGD(trained.parameters(), lr=5.0)
    for _ in range(2):
        loss = trained(*batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained.save(folder)
    want = float(trained(*batch()).detach())
    loaded = ap.parallelize(Net(), plan=plan)
    loaded.load(folder)
    with torch.device("meta"):
        empty = Net()
    for model in (loaded, ap.parallelize(Net(), plan=plan, weights=folder),
                  ap.parallelize(empty, plan=plan, weights=folder)):
        assert float(model(*batch()).detach()) == pytest.approx(want)


def test_what_is_no_number_is_off_unless_the_module_gives_none() -> None:
    one, none = {"loss": torch.tensor(1.0)}, {"loss": torch.tensor(torch.nan)}
    call: Any = None
    with pytest.raises(RunError, match="is off by nan"):
        FirstStep(call, one).compare(none)
    FirstStep(call, none).compare(none)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
