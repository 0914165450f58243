"""`state_dict()` and `load_state_dict()` of a model of which each rank has a part: full tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError
from .sharded import Sharded, local


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
        _made.update(of=weakref.ref(state), wholes=weakref.WeakValueDictionary())
    for name in (*module._parameters, *module._buffers):
        value = state.get(prefix + name)
        if type(value) is Sharded:
            whole = _made["wholes"].get(id(value.spread))
            if whole is None:
                whole = _made["wholes"][id(value.spread)] = value.spread.gathered(local(value))
            state[prefix + name] = whole


def load_full(module: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
    """Full tensors in, this rank's parts kept; nothing is changed unless all fit."""
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
