"""Things that concern all parameters at once: norms, full state, loading it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from ..errors import CheckpointError, RunError
from ..shard.holdings import Box
from .params import Held
from .sharded import Sharded, local, plainly
from .totals import total_norm

if TYPE_CHECKING:
    from .model import ParallelModel


def same_shape(name: str, there: Sequence[int], here: Sequence[int], where: str) -> None:
    """What is given has the shape of the full tensor."""
    if tuple(there) != tuple(here):
        raise CheckpointError(f"{name} is {tuple(there)} there, {tuple(here)} here", where=where)


def spoken(model: ParallelModel, held: Held, value: Tensor) -> list[tuple[Box, Tensor]]:
    """(box of the full tensor, view) of what this rank writes of a part: a parameter's, or of a
    tensor that is cut like it. Over all ranks every element once."""
    spread = model.store.spreads.get(held.name)
    if spread is not None:
        return spread.spoken(local(value))
    whole = ((0,) * len(held.shape), held.shape)
    return [(whole, local(value))] if model.world.rank == 0 else []


def clip_grad_norm(model: ParallelModel, max_norm: float, norm_type: float,
                   error_if_nonfinite: bool, foreach: bool | None) -> Tensor:
    """torch's clip_grad_norm_ over every element of the model once, in one message."""
    params = [p for p in model.module.parameters() if p.grad is not None]
    if not params or not norm_type:
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = total_norm([cast(Tensor, p.grad) for p in params], float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RunError(f"the norm of all gradients is {float(norm)}, so they cannot be clipped",
                       where="clip_grad_norm_",
                       fix="find what made them so, or pass error_if_nonfinite=False")
    with plainly():
        nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach is not False)
    return norm


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


def load_full(model: ParallelModel, state: Mapping[str, Any], strict: bool) -> Any:
    """Full tensors in, this rank's parts kept; nothing is changed unless all fit."""
    own = model.module.state_dict(keep_vars=True)
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
    return model.module.load_state_dict(state, strict)
