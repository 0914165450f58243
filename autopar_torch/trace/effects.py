"""What forward does that a trace would lose: found while it runs as Python, and refused by name.

The trace keeps tensor operations only. Counters, Python's random numbers, hooks that look on and
the backward of a user's own `autograd.Function` would be gone without a word.
"""

from __future__ import annotations

import contextlib
import linecache
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from ..errors import TraceError
from .burnt import HOOKS, PLAIN, Read, attributes, is_library, kind_of, user_hooks

_TORCH = torch.__file__.rsplit("/", 1)[0]
_OTHERS = "; or let it train untraced, with data parallelism"


class Effects:
    """What one trace has seen of the Python around the tensor operations."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.reads: set[Read] = set()
        self.lines: dict[tuple[int, str], str] = {}  # where an attribute was written

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Around the whole trace."""
        _refuse_backward_hooks(self.model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_restored(self.model))
            stack.enter_context(self._noted())
            stack.enter_context(_functions_refused())
            stack.enter_context(_hooks_asked(self.model))
            yield

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        """Around forward itself: nothing else may have changed when it returns."""
        names = {id(m): name for name, m in self.model.named_modules()}
        before = {id(m): _snapshot(m) for m in self.model.modules()}
        drawn = random.getstate(), np.random.get_state()
        yield
        if random.getstate() != drawn[0] or _differs(np.random.get_state(), drawn[1]):
            raise TraceError(
                "forward draws random numbers from Python or numpy, so a trace would repeat the "
                "first ones for ever", where="forward",
                fix="draw with torch (torch.rand(()) is drawn anew at every step)" + _OTHERS,
            )  # fmt: skip
        for module in self.model.modules():
            for key in _changed(before.get(id(module), {}), _snapshot(module)):
                if self.lines.get((id(module), key), "").startswith(_TORCH):
                    continue  # weight_norm, pruning: derived from parameters in every forward
                raise TraceError(
                    f"forward changes {names.get(id(module)) or 'the model'}.{key}, and a trace "
                    "would change it once", where=self.lines.get((id(module), key), "forward"),
                    fix="register it as a buffer, or change it outside of forward" + _OTHERS,
                )  # fmt: skip

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Every attribute that is read of a module, and where each is written."""
        write = nn.Module.__setattr__
        kinds: dict[type, str] = {}

        def get(module: Any, key: str) -> Any:
            kind = type(module)
            self.reads.add((kinds.get(kind) or kinds.setdefault(kind, kind_of(module)), key))
            return object.__getattribute__(module, key)

        def put(module: Any, key: str, value: Any) -> None:
            frame = sys._getframe(1)
            self.lines[id(module), key] = _line(frame.f_code.co_filename, frame.f_lineno)
            write(module, key, value)

        nn.Module.__getattribute__ = get  # type: ignore[method-assign, assignment]
        nn.Module.__setattr__ = put  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = write  # type: ignore[method-assign]


def _line(file: str, number: int) -> str:
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


class _Filled(NamedTuple):
    """A list, dict or set, and what it held."""

    thing: Any
    items: list[Any]

    def restore(self) -> Any:
        self.thing.clear()
        (self.thing.extend if isinstance(self.thing, list) else self.thing.update)(self.items)
        return self.thing


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """Attributes as they are; of lists and dicts what they hold."""
    return {name: _Filled(value, list(value.items() if isinstance(value, dict) else value))
            if isinstance(value, (list, dict, set)) else value
            for name, value in attributes(module) if name != "training"}  # fmt: skip


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """What the trace has changed is as it was: the first call of forward is still to come."""
    before = [(module, _snapshot(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, then in before:
            now = vars(module)
            for key in _changed(then, _snapshot(module)):
                if key in then:
                    old = then[key]
                    now[key] = old.restore() if isinstance(old, _Filled) else old
                else:
                    del now[key]


def _changed(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    gone = object()
    pairs = [(key, then.get(key, gone), now.get(key, gone)) for key in {**then, **now}]
    return [key for key, old, new in pairs if old is not new and not _equal(old, new)]


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)):
        return len(old) == len(new) and all(a is b or _equal(a, b)
                                            for a, b in zip(old, new, strict=True))  # fmt: skip
    return isinstance(old, PLAIN) and isinstance(new, PLAIN) and bool(old == new)


def _differs(a: Any, b: Any) -> bool:
    return bool((a[1] != b[1]).any()) or a[2:] != b[2:]


def _refuse_backward_hooks(model: nn.Module) -> None:
    everywhere = nn.modules.module
    for name, module in model.named_modules():
        for kind, hook in user_hooks(module):
            if "backward" in kind:
                _refuse_hook(hook, kind, name, "is never called in a traced backward")
    for kind in HOOKS:
        for hook in getattr(everywhere, f"_global{kind}", {}).values():
            if not is_library(hook):
                _refuse_hook(hook, f"_global{kind}", "every module", "is not kept by a trace")


def _refuse_hook(hook: Any, kind: str, name: str, what: str) -> None:
    called = getattr(hook, "__qualname__", type(hook).__qualname__)
    raise TraceError(
        f"the hook {called} ({kind.strip('_')}) of {name or 'the model'} {what}",
        where=name or "the model",
        fix="remove it before training, or compute it in forward" + _OTHERS,
    )  # fmt: skip


@contextlib.contextmanager
def _hooks_asked(model: nn.Module) -> Iterator[None]:
    """A forward hook that returns nothing only looks on: in a trace it would look once."""
    saved: list[tuple[dict[int, Any], int, Any]] = []
    for name, module in model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            table = getattr(module, kind)
            for key, hook in table.items():
                if not is_library(hook):
                    saved.append((table, key, hook))
                    table[key] = _asked(hook, kind, name)
    try:
        yield
    finally:
        for table, key, hook in saved:
            table[key] = hook


def _asked(hook: Callable[..., Any], kind: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None:
            _refuse_hook(hook, kind, name, "returns nothing, so a trace would not call it again")
        return result

    return call


@contextlib.contextmanager
def _functions_refused() -> Iterator[None]:
    """The backward that a user has written for a function is not in a trace."""
    own = vars(torch.autograd.Function)["apply"]
    known = [f for f in _all_functions(torch.autograd.Function) if not is_library(f)]
    saved = [(f, vars(f).get("forward")) for f in known]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return own.__func__(cls, *args, **kwargs) if is_library(cls) else _refuse_function(cls)

    def unrolled(run: Callable[..., Any], _: bool, *args: Any) -> Any:
        trained = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            return run(*args)

    # Reentrant checkpoints run forward without gradients and again in backward: once is enough.
    CheckpointFunction.apply = staticmethod(unrolled)  # type: ignore[method-assign, assignment]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    for function in known:  # `f = F.apply`, taken before, does not ask Function again
        function.forward = staticmethod(_refusing(function))
    try:
        yield
    finally:
        del CheckpointFunction.apply
        torch.autograd.Function.apply = own  # type: ignore[method-assign]
        for function, forward in saved:
            if forward is None:
                del function.forward
            else:
                function.forward = forward


def _all_functions(base: Any) -> Iterator[Any]:
    for function in base.__subclasses__():
        yield function
        yield from _all_functions(function)


def _refusing(function: Any) -> Callable[..., Any]:
    return lambda *_, **__: _refuse_function(function)


def _refuse_function(function: Any) -> Tensor:
    raise TraceError(
        f"{function.__qualname__} is an autograd.Function with a backward of its own, which a "
        "trace does not keep", where=_caller(),
        fix="write it with torch operations or as a torch.library.custom_op" + _OTHERS)  # fmt: skip


def _caller() -> str:
    """The innermost line that is neither torch's nor ours."""
    frame, homes = sys._getframe(2), (_TORCH, __file__.rsplit("/", 1)[0])
    while frame.f_back is not None and frame.f_code.co_filename.startswith(homes):
        frame = frame.f_back
    return _line(frame.f_code.co_filename, frame.f_lineno)
