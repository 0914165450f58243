"""`state_dict()` and `load_state_dict()` of a model of which each rank has a part: full tensors."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..progress import warn
from .sharded import Sharded, local

log = logging.getLogger("autopar_torch")


def same_shape(name: str, there: Sequence[int], here: Sequence[int], where: str) -> None:
    """What is given has the shape of the full tensor."""
    if tuple(there) != tuple(here):
        raise CheckpointError(f"{name} is {tuple(there)} there, {tuple(here)} here", where=where,
                              fix="build the model with the sizes of what is loaded; of a "
                              "state_dict, take out what does not fit and pass strict=False")


def watch(module: nn.Module) -> None:
    """`state_dict()` of a module, and of any in it, has full tensors from now on."""
    for sub in module.modules():
        sub._register_state_dict_hook(_whole_entries)


_made: dict[str, Any] = {"of": lambda: None, "wholes": {}}  # by the state_dict() under way


def _whole_entries(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Tied parameters give one tensor, as in one process."""
    if _made["of"]() is not state:
        write_back()
        _made.update(of=weakref.ref(state), wholes=weakref.WeakValueDictionary())
    for name in (*module._parameters, *module._buffers):
        value = state.get(prefix + name)
        if type(value) is Sharded:
            whole = _made["wholes"].get(id(value.spread))
            if whole is None:
                whole = _made["wholes"][id(value.spread)] = value.spread.gathered(local(value))
                held = module._parameters if name in module._parameters else module._buffers
                _lend(whole, cast(Sharded, held[name]))
            state[prefix + name] = whole


class _Lent:
    """A full tensor of a state_dict: in one process it would be the parameter."""

    def __init__(self, whole: Tensor, value: Sharded) -> None:
        self.whole, self.value = whole, value
        self.versions = self._now()

    def _now(self) -> tuple[int, int]:
        return self.whole._version, local(self.value)._version

    def write_back(self) -> None:
        """What a script has written into it reaches the part of this rank."""
        (seen, then), (now, own) = self.versions, self._now()
        if now == seen:
            return
        if own != then or not isinstance(self.value, Sharded):
            warn(log, "not honoured: what was written to a tensor of state_dict() is lost, as the "
                 "model's has changed in between; write to parameters, or call load_state_dict()")
            self.versions = now, then
            return
        with torch.no_grad():
            local(self.value).copy_(self.value.spread.cut(self.whole))
        self.versions = self._now()


_lent: dict[int, _Lent] = {}
_numbers = itertools.count()


def _lend(whole: Tensor, value: Sharded) -> None:
    if not torch.is_inference(whole):  # else it counts no writes
        number = next(_numbers)
        _lent[number] = _Lent(whole.detach(), value)
        weakref.finalize(whole, _returned, number).atexit = False


def _returned(number: int) -> None:
    _lent.pop(number).write_back()


def write_back() -> None:
    """Before the model is read or written: tensors of state_dict() that scripts still hold."""
    for lent in [*_lent.values()]:
        lent.write_back()


def load_full(module: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
    """Full tensors in, this rank's parts kept; nothing is changed unless all fit."""
    write_back()
    own = module.state_dict(keep_vars=True)
    missing = [n for n in own if n not in state]
    extra = [n for n in state if n not in own]
    if strict and (missing or extra):
        raise CheckpointError(
            f"missing {missing[:5]}, unexpected {extra[:5]}", where="load_state_dict",
            fix="pass strict=False to ignore",
        )
    for name, here in own.items():
        if name in state and isinstance(here, Tensor):
            same_shape(name, state[name].shape, here.shape, "load_state_dict")
    return module.load_state_dict(state, strict)
