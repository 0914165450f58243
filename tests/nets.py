"""A small network with everything that a trace could burn in, and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
from autopar_torch.errors import AutoparError

TP2 = {"tp": 2}
PP2 = {"pp": 2, "num_micro_batches": 2}
DP2 = {"dp": 2}
ZERO3 = {"dp": 2, "zero": 3}
ALL = (TP2, PP2, DP2, ZERO3)


class Net(nn.Module):
    """Two hidden layers with a flag, a number and dropout; returns logits and, given y, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.drop, self.norm = nn.Dropout(0.0), nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        self.scale, self.flip, self.unread = 1.0, False, 0

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        logits = self.head(self.drop(self.norm(-x if self.flip else x)))
        return logits, None if y is None else F.cross_entropy(logits, y)


def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().train()


def batch(rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=gen), torch.randint(0, 4, (rows,), generator=gen)


def parallel(degrees: dict[str, Any], kind: type[nn.Module] = Net, **options: Any) -> Any:
    return ap.parallelize(net(kind), plan=ap.Plan.uniform(**degrees), **options)


def near(a: Any, b: Any, limit: float = 1e-5) -> bool:
    a, b = torch.as_tensor(a).detach().double(), torch.as_tensor(b).detach().double()
    return a.shape == b.shape and float((a - b).abs().max()) <= limit * float(b.abs().max() + 1e-9)


def refused(run: Callable[[], Any]) -> str:
    """What an error of ours said, or nothing."""
    try:
        run()
    except AutoparError as error:
        return str(error)
    return ""


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """How often the model is traced meanwhile."""
    times, before = [0], model.retrace

    def retrace(*args: Any) -> Any:
        times[0] += 1
        return before(*args)

    model.retrace = retrace
    try:
        yield times
    finally:
        model.retrace = before


def step(model: Any, plain: Any, seed: int = 0) -> bool:
    """One step of SGD on both; whether losses agree."""
    x, y = batch(seed=seed)
    got, want = model(x, y)[1], plain(x, y)[1]
    for loss, params in ((got, model.parameters()), (want, plain.parameters())):
        loss.backward()
        with torch.no_grad():
            for p in params:
                if p.grad is not None:
                    p -= 0.1 * p.grad
                    p.grad = None
    return near(got, want)


def step_losses(model: Any) -> Tensor:
    """Losses of three steps of SGD."""
    losses = []
    for seed in range(3):
        loss = model(*batch(seed=seed))[1]
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
                    p.grad = None
        losses.append(loss.detach())
    return torch.stack(losses)
