"""Random numbers: the process's generators are the user's, what we run draws from our own.

Batches, shuffles and layer drop come from the user's generators, which start alike on all ranks and
have to stay so. Numbers of our own follow from (seed, place, step) alone, so that two integers are
all there is to save.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import random
import weakref
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..shard.collectives import apart, generator
from .agree import digest
from .world import World


@contextlib.contextmanager
def untouched(device: torch.device, *, python: bool = True) -> Iterator[None]:
    """The generators of torch, and of Python and numpy, are afterwards as they were before."""
    own = generators(device)
    states = [one.get_state() for one in own]
    drawn = (random.getstate(), np.random.get_state()) if python else None
    try:
        yield
    finally:
        for one, state in zip(own, states, strict=True):
            one.set_state(state)
        if drawn is not None:
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])


def generators(device: torch.device) -> list[torch.Generator]:
    return [generator(torch.device(kind)) for kind in dict.fromkeys(("cpu", str(device)))]


_living: weakref.WeakSet[OwnNumbers] = weakref.WeakSet()


def another_seed() -> int:
    """What the script's seed makes of one more model: a teacher drops other values than its
    student, and a model in the place of one that is gone the same."""
    gc.collect()
    taken = {own.seed for own in _living}
    seeds = (digest(torch.initial_seed(), count) for count in itertools.count())
    return next(seed for seed in seeds if seed not in taken)


class OwnNumbers:
    """The numbers that the programs of one place draw, step by step."""

    def __init__(self, seed: int, place: int, device: torch.device) -> None:
        self.seed, self.place, self.step, self.device = seed, place, 0, device
        _living.add(self)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw those of the next step."""
        number = digest(self.seed, self.place, self.step)
        self.step += 1
        with self._from(number):
            yield

    def drawing_alike(self) -> contextlib.AbstractContextManager[None]:
        """Draw those that all places share in the next step."""
        return self._from(digest(self.seed, "alike", self.step))

    @contextlib.contextmanager
    def _from(self, number: int) -> Iterator[None]:
        with untouched(self.device, python=False):
            for one in generators(self.device):
                one.manual_seed(number)
            yield

    def state(self) -> dict[str, int]:
        """What it takes to go on with the same numbers, on any ranks."""
        return {"seed": self.seed, "step": self.step}

    def load(self, state: dict[str, int]) -> None:
        self.seed, self.step = state["seed"], state["step"]


def share_python_numbers(world: World) -> None:
    """A forward that runs as Python draws from Python's and numpy's generators on every rank, as it
    does in one process: they have to start alike."""
    kind, keys, place, has_gauss, gauss = cast(Any, np.random.get_state())
    own = random.getstate(), (kind, keys.tolist(), place, has_gauss, gauss)
    first, (kind, keys, place, has_gauss, gauss) = json.loads(world.agree(json.dumps(own).encode()))
    random.setstate((first[0], tuple(first[1]), first[2]))
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, gauss))


@contextlib.contextmanager
def dropout_apart(place: int) -> Iterator[None]:
    """While a forward runs as Python: what it draws is the same on all ranks, as layer drop asks
    for, but modules of dropout draw for each replica anew, also where they run again for the
    backward. (A function of dropout has the same numbers for the rows of each replica.)"""
    under_way: list[contextlib.AbstractContextManager[None]] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if _drops(module):
            under_way.append(apart(place, args[0].device))
            under_way[-1].__enter__()

    def after(module: nn.Module, args: Any, result: Any) -> None:
        if _drops(module):
            under_way.pop().__exit__(None, None, None)

    first = register_module_forward_pre_hook(before)
    last = register_module_forward_hook(after, always_call=True)
    try:
        yield
    finally:
        first.remove()
        last.remove()


def _drops(module: nn.Module) -> bool:
    return isinstance(module, _DropoutNd) and module.training and module.p > 0
