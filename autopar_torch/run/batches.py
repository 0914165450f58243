"""Every rank must be called with the same batch: compared at each call, refused if it differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from ..errors import RunError, TraceError
from ..trace.call import Call, Rowless, take_apart
from .agree import Facts, ask, checksum, differences, digest, plain
from .world import World

FIRST, EVERY = 10, 100  # calls whose values are compared: each of the first, then sparsely
WHY = ("a DistributedSampler, a loader that accelerate or a Trainer has cut, a seed per rank, or a "
       "shuffle without a seed that all share")
FIX = ("give every rank the global batch, in one order: each takes its rows of it by itself; "
       'guards={"batches": False} turns this off')
MODES = ("training", "gradients", "state of the module")
FIX_MODE = ("call model.train(), model.eval(), torch.no_grad() and whatever changes the module on "
            "all ranks alike")
Settle = Callable[[], None]


class SameBatch:
    """Compares the calls of one model over all ranks."""

    def __init__(self, world: World, on: bool, batch_dim: int) -> None:
        self.world, self.on, self.batch_dim = world, on and world.size > 1, batch_dim
        self.num_calls, self.rowless = 0, set[Rowless]()
        self.one_row = False  # no batch is shared out

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool,
             fingerprint: int = 0) -> tuple[Call, list[Tensor], Settle]:
        """The call taken apart, and a check to run before anything else is communicated. It raises
        on all ranks if they were not called alike.

        `fingerprint` is a hash of what else of the module must be equal on all ranks.
        """
        self.num_calls += 1
        try:
            call, tensors = take_apart(args, kwargs, self.batch_dim, self.rowless)
            if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
                raise TraceError("the model is called inside of torch.func (grad, vmap, jacrev)",
                                 where="model(...)", fix="give torch.func the module itself, as "
                                 "functional_call(model.module, ...), which every rank runs whole")
            if self.world.size > 1 and any(t.layout != torch.strided for t in tensors):
                raise TraceError("a tensor of the batch is sparse", where="model(...)",
                                 fix="pass it as to_dense(), or register it as a buffer")
        except TraceError as error:
            self._asked({"arguments": error.what}, {})()  # the other ranks wait for an answer
            raise
        self.rowless |= call.rowless
        call, tensors = self.as_shared(call, tensors)
        facts: Facts = {}
        values: Facts = {}
        if self.on:
            named = dict(_named(args, kwargs))
            facts = {"rows": str(call.num_rows), "arguments": ", ".join(named),
                     "structure": str(call.spec), **dict(map(_fact, named.items())),
                     "masks that hide nothing": str(call.ones), "training": str(training),
                     "gradients": str(torch.is_grad_enabled()),
                     "state of the module": f"{fingerprint:x}"}
            if self.num_calls <= FIRST or self.num_calls % EVERY == 0:
                values = {f"values of {name}": f"checksum {_checksum(value):x}"
                          for name, value in named.items() if isinstance(value, Tensor)}
        return call, tensors, self._asked(facts, values)

    def as_shared(self, call: Call, tensors: list[Tensor]) -> tuple[Call, list[Tensor]]:
        """As it is shared out: as one row where rows cannot be told apart."""
        return call.as_one_row(tensors) if self.one_row else (call, tensors)

    def _asked(self, facts: Facts, values: Facts) -> Settle:
        asked = [ask(self.world, digest(facts, values))] if self.on else []

        def settle() -> None:
            if asked and not asked.pop()():
                self._refuse(facts, values)

        return settle

    def _refuse(self, facts: Facts, values: Facts) -> None:
        """Say what differs; values only where nothing else does."""
        lines = differences(self.world, facts) or differences(self.world, values)
        modes = all(line.startswith(MODES) for line in lines)
        raise RunError(
            "the ranks were not called alike:\n    " + "\n    ".join(lines)
            + ("" if modes else f"\n  usually: {WHY}"),
            where=f"call {self.num_calls} of the model", fix=FIX_MODE if modes else FIX,
        )


def _checksum(tensor: Tensor) -> int:
    simple = type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided
    return checksum(tensor) if simple and not (tensor.is_meta or tensor.is_quantized) else 0


def _fact(item: tuple[str, Any]) -> tuple[str, str]:
    name, value = item
    if not isinstance(value, Tensor):
        return f"argument {name}", plain(value)
    learns = ", which requires a gradient" * (value.requires_grad and torch.is_grad_enabled())
    return (f"shape of {name}",
            f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{learns}")


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Arguments as the caller wrote them: `input_ids`, `args[0]`."""
    for first, given in (*((f"args[{i}]", arg) for i, arg in enumerate(args)), *kwargs.items()):
        for path, value in pytree.tree_flatten_with_path(given)[0]:
            yield first + pytree.keystr(path), value
