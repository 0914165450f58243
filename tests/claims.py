"""Many claims in one start of ranks: the functions of a test module that are called `claim_...`."""

from __future__ import annotations

import importlib

import torch

from autopar_torch.run import world
from ranks import run_ranks


def names(module: str) -> list[str]:
    return sorted(n for n in vars(importlib.import_module(module)) if n.startswith("claim_"))


def checked(module: str, num_ranks: int = 2) -> dict[str, str]:
    """Claim -> "", or what was wrong on any rank."""
    each = run_ranks(num_ranks, "claims:check", module, timeout_s=300)
    return {name: "\n".join(found[name] for found in each if found[name]) for name in each[0]}


def check(module: str) -> dict[str, str]:
    """The same on one rank."""
    world.start()
    torch.set_num_threads(1)
    found = {}
    for name in names(module):
        try:
            getattr(importlib.import_module(module), name)()
            found[name] = ""
        except AssertionError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
