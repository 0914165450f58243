"""What forward does that a trace would lose: found while it runs as Python, and refused by name.

The trace keeps tensor operations only. Counters, Python's random numbers and hooks that look on
would be gone without a word.
"""

from __future__ import annotations

import contextlib
import linecache
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from ..errors import TraceError
from .burnt import (
    HOOKS,
    PLAIN,
    UNREAD,
    Read,
    attributes,
    configs,
    is_library,
    kind_of,
    user_hooks,
)

_TORCH = torch.__file__.rsplit("/", 1)[0]
_OTHERS = "; or let it train untraced, with data parallelism"
Attributes = dict[str, tuple[Any, Any]]  # attribute -> (object, what it holds)


class Effects:
    """What one trace has seen of the Python around the tensor operations."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.configs = configs(model.modules())
        self.before = {id(own): (own, _state(own)) for own in (*model.modules(), *self.configs)}
        self.read: set[tuple[type, str]] = set()
        self.lines: dict[tuple[int, str], str] = {}  # where an attribute was written
        self.changed: TraceError | None = None  # says which attribute is another afterwards
        self.after: list[tuple[Any, Attributes]] = []  # export undoes changes of attributes

    @property
    def reads(self) -> frozenset[Read]:
        return frozenset((kind_of(kind), key) for kind, key in self.read)

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Around the trace."""
        _refuse_hooks(self.model)
        with (attributes_set(nn.Module, __getattribute__=self._getter(),
                             __setattr__=self._setter()),
              attributes_set(CheckpointFunction, apply=staticmethod(_unrolled))):
            yield

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """The model is then as it was: its first forward is still to come."""
        children = [(own._modules, dict(own._modules)) for own in self.model.modules()]
        try:
            yield
        finally:
            restore(self.before.values())
            for now, then in children:
                now.clear()
                now.update(then)

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        """Around forward itself: what else has changed when it returns must not be tensors."""
        drawn = _numbers()
        yield
        if _numbers() != drawn:
            raise TraceError(
                "forward draws random numbers from Python or numpy, so a trace would repeat the "
                "first ones for ever", where="forward",
                fix="draw with torch (torch.rand(()) is drawn anew at every step)" + _OTHERS,
            )
        named = [*self.model.named_modules(), *(("config", own) for own in self.configs)]
        for name, own in named:
            then, now = self.before.get(id(own), (own, Attributes()))[1], _state(own)
            self.after.append((own, now))
            for key in {**then, **now}:
                line = self.lines.get((id(own), key), "forward")
                if line.startswith(_TORCH):
                    continue  # weight_norm, pruning: derived from parameters in every forward
                if name == "config" and (key in UNREAD or then.get(key, (None,))[0] is None):
                    continue  # a default filled in: every trace fills in the same
                if key in then and key in now and _equal(then[key][1], now[key][1]):
                    continue
                self.changed = self.changed or TraceError(
                    f"forward changes {name or 'the model'}.{key}, and a trace would change it "
                    "once", where=line,
                    fix="register it as a buffer, or change it outside of forward" + _OTHERS,
                )
                if key not in now or any(isinstance(x, Tensor) for x in tree_leaves(now[key])):
                    raise self.changed

    def _getter(self) -> Callable[..., Any]:
        def get(module: Any, key: str) -> Any:
            self.read.add((type(module), key))
            return object.__getattribute__(module, key)

        return get

    def _setter(self) -> Callable[..., None]:
        write = nn.Module.__setattr__

        def put(module: Any, key: str, value: Any) -> None:
            frame = sys._getframe(1)
            file, number = frame.f_code.co_filename, frame.f_lineno
            line = linecache.getline(file, number).strip()
            self.lines[id(module), key] = f"{file}:{number}: {line}"
            held = vars(module).get("_buffers", {})  # a stand-in of export has none yet
            if held.get(key, value) is not value and not file.startswith(_TORCH):
                raise TraceError(f"forward puts another tensor in the place of the buffer {key}",
                                 where=self.lines[id(module), key],
                                 fix=f"write into it: self.{key}.copy_(...)" + _OTHERS)
            write(module, key, value)

        return put


@contextlib.contextmanager
def attributes_set(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of a class or an object, for a while."""
    before = {name: vars(owner).get(name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            delattr(owner, name) if old is None else setattr(owner, name, old)


def _numbers() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state()))


def _state(own: Any) -> Attributes:
    return {name: (value, _held(value)) for name, value in attributes(own)}


def _held(value: Any) -> Any:
    if isinstance(value, dict):
        return list(value.items())
    return list(value) if isinstance(value, (list, set)) else value


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)):
        return len(old) == len(new) and all(map(_equal, old, new))
    return old is new or (isinstance(old, PLAIN) and isinstance(new, PLAIN) and bool(old == new))


def restore(states: Iterable[tuple[Any, Attributes]]) -> None:
    """Give modules and configs the attributes that they had once."""
    for own, then in states:
        now = vars(own)
        for name in [name for name, _ in attributes(own) if name not in then]:
            del now[name]
        for name, (value, items) in then.items():
            now[name] = value
            if value is not items and not _equal(_held(value), items):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(
                    dict(items) if isinstance(value, dict) else items)


def _unrolled(run: Callable[..., Any], _: bool, *args: Any) -> Any:
    """Reentrant checkpoints run forward without gradients and again in backward: once is enough."""
    trained = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        return run(*args)


def _refuse_hooks(model: nn.Module) -> None:
    """Refuse all hooks, untried: in a trace, what a hook keeps would be tensors without data."""
    for name, module in model.named_modules():
        for kind, hook in user_hooks(module):
            raise _hook_error(hook, kind, name, "would be called once in a trace, if at all")
    for kind in HOOKS:
        for hook in getattr(nn.modules.module, f"_global{kind}").values():
            if not is_library(hook):
                raise _hook_error(hook, kind, "every module", "is not kept by a trace")


def _hook_error(hook: Any, kind: str, name: str, what: str) -> TraceError:
    called = getattr(hook, "__qualname__", type(hook).__qualname__)
    where = name or "the model"
    return TraceError(
        f"the hook {called} ({kind.strip('_')}) of {where} {what}", where=where,
        fix="remove it before training, or compute it in forward" + _OTHERS,
    )
