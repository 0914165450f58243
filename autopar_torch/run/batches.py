"""Every rank is called with the same batch: asked at each call, and told where it is not so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from ..errors import RunError, TraceError
from ..trace.call import Call, shown, take_apart
from .agree import ask, checksum, differences, digest
from .world import World

FIRST, EVERY = 10, 100  # calls whose values are compared: each of the first, then sparsely
WHY = ("a DistributedSampler, a loader that accelerate or a Trainer has cut, a seed per rank, or a "
       "shuffle without a seed that all share")  # fmt: skip
FIX = ("give every rank the global batch, in one order: each takes its rows of it by itself; "
       'guards={"batches": False} turns this off')  # fmt: skip
MODES = ("training", "gradients", "state of the module")
FIX_MODE = ("call model.train(), model.eval(), torch.no_grad() and whatever changes the module on "
            "all ranks alike")  # fmt: skip
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
Settle = Callable[[], None]
Told = Callable[[], Mapping[str, str]]


class SameBatch:
    """Compares the calls of one model over all ranks."""

    def __init__(self, world: World, on: bool) -> None:
        self.world, self.on = world, on and world.size > 1
        self.num_calls = 0

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool,
             fingerprint: int = 0) -> tuple[Call, list[Tensor], Settle]:  # fmt: skip
        """The call taken apart, and what to ask before anything else is communicated: whether the
        other ranks were called alike. It raises on all ranks where they were not.

        `fingerprint` stands for what else of the module must be the same on all ranks.
        """
        self.num_calls += 1
        try:
            call, tensors = take_apart(args, kwargs)
        except TraceError as error:
            what = error.what  # in case the others have a batch
            self._asked(digest(what), lambda: {"arguments": what}, dict)()
            raise
        mode = {"training": str(training), "gradients": str(torch.is_grad_enabled())}
        if not self.on:
            return call, tensors, _nothing
        values = self.num_calls <= FIRST or self.num_calls % EVERY == 0
        sums = [_checksum(t) for t in tensors] if values else []
        number = digest(str(call.spec), list(map(_plain, call.leaves)), call.shapes, call.dtypes,
                        mode, fingerprint, sums)  # fmt: skip

        def facts() -> dict[str, str]:
            return {**_facts(call, tensors), **mode, "state of the module": f"{fingerprint:x}"}

        return call, tensors, self._asked(number, facts, lambda: _values(call, tensors))

    def _asked(self, number: int, facts: Told, values: Told) -> Settle:
        if not self.on:
            return _nothing
        alike = ask(self.world, number)
        done: list[bool] = []

        def settle() -> None:
            if done:
                return
            done.append(True)
            if not alike():
                self._refuse(facts(), values())

        return settle

    def _refuse(self, facts: Mapping[str, str], values: Mapping[str, str]) -> None:
        """Say what differs; values only where nothing else does."""
        lines = differences(self.world, facts) or differences(self.world, values)
        modes = all(line.startswith(MODES) for line in lines)
        raise RunError(
            "the ranks were not called alike:\n    " + "\n    ".join(lines)
            + ("" if modes else f"\n  usually: {WHY}"),
            where=f"call {self.num_calls} of the model", fix=FIX_MODE if modes else FIX,
        )  # fmt: skip


def _nothing() -> None:
    """Nobody to ask."""


def _plain(leaf: Any) -> str:
    """What is no tensor, in the words that it has in every process."""
    if isinstance(leaf, (set, frozenset)):
        return f"{sorted(map(repr, leaf))}"
    if isinstance(leaf, torch.device):
        return leaf.type  # each rank has its own
    return _ADDRESS.sub("", shown(leaf))


def _checksum(tensor: Tensor) -> int:
    plain = type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided
    plain &= not (tensor.is_meta or tensor.is_quantized)
    return checksum(tensor) if plain else 0


def _facts(call: Call, tensors: Sequence[Tensor]) -> dict[str, str]:
    """The call in words."""
    named = list(_named(call, tensors))
    found = {"rows": str(call.num_rows), "arguments": ", ".join(name for name, _ in named),
             "structure": str(call.spec)}  # fmt: skip
    for name, value in named:
        if isinstance(value, Tensor):
            kind = str(value.dtype).removeprefix("torch.")
            found[f"shape of {name}"] = f"{tuple(value.shape)} {kind}"
        else:
            found[name] = _plain(value)
    return found


def _values(call: Call, tensors: Sequence[Tensor]) -> dict[str, str]:
    return {f"values of {name}": f"checksum {_checksum(value):x}"
            for name, value in _named(call, tensors) if isinstance(value, Tensor)}  # fmt: skip


def _named(call: Call, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Any]]:
    """Arguments as the caller wrote them: `input_ids`, `args[0]`."""
    leaves, _ = pytree.tree_flatten_with_path(call.rebuild(tensors))
    for (where, *path), value in leaves:
        first, rest = pytree.keystr(tuple(path[:1])), pytree.keystr(tuple(path[1:]))
        by_name = pytree.keystr((where,)) == "[1]"
        yield (first.strip("[]'") if by_name else f"args{first}") + rest, value
