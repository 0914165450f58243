"""Things that concern all parameters at once: norms, full state, loading it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

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
                   error_if_nonfinite: bool, foreach: bool | None) -> Tensor:  # fmt: skip
    """torch's clip_grad_norm_ over every element of the model once, in one message."""
    if model.fallback_reason or model.world.size == 1:
        return torch.nn.utils.clip_grad_norm_(model.module.parameters(), max_norm, norm_type,
                                              error_if_nonfinite, foreach)  # fmt: skip
    grads = [p.grad for p in model.module.parameters() if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    norm = total_norm(grads, float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RunError(f"the norm of all gradients is {float(norm)}, so they cannot be clipped",
                       where="clip_grad_norm_",
                       fix="find what made them so, or pass error_if_nonfinite=False")  # fmt: skip
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if float(factor) != 1.0:
        torch._foreach_mul_(grads, factor)
    return norm


def watch(module: nn.Module) -> None:
    """`state_dict()` of a module, and of any in it, has full tensors from now on."""
    for sub in module.modules():
        if _whole_entries not in sub._state_dict_hooks.values():
            sub._register_state_dict_hook(_whole_entries)


_made: dict[str, Any] = {"of": lambda: None, "wholes": {}}  # by the state_dict() under way


def _whole_entries(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    if _made["of"]() is not state:
        _made.update(of=weakref.ref(state), wholes={})
    for name in (*module._parameters, *module._buffers):
        value = state.get(prefix + name)
        if type(value) is Sharded:
            state[prefix + name] = _once(value)


def _once(value: Sharded) -> Tensor:
    """Tied parameters give one tensor, as in one process."""
    wholes = _made["wholes"]
    known = wholes.get(id(value.spread), lambda: None)()
    if known is None:
        with plainly():
            known = value.spread.gathered(value)
        wholes[id(value.spread)] = weakref.ref(known)
    return cast(Tensor, known)


def full_state(model: ParallelModel, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Every parameter and persistent buffer, whole, under all of its original names."""
    own: dict[str, Any] = model.module.state_dict(*args, **kwargs)
    if model._plan is None or model.fallback_reason:
        return {name: value.detach().clone() for name, value in own.items()}
    return own


def load_full(model: ParallelModel, state: Mapping[str, Any], strict: bool) -> Any:
    """Full tensors in, this rank's parts kept."""
    own = model.module.state_dict(keep_vars=True)
    missing = [n for n in own if n not in state]
    extra = [n for n in state if n not in own]
    if strict and (missing or extra):
        raise CheckpointError(
            f"missing {missing[:5]}, unexpected {extra[:5]}", where="load_state_dict",
            fix="pass strict=False to ignore",
        )  # fmt: skip
    if model._plan is None or model.fallback_reason:
        return model.module.load_state_dict(state, strict)
    given = [name for name in own if name in state]
    for name in given:
        same_shape(name, state[name].shape, own[name].shape, "load_state_dict")
    with torch.no_grad():
        for name in given:
            own[name].copy_(state[name])
    return _IncompatibleKeys(missing, extra)
