"""Whose random numbers: a process's generators are the user's, what we run draws from our own.

Batches, shuffles and layer drop come from the user's generators, which start alike on all ranks and
have to stay so. Numbers of our own follow from (seed, place, step) alone, so that two integers are
all there is to save.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from ..shard.collectives import draw_apart, generator
from ..shard.lower import is_random
from ..shard.rules import op_name

_SEEDED = torch.Tag.nondeterministic_seeded
# Functions of torch that draw for every element, as those of a part of the batch must.
_DRAWING = frozenset({
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout",
    "feature_dropout_", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "rrelu",
    "rrelu_", "scaled_dot_product_attention", "multi_head_attention_forward", "gumbel_softmax",
    "bernoulli", "bernoulli_", "normal", "normal_", "uniform_", "exponential_", "cauchy_",
    "log_normal_", "geometric_", "random_", "multinomial", "poisson", "rand", "rand_like", "randn",
    "randn_like", "randint", "randint_like", "randperm",
})  # fmt: skip


@contextlib.contextmanager
def untouched(device: torch.device, *, python: bool = True) -> Iterator[None]:
    """The generators of torch, and of Python and numpy, are afterwards as they were before."""
    own = _generators(device)
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


def _generators(device: torch.device) -> list[torch.Generator]:
    return [generator(torch.device(kind)) for kind in dict.fromkeys(("cpu", str(device)))]


def draws(graphs: Iterable[fx.Graph]) -> bool:
    """Whether any op of these draws numbers."""
    return any(_draws(node) for graph in graphs for node in graph.nodes)


def _draws(node: fx.Node) -> bool:
    seeded = isinstance(node.target, OpOverload) and _SEEDED in node.target.tags
    return seeded and (op_name(node) != "scaled_dot_product_attention" or is_random(node))


class OwnNumbers:
    """The numbers that the programs of one place draw, step by step."""

    def __init__(self, seed: int, place: int, device: torch.device) -> None:
        self.seed, self.place, self.step, self.device = seed, place, 0, device

    @contextlib.contextmanager
    def drawing(self, *, python: bool = False) -> Iterator[None]:
        """Draw those of the next step; `python`: also where Python and numpy draw."""
        text = f"autopar {self.seed} {self.place} {self.step}"
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
        self.step += 1
        with untouched(self.device, python=python):
            for one in _generators(self.device):
                one.manual_seed(number)
            if python:
                random.seed(number)
                np.random.seed(number % 2**32)
            yield

    def state(self) -> dict[str, int]:
        """What it takes to go on with the same numbers, on any ranks."""
        return {"seed": self.seed, "step": self.step}

    def load(self, state: dict[str, int]) -> None:
        self.seed, self.step = state["seed"], state["step"]


class RowsApart(TorchFunctionMode):
    """In a forward that runs as Python: a single number, such as layer drop asks for, is the same
    on all ranks; what is drawn for every element of a tensor is drawn for each replica anew."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _DRAWING or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        given = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if given is None:
            return self._made(func, args, kwargs)
        if given.numel() == 1:
            return func(*args, **kwargs)
        return draw_apart(func, self.place, given.device, args, kwargs)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor, of which only the result says how large it is."""
        common = torch.default_generator
        before = common.get_state()
        made = func(*args, **kwargs)
        if made.numel() == 1:
            return made
        common.set_state(before)
        return draw_apart(func, self.place, made.device, args, kwargs)
