"""Small models with dropout, and what ranks say of each other: for tests of batches."""

from __future__ import annotations

import logging
import random
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autopar_torch as ap
from autopar_torch.errors import RunError

TP2 = {"tp": 2}
PP2 = {"pp": 2, "num_micro_batches": 2}
DP2 = {"dp": 2}
ZERO3 = {"dp": 2, "zero": 3}
PLANS = (TP2, PP2, DP2, ZERO3)


class Text(nn.Module):
    """Tokens in, loss out, dropout on the way."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(61, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 32))
            for _ in range(3)
        )
        self.head = nn.Linear(32, 61)

    def forward(self, idx: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embedding(idx)
        for layer in self.layers:
            x = x + layer(x)
        return scale * F.cross_entropy(self.head(x).view(-1, 61), targets.view(-1))


class Untraced(Text):
    """The same where a number that was drawn is looked at, and dropout that runs twice."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.drop, self.weight = nn.Dropout(0.5), nn.Parameter(torch.ones(64))

    def forward(self, idx: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        self.drawn = float(torch.rand([]))
        self.seen = (random.random(), float(np.random.rand()))
        loss = super().forward(idx, targets, scale)
        x = checkpoint(self.drop, torch.ones(64) * self.weight, use_reentrant=False)
        self.mask = x.detach()
        return loss * 2 + x.mean() if self.drawn > 0.5 else loss + x.mean()


class Masked(nn.Module):
    """Returns what its dropout left."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = F.dropout(x * self.weight, 0.5)
        return {"loss": y.mean(), "y": y}


def parallelized(module: nn.Module, degrees: dict[str, Any], **options: Any) -> Any:
    return ap.parallelize(module, plan=ap.Plan.uniform(**degrees), **options)


def states() -> list[int]:
    """Of all generators that are the user's."""
    states = (torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode(),
              repr(np.random.get_state()).encode())
    return [zlib.crc32(state) for state in states]


def everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def same(value: Any) -> bool:
    found = everyone(value)
    return all(other == found[0] for other in found)


def refuses(call: Callable[[], object], *words: str) -> None:
    """A RunError that says all of these words, within 10 s on every rank; all can go on then."""
    start, said = time.monotonic(), "nothing"
    try:
        call()
    except RunError as error:
        said = str(error)
    late = time.monotonic() - start > 10
    found = everyone("" if all(word in said for word in words) and not late else said)
    assert not any(found), (words, found)


class Lines(logging.Handler):
    """What the library says."""

    def __enter__(self) -> list[str]:
        self.lines = list[str]()
        logging.getLogger("autopar_torch").addHandler(self)
        return self.lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __exit__(self, *_: object) -> None:
        logging.getLogger("autopar_torch").removeHandler(self)


def windows() -> dict[str, Tensor]:
    data = torch.arange(5000) % 61
    starts = torch.randint(len(data) - 17, (8,))
    idx, targets = (torch.stack([data[s + k : s + k + 16] for s in starts]) for k in (0, 1))
    return {"idx": idx, "targets": targets}


def learner(model: Any) -> Callable[..., float]:
    """A step of training; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)

    def step(**batch: Tensor) -> float:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step
