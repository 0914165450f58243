"""Parts of a model that are switched off and frozen for a call, as adapters are for a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from nets import batch, near

ZERO_BUBBLE = {"pp": 2, "num_micro_batches": 2, "schedule": "zero_bubble"}
PLANS = (*({"dp": 2, "zero": zero} for zero in range(4)), {"tp": 2},
         {"pp": 2, "num_micro_batches": 2}, ZERO_BUBBLE, {"pp": 2, "precision": "float32"})


class Adapted(nn.Module):
    """Frozen layers with adapters, as peft makes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8).requires_grad_(False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(8, 2, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(2, 8, bias=False) for _ in range(4))
        self.head, self.enabled = nn.Linear(8, 4).requires_grad_(False), True

    def forward(self, x: Tensor) -> Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = torch.tanh(layer(x) + up(down(x)) if self.enabled else layer(x))
        return self.head(x).log_softmax(-1)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        self._enable(False)
        yield
        self._enable(True)

    def _enable(self, on: bool) -> None:
        self.enabled = on
        for part in (self.down, self.up):
            part.requires_grad_(on)


def _reference(model: Any, module: Adapted, x: Tensor) -> Tensor:
    with torch.no_grad(), module.disabled():
        return model(x)


def _policy_first(model: Any, module: Adapted, x: Tensor) -> Tensor:
    mine = model(x)
    return F.kl_div(_reference(model, module, x), mine, log_target=True)


def _reference_first(model: Any, module: Adapted, x: Tensor) -> Tensor:
    reference = _reference(model, module, x)
    return F.kl_div(reference, model(x), log_target=True)


def _frozen_by_turns(model: Any, module: Adapted, x: Tensor) -> Tensor:
    """The frozen call is differentiated, too, and both backwards come after it."""
    mine = model(x)
    with module.disabled():
        module.head.requires_grad_(True)
        other = model(x + 1)
    again = model(x)
    module.head.requires_grad_(False)
    return F.kl_div(other, mine, log_target=True) + again.square().mean()


def _trained(model: Any, module: Adapted, loss_of: Callable[..., Tensor]) -> list[Tensor]:
    params = [p for name, p in model.named_parameters() if not name.startswith("layers")]
    optimizer = torch.optim.AdamW(params, 0.05)
    found = []
    for seed in range(3):
        loss = loss_of(model, module, batch(seed=seed)[0].double())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *model.state_dict().values()]


def _as_alone(loss_of: Callable[..., Tensor], *plans: dict[str, Any]) -> None:
    plain = Adapted().double()
    want = _trained(plain, plain, loss_of)
    for degrees in plans:
        module = Adapted().double()
        got = _trained(ap.parallelize(module, plan=ap.Plan.uniform(**degrees)), module, loss_of)
        assert all(near(a, b, 1e-9) for a, b in zip(got, want, strict=True)), degrees


def claim_a_reference_may_be_asked_between_a_call_and_its_backward() -> None:
    _as_alone(_policy_first, *PLANS)


def claim_a_reference_may_be_asked_first() -> None:
    _as_alone(_reference_first, *PLANS)


def claim_what_is_frozen_between_calls_and_backward_counts_for_each_call() -> None:
    _as_alone(_frozen_by_turns, *PLANS)


def claim_a_reference_in_bfloat16_leaves_gradients_alone() -> None:
    for degrees in ({"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}):
        grads = []
        for asked in (True, False):
            module = Adapted()
            model = ap.parallelize(module, plan=ap.Plan.uniform(**degrees, precision="bfloat16"))
            x, y = batch()
            for _ in range(2):
                mine = model(x)
                with torch.no_grad(), module.disabled() if asked else nullcontext():
                    model(x)
                F.nll_loss(mine, y).backward()
            grads.append([p.grad for p in model.parameters() if p.grad is not None])
        assert len(grads[0]) == 8 and all(map(near, *grads)), degrees


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
