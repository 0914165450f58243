"""Every rank is called with the same batch: asked at each call, and told where it is not so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
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
Settle = Callable[[], None]


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
            self._asked(digest(what), lambda: {"batch": what})()
            raise
        mode = {"training": str(training), "gradients": str(torch.is_grad_enabled())}
        if not self.on:
            return call, tensors, _nothing
        values = self.num_calls <= FIRST or self.num_calls % EVERY == 0
        sums = [_checksum(t) for t in tensors] if values else []
        number = digest(str(call.spec), call.leaves_shown, call.shapes, call.dtypes, mode,
                        fingerprint, sums)  # fmt: skip

        def facts() -> dict[str, str]:
            return {**_facts(call, tensors), **mode, "module": f"{fingerprint:x}"}

        return call, tensors, self._asked(number, facts)

    def _asked(self, number: int, facts: Callable[[], Mapping[str, str]]) -> Settle:
        if not self.on:
            return _nothing
        alike, where = ask(self.world, number), f"call {self.num_calls} of the model"
        done: list[bool] = []

        def settle() -> None:
            if done:
                return
            done.append(True)
            if not alike():
                lines = differences(self.world, facts())
                raise RunError("the ranks were called with different batches:\n    "
                               + "\n    ".join(lines) + f"\n  usually: {WHY}",
                               where=where, fix=FIX)  # fmt: skip

        return settle


def _nothing() -> None:
    """Nobody to ask."""


def _checksum(tensor: Tensor) -> int:
    plain = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized)
    return checksum(tensor) if plain else 0


def _facts(call: Call, tensors: Sequence[Tensor]) -> dict[str, str]:
    """The call in words: first its rows, then what else may differ, last the values."""
    named = dict(_named(call, tensors))
    found = {"rows": str(call.num_rows), "arguments": ", ".join(named)}
    for name, value in named.items():
        if isinstance(value, Tensor):
            kind = str(value.dtype).removeprefix("torch.")
            found[f"shape of {name}"] = f"{tuple(value.shape)} {kind}"
        else:
            found[name] = shown(value)
    return found | {f"values of {name}": f"checksum {_checksum(value):x}"
                    for name, value in named.items() if isinstance(value, Tensor)}  # fmt: skip


def _named(call: Call, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Any]]:
    """Arguments as the caller wrote them: `input_ids`, `args[0]`."""
    leaves, _ = pytree.tree_flatten_with_path(call.rebuild(tensors))
    for (where, *path), value in leaves:
        first, rest = pytree.keystr(tuple(path[:1])), pytree.keystr(tuple(path[1:]))
        by_name = pytree.keystr((where,)) == "[1]"
        yield (first.strip("[]'") if by_name else f"args{first}") + rest, value
