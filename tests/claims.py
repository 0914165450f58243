"""Many claims in one start of ranks: the functions of a test module that are called `claim_...`.

    @pytest.mark.parametrize("name", claims.names(__name__))
    def test_on_2_ranks(name: str) -> None:
        claims.hold(__name__, name)
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch

from autopar_torch.run import world
from ranks import run_ranks
from slow import slowly


def names(module: str) -> list[Any]:
    """So far: to be asked below the claims. Those called `slow_claim_...` are slow."""
    return [*_named(module, "claim_"), *slowly(*_named(module, "slow_claim_"))]


def _named(module: str, prefix: str) -> list[str]:
    return sorted(n for n in vars(importlib.import_module(module)) if n.startswith(prefix))


def hold(module: str, name: str, num_ranks: int = 2) -> None:
    """Whether a claim holds; all of its prefix are checked at once, by the first that asks."""
    found = _checked(module, num_ranks, name[: name.index("claim_") + len("claim_")])
    assert not found[name], found[name]


@functools.cache
def _checked(module: str, num_ranks: int, prefix: str) -> dict[str, str]:
    """Claim -> "", or what was wrong on any rank."""
    each = run_ranks(num_ranks, "claims:check", module, prefix)
    return {name: "\n".join(found[name] for found in each if found[name]) for name in each[0]}


def check(module: str, prefix: str) -> dict[str, str]:
    """The same on one rank."""
    world.start()
    torch.set_num_threads(1)
    found = {}
    for name in _named(module, prefix):
        try:
            getattr(importlib.import_module(module), name)()
            found[name] = ""
        except (Exception, pytest.fail.Exception) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
