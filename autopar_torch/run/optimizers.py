"""What optimizers see of sharded parameters: parts during a step, whole tensors around it.

torch's elementwise optimizers work on the parts, at full speed. All others run with parameters that
mean whole tensors, and come out as in one process.
"""

from __future__ import annotations

from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn, optim
from torch.autograd.graph import increment_version
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .sharded import Sharded, ShardedParameter, mark, plainly
from .spread import Spread

Optimizer = optim.Optimizer
ELEMENTWISE = frozenset({
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad,
    optim.Adadelta, optim.Adamax, optim.ASGD, optim.Rprop,
})  # fmt: skip
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})  # their state that is no tensor of a part
_known: WeakSet[Optimizer] = WeakSet()
_plain: list[tuple[Tensor, type]] = []  # during a step: what it was before
_hidden: list[tuple[Tensor, Tensor]] = []  # gradients of what this rank has nothing of


def attend() -> None:
    """From now on, at every step of every optimizer."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before))
        _hooks.append(register_optimizer_step_post_hook(_after))


_hooks: list[Any] = []


def restore() -> None:
    """Whole tensors again; also after a step that raised."""
    with plainly():
        while _plain:
            tensor, kind = _plain.pop()
            tensor.__class__ = kind
        while _hidden:
            param, grad = _hidden.pop()
            param.grad = grad
            increment_version(param)  # as where the parameter was changed


def _ours(optimizer: Optimizer) -> list[ShardedParameter]:
    return [p for group in optimizer.param_groups for p in group["params"]
            if type(p) is ShardedParameter]  # fmt: skip


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    restore()
    ours = _ours(optimizer)
    if not ours:
        return
    if optimizer not in _known:
        _known.add(optimizer)
        optimizer.register_state_dict_post_hook(_full_state)
        optimizer.register_load_state_dict_post_hook(_cut_state)
        _cut_state(optimizer)
    # A closure is the script's: it has to see whole tensors. step(optimizer, closure)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if type(optimizer) in ELEMENTWISE and closure is None:
        with plainly():
            for param in ours:
                _show_part(param, optimizer.state.get(param, {}))


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = bool(_plain)
    restore()
    if stepped:
        with plainly():
            for param in _ours(optimizer):
                for key, value in optimizer.state.get(param, {}).items():
                    if type(value) is Tensor and key not in _NUMBERS:
                        mark(value, param.spread)


def _show_part(param: ShardedParameter, state: dict[str, Any]) -> None:
    """The plain part, with a plain gradient and state."""
    grad = param.grad
    if grad is not None and param.spread.is_empty:
        _hidden.append((param, grad))
        param.grad = None
    tensors = [param, grad, *state.values()]
    for tensor in tensors:
        if isinstance(tensor, Sharded):
            _plain.append((tensor, type(tensor)))
            tensor.__class__ = nn.Parameter if tensor is param else Tensor  # type: ignore[assignment]


def _cut_state(optimizer: Optimizer) -> None:
    """State that was loaded: of full tensors every rank keeps its part."""
    with plainly():
        for param in _ours(optimizer):
            spread, state = param.spread, optimizer.state.get(param, {})
            for key, value in list(state.items()):
                if _is_whole(key, value, spread):
                    state[key] = mark(spread.part(value), spread)
            if spread.is_empty and type(optimizer) in ELEMENTWISE and spread.shape.numel():
                optimizer.state.pop(param, None)


def _is_whole(key: str, value: Any, spread: Spread) -> bool:
    return (type(value) is Tensor and key not in _NUMBERS and value.shape == spread.shape
            and (value.dim() > 0 or spread.shape == ()))  # fmt: skip


def _full_state(optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Full tensors on every rank, as one process has them. All ranks must ask."""
    restore()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own: dict[int, dict[str, Any]] = packed["state"]
    told = {i: {key: _told(value) for key, value in values.items()}
            for i, values in own.items() if type(params[i]) is ShardedParameter}  # fmt: skip
    everyone = _ours(optimizer)[0].spread.world.gather(told)
    with plainly():
        full = {
            i: {key: _full_value(params[i], own.get(i, {}).get(key), kind)
                for key, kind in next(there[i] for there in everyone if i in there).items()}
            for i in sorted({i for there in everyone for i in there})
        }  # fmt: skip
    whole = {i: values for i, values in own.items() if i not in told}
    return {**packed, "state": dict(sorted({**whole, **full}.items()))}


def _told(value: Any) -> Any:
    """What others need to know who have nothing of that parameter: a type, or a number."""
    if isinstance(value, Sharded):
        return value.dtype
    return value if not isinstance(value, (Tensor, list, dict)) or _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _full_value(param: ShardedParameter, own: Any, told: Any) -> Any:
    spread = param.spread
    if not isinstance(told, torch.dtype):
        return told if own is None else own
    part = own if own is not None else torch.empty(spread.local, dtype=told, device=param.device)
    return spread.gathered(cast(Tensor, part.detach()))
