"""Checks of values in forward, and what else decides by a value that a trace does not know.

PYTEST_DONT_REWRITE: here `assert` is Python's own.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar_torch.errors import TraceError
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart


class Checked(nn.Module):
    """Calls `check` in the middle of its forward."""

    def __init__(self, check: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.check = check

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.check(torch.relu(self.a(x))))


def traced(check: Any) -> None:
    call, _ = take_apart((torch.zeros(6, 8),), {})
    trace(Checked(check), call)


def raises_if_wrong(h: Tensor) -> Tensor:
    if torch.isnan(h).any():
        raise ValueError("no number")
    with torch.no_grad():
        assert (h >= 0).all() and not (h < 0).any(), f"too small: {h.min()}"
    if not torch.isfinite(h).all() or (h < 0).any():
        raise RuntimeError(f"{h.shape[0]} rows are wrong")
    assert torch.all(h >= 0).item(), "too small"
    if (h < 0).any().item():
        raise ValueError("too small")
    if (h < 0).sum().item() > 3:
        raise ValueError("too many")
    return h


def warns_if_wrong(h: Tensor) -> Tensor:
    if h.ne(0).logical_and(h.ne(1)).any().item():
        warnings.warn(f"{h.shape[0]} rows are strange", stacklevel=2)
    if min(h[0]) < 0:
        logging.warning("too small")
    return h


def of_distributions(h: Tensor) -> Tensor:
    mean, size = h.chunk(2, -1)
    found = torch.distributions.Normal(mean, size.exp())
    other = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(size))
    loss = torch.distributions.kl_divergence(found, other) - found.log_prob(mean)
    return h + loss.mean(-1, keepdim=True)


def of_a_loss(h: Tensor) -> Tensor:
    mean, size = h.chunk(2, -1)
    return h * nn.functional.gaussian_nll_loss(mean, mean + 1.0, size.exp())


@pytest.mark.parametrize("check", [raises_if_wrong, warns_if_wrong, of_distributions,
                                   of_a_loss])
def test_a_check_that_would_raise_passes_in_a_trace(check: Any) -> None:
    traced(check)


def test_checks_that_are_not_made_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def check(h: Tensor) -> Tensor:
        assert h.min() >= 0
        return h

    for _ in range(2):
        traced(check)
    traced(of_distributions)
    said = [text for text in caplog.messages if "not checked" in text]
    assert len(said) == 1 and "assert h.min() >= 0" in said[0]


def branches_by_item(h: Tensor) -> Tensor:
    return h * 2 if (h > 1).any().item() else h


def branches(h: Tensor) -> Tensor:
    if h.mean() > 1:
        h = h * 2
    return h


def raises_or_not(h: Tensor) -> Tensor:
    if h.mean() > 1:
        h = h * 2
        raise ValueError("too large") if h.shape[0] > 100 else TypeError("too few")
    return h


def warns_and_doubles(h: Tensor) -> Tensor:
    if h.mean() > 1:
        logging.warning("too large")
        h = h * 2
    return h


def says_and_writes(h: Tensor) -> Tensor:
    if h.mean() > 1:
        logging.warning("too large")
        h.clamp_(-1, 1)
    return h


def caught(h: Tensor) -> Tensor:
    try:
        return raises_if_wrong(h)
    except ValueError:
        return h.nan_to_num()


def by_itself(h: Tensor) -> Tensor:
    large = bool(h.mean() > 1)
    return h * 2 if large else h


def transformed(h: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * row.sum())(h)


@pytest.mark.parametrize("check", [branches, branches_by_item, raises_or_not, caught,
                                   warns_and_doubles, says_and_writes, by_itself, transformed])
def test_what_a_trace_cannot_follow_is_refused(check: Any) -> None:
    with pytest.raises(TraceError, match=r"data-dependent|torch\.func|too few"):
        traced(check)
