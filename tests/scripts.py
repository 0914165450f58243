"""Scripts that run on a plain module and under four plans, with the same outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar_torch as ap
import oracle
import zoo
from autopar_torch.errors import AutoparError

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "num_micro_batches": 2},
    "zero3": {"dp": 2, "zero": 3},
    "dp2": {"dp": 2},
}


_MODELS: dict[str, Any] = {}


def small_batch(seed: int = 0, rows: int = 4) -> dict[str, Tensor]:
    batch = zoo.batch("nanogpt", rows, seed)
    return {name: value[:, :8] % 24 for name, value in batch.items()}


def small_model(frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    module = zoo.NanoGPT(vocab=24, width=16, layers=2, seq=8)
    if frozen:
        module.tok.requires_grad_(False)
        module.blocks[1].requires_grad_(False)
    return module.double()  # so that only wrong things differ


class Job:
    """A model in training, whole or under a plan (made and traced once)."""

    def __init__(self, plan: str, frozen: bool = False) -> None:
        key = plan + frozen * " frozen"
        if key not in _MODELS:
            module = small_model(frozen)
            _MODELS[key] = module if not plan else ap.parallelize(
                module, small_batch(), plan=ap.Plan.uniform(**PLANS[plan]))
        self.model = _MODELS[key]
        self.module = self.model.module if plan else self.model
        self.module.load_state_dict(small_model(frozen).state_dict())
        self.model.zero_grad()
        self.params = list(self.module.parameters())
        self.plan = plan

    def loss(self, seed: int = 0) -> Tensor:
        return oracle.loss_of(self.model(**small_batch(seed)))

    def backward(self, seed: int = 0) -> None:
        self.loss(seed).backward()

    def train(self, opt: torch.optim.Optimizer, steps: int = 2) -> list[Tensor]:
        for seed in range(steps):
            opt.zero_grad()
            self.backward(seed)
            opt.step()
        return self.state()

    def state(self) -> list[Tensor]:
        return [v.clone() for v in self.module.state_dict().values()]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-3)


def values_of(found: Any) -> list[Tensor]:
    """As full plain tensors."""
    return [torch.as_tensor(x).detach().clone().double() if not isinstance(x, Tensor)
            else x.detach().double().cpu() for x in found]


def difference(got: list[Tensor], want: list[Tensor]) -> str:
    if len(got) != len(want):
        return f"{len(got)} values for {len(want)}"
    worst, where = 0.0, ""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if tuple(a.shape) != tuple(b.shape):
            return f"value {i}: {tuple(a.shape)} for {tuple(b.shape)}"
        a, b = torch.add(a.view(-1), 0.0), b.view(-1)
        same = (a == b) | (a.isnan() & b.isnan())
        scale = max(1e-3, float(b[b.isfinite()].abs().max())) if b.isfinite().any() else 1.0
        error = float((a - b)[~same].abs().max()) / scale if not same.all() else 0.0
        if not error <= worst:
            worst, where = error, f"value {i} of {len(got)} is off by {error:.1e}"
    return where if not worst <= 1e-9 else ""


def everywhere(script: Callable[[Job], Any]) -> Callable[[], None]:
    """The claim that a script gives the same values under every plan as in one process."""

    def claim() -> None:
        want = values_of(script(Job("")))
        wrong = {}
        for plan in PLANS:
            try:
                wrong[plan] = difference(values_of(script(Job(plan))), want)
            except (AutoparError, RuntimeError, AttributeError, TypeError, ValueError) as error:
                wrong[plan] = f"{type(error).__name__}: {error}"
        assert not any(wrong.values()), {plan: text for plan, text in wrong.items() if text}

    return claim
