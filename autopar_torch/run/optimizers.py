"""What optimizers see of sharded parameters: parts during a step, whole tensors around it.

torch's elementwise optimizers work on the parts, at full speed, and on empty ones: so each rank has
state of every parameter, as scripts read it in turn. All others run with parameters that
mean whole tensors, and come out as in one process.
"""

from __future__ import annotations

import gc
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import patches
from .sharded import Sharded, ShardedParameter, mark, plainly

Optimizer = optim.Optimizer
ELEMENTWISE = frozenset({
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad,
    optim.Adadelta, optim.Adamax, optim.ASGD, optim.Rprop,
})
NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})  # their state that is no tensor of a part
_known: WeakSet[Optimizer] = WeakSet()
_met: list[ref[Optimizer]] = []  # in the order in which they first stepped, or were loaded
_taken: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # steps since it is known
_stepping: WeakSet[Optimizer] = WeakSet()  # whose step() has begun
_plain: list[tuple[Tensor, type]] = []  # during a step: what it was before


@cache
def attend() -> None:
    """Hook into every step of every optimizer from now on."""
    patches.attend()
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def restore() -> None:
    """Whole tensors again; also after a step that raised."""
    with plainly():
        while _plain:
            tensor, kind = _plain.pop()
            tensor.__class__ = kind


def _ours(optimizer: Optimizer) -> list[ShardedParameter]:
    return [p for group in optimizer.param_groups for p in group["params"]
            if type(p) is ShardedParameter]


def learn(optimizer: Optimizer) -> None:
    """From now on its state_dict() and load_state_dict() have the state of whole tensors."""
    if not any(known() is optimizer for known in _met):
        _met[:] = [known for known in _met if known() is not None] + [ref(optimizer)]
    if optimizer not in _known and _ours(optimizer):
        _known.add(optimizer)
        optimizer.register_state_dict_post_hook(_full_state)
        optimizer.register_load_state_dict_post_hook(_cut_state)
        _cut_state(optimizer)


def of(module: nn.Module) -> list[Optimizer]:
    """The optimizers that are known to train it, in the same order on every rank."""
    own = {id(param) for param in module.parameters()}
    return [optimizer for known in _met if (optimizer := known()) is not None
            and any(id(p) in own for group in optimizer.param_groups for p in group["params"])]


def living(module: nn.Module) -> list[Optimizer]:
    """The same, where one that a script has dropped may still be there on some ranks."""
    gc.collect()
    return of(module)


def num_steps(module: nn.Module) -> int:
    """How many steps have been taken of the optimizers that are known to train it."""
    return sum(_taken.get(optimizer, 0) for optimizer in of(module))


def stepping(module: nn.Module) -> bool:
    """Whether one of them is in the middle of a step, whose closure calls the model."""
    return any(optimizer in _stepping for optimizer in of(module))


def state_bytes(module: nn.Module) -> int:
    """Of what they keep on this rank, in tensors."""
    kept = (value for optimizer in of(module) for state in optimizer.state.values()
            for value in state.values() if isinstance(value, Tensor))
    with plainly():
        return sum(value.nbytes for value in kept)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    restore()
    ours = _ours(optimizer)
    learn(optimizer)
    _stepping.add(optimizer)
    if not ours:
        return
    # Closures and hooks are the script's: they have to see whole tensors. step(optimizer, closure)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if type(optimizer) in ELEMENTWISE and closure is None and not hooks:
        with plainly():
            for param in ours:
                _show_part(param, optimizer.state.get(param, {}))


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = bool(_plain)
    _taken[optimizer] = _taken.get(optimizer, 0) + 1
    _stepping.discard(optimizer)
    restore()
    if stepped:
        with plainly():
            for param in _ours(optimizer):
                for key, value in optimizer.state.get(param, {}).items():
                    if type(value) is Tensor and key not in NUMBERS:
                        mark(value, param.spread)


def _show_part(param: ShardedParameter, state: dict[str, Any]) -> None:
    """The plain part, with a plain gradient and state."""
    for tensor in (param, param.grad, *state.values()):
        if isinstance(tensor, Sharded):
            _plain.append((tensor, type(tensor)))
            tensor.__class__ = nn.Parameter if tensor is param else Tensor  # type: ignore[assignment]


def _cut_state(optimizer: Optimizer) -> None:
    """State that was loaded: of full tensors every rank keeps its part."""
    with plainly():
        for param in _ours(optimizer):
            spread, state = param.spread, optimizer.state.get(param, {})
            for key, value in state.items():
                if type(value) is Tensor and key not in NUMBERS and value.shape == spread.shape:
                    state[key] = mark(spread.part(value), spread)


def _full_state(optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Full tensors on every rank, as one process has them. All ranks must ask."""
    restore()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    ours = {i: p for i, p in enumerate(params) if type(p) is ShardedParameter}
    if not ours:  # after a move to replicas
        return {**packed, "state": dict(sorted(packed["state"].items()))}
    state: dict[int, dict[str, Any]] = packed["state"]
    told = {i: {key: _told(value) for key, value in state[i].items()} for i in ours if i in state}
    world = _ours(optimizer)[0].spread.world
    with world.meeting("optimizer.state_dict"):
        everyone = world.gather(told)
    whole = {i: values for i, values in state.items() if i not in ours}
    with plainly():
        for i, param in ours.items():
            holder = param.spread.speaker
            for key, kind in everyone[holder].get(i, {}).items():
                own = state.get(i, {}).get(key)
                whole.setdefault(i, {})[key] = _full_value(param, own, kind)
    return {**packed, "state": dict(sorted(whole.items()))}


def _told(value: Any) -> Any:
    """What ranks without a part of the parameter need of its state: a type, or a number."""
    if isinstance(value, Sharded):
        return value.dtype
    if isinstance(value, Tensor):
        return None if value.dim() else value.cpu()
    return None if isinstance(value, (list, dict)) else value


def _full_value(param: ShardedParameter, own: Any, told: Any) -> Any:
    if not isinstance(told, torch.dtype):
        return own if told is None else told
    part = own if own is not None else torch.empty(param.shape, dtype=told, device=param.device)
    return param.spread.gathered(part.detach())
