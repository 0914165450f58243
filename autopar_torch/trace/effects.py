"""What forward does that a trace would lose: found while it runs as Python, and refused by name.

The trace keeps tensor operations only. Counters, Python's random numbers and hooks that look on
would be gone without a word.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import linecache
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointFunction

from ..errors import PlanError, TraceError
from .burnt import (
    HOOKS,
    MOST_ELEMENTS,
    Read,
    attributes,
    is_library,
    kind_of,
    outside_tensors,
    user_hooks,
)
from .settings import (
    OUTSIDE,
    PLAIN,
    UNREAD,
    copied,
    function_of,
    is_plain,
    settings_in,
    text_of,
    watched,
)

_Cached = functools._lru_cache_wrapper
_NO_TENSORS = "torch", "numpy", "autopar_torch"  # their cached functions keep none
_TORCH = torch.__file__.rsplit("/", 1)[0]
_LEFT = (FakeTensor, bool, str, type(None))  # what a trace can leave in an attribute
_FORWARD = _BatchNorm.forward
_OTHERS = "; or data parallelism (tp=1, pp=1) may take it untraced"
Attributes = dict[str, tuple[Any, Any, dict[str, Any]]]  # -> (object, what it holds, where it is)


class Effects:
    """What one trace has seen of the Python around the tensor operations."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.modules, named = watched(model, loss_fn)
        self.settings = list(settings_in(
            (f"{name}.{key}".lstrip("."), value) for name, own in self.modules.items()
            for key, value in attributes(own)))
        self.buffers = {id(own): {n for n, value in own._buffers.items() if value is not None}
                        for own in self.modules.values()}
        self.before = {id(own): (own, self._state(own))
                       for own in (*self.modules.values(), *(own for _, own in self.settings))}
        self.outside = [(own, value, copied(value)) for own in named
                        if is_plain(value := own.get())]
        found = [(own.name, own.get()) for own in named]
        found += [(f"{name}.{key}", x) for name, own in self.modules.items()
                  for key, x in outside_tensors(name, own)]
        self.tensors = [(name.removeprefix(OUTSIDE), x, x._version) for name, x in found
                        if isinstance(x, Tensor)]
        self.read: set[tuple[type, str]] = set()
        self.early: set[tuple[int, str]] = set()  # attributes read before forward wrote them
        self.lines: dict[tuple[int, str], str] = {}  # where an attribute was written
        self.changed: TraceError | None = None  # says which attribute is another afterwards
        self.after: list[tuple[Any, Attributes]] = []  # export undoes changes of attributes
        self.kept: list[Tensor] = []  # what forward has put into attributes
        self.left: dict[str, Any] = {}  # attributes that it only leaves there, and what
        self.left_only = True  # it changes no others

    @property
    def reads(self) -> frozenset[Read]:
        early = {key for _, key in self.early}
        left = {path.rpartition(".")[2] for path in self.left} - early if self.left_only else set()
        return frozenset((kind_of(kind), key) for kind, key in self.read if key not in left)

    @functools.cached_property
    def learned(self) -> set[int]:
        """Where the parameters of this process lie that get gradients."""
        return {x.data_ptr() for x in gc.get_objects() if type(x) is nn.Parameter
                and x.requires_grad and x.numel() and x.layout == torch.strided
                and not (x.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x))}

    def refuse_lost(self, node: fx.Node, const: Any, rows: int) -> None:
        """A constant that is none: a trace would keep what it was."""
        if not isinstance(const, Tensor):
            raise TraceError(f"forward uses a {type(const).__name__}, which a trace cannot keep",
                             where="forward")
        if isinstance(const, FakeTensor):
            raise TraceError("forward computes with gradients that it has made itself "
                             "(torch.autograd.grad), which a trace does not follow",
                             where="forward")
        if any(size and size % rows == 0 for size in const.shape):
            raise TraceError("forward makes a tensor of a list as long as the batch, which a trace "
                             "cannot keep", where="forward",
                             fix="write torch.full((n,), value) or torch.arange(n)" + _OTHERS)
        if (const.layout == torch.strided and const.data_ptr() in self.learned
                and not all(map(_stops_gradients, node.users))):
            raise PlanError(f"forward or the loss reads a parameter of sizes {(*const.shape,)}, "
                            "which no plan trains, as it is no part of the model", where="forward",
                            fix="register it in the model, or read its detach()")

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Around the trace."""
        _refuse_hooks(self.model)
        with (attributes_set(nn.Module, __getattribute__=self._getter(),
                             __setattr__=self._setter()),
              attributes_set(CheckpointFunction, apply=staticmethod(_unrolled)),
              attributes_set(_BatchNorm, forward=_averaged),
              _forgotten(self.model)):
            yield

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """The model is then as it was: its first forward is still to come."""
        children = [(own._modules, dict(own._modules)) for own in self.model.modules()]
        try:
            yield
        finally:
            self._restore(self.before.values())
            for mention, value, items in self.outside:
                if mention.get() is not value:
                    mention.put(value)
                if isinstance(value, (list, dict, set, deque)) and text_of(value) != text_of(items):
                    _refill(value, _held(items))
            for now, then in children:
                now.clear()
                now.update(then)

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        """Around forward itself: what else has changed when it returns, and what it has kept."""
        drawn = python_numbers()
        yield
        if python_numbers() != drawn:
            raise TraceError(
                "forward draws random numbers from Python or numpy, so a trace would repeat the "
                "first ones for ever", where="forward",
                fix="draw with torch (torch.rand(()) is drawn anew at every step)" + _OTHERS,
            )
        self._look_outside()
        for name, own in (*self.modules.items(), *self.settings):
            is_module = isinstance(own, nn.Module)
            then, now = self.before.get(id(own), (own, Attributes()))[1], self._state(own)
            self.after.append((own, now))
            for key in {**then, **now}:
                line = self.lines.get((id(own), key), "forward")
                if line.startswith(_TORCH):
                    continue  # weight_norm, pruning: derived from parameters in every forward
                default = getattr(type(own), key, None)
                old = then[key][0] if key in then else default if is_plain(default) else None
                if not is_module and (key in UNREAD or old is None):
                    continue  # a default filled in: every trace fills in the same
                if key in then and key in now and _equal(then[key][1], now[key][1]):
                    continue
                error = TraceError(
                    f"forward changes {name or 'the model'}.{key}, and a trace would change it "
                    "once", where=line,
                    fix="register it as a buffer, or change it outside of forward" + _OTHERS,
                )
                if name.startswith(OUTSIDE) or key not in now or (
                        now[key][2] is not vars(own)  # its state_dict is another
                        and key not in own._non_persistent_buffers_set):
                    raise error
                value, items, store = now[key]
                self.kept += [x for x in tree_leaves(items) if isinstance(x, FakeTensor)]
                if is_module and store is vars(own) and isinstance(value, _LEFT) and (
                        id(own), key) not in self.early:
                    self.left[f"{name}.{key}".lstrip(".")] = value
                    self.changed = self.changed or error
                elif self.left_only:
                    self.changed, self.left_only = error, False

    def _look_outside(self) -> None:
        """What forward has changed that is no part of the model."""
        for mention, _, items in self.outside:
            if text_of(value := mention.get()) != text_of(items):
                error = TraceError(
                    f"forward changes {mention.name}, and a trace would change it once",
                    where="forward", fix="keep it in a buffer of a module" + _OTHERS)
                registered = not items and isinstance(value, (dict, list, set, deque))
                if not registered or is_plain(value) or any(
                        isinstance(x, Tensor) for x in tree_leaves(value)):
                    raise error
                self.changed, self.left_only = error, False
        for name, x, version in self.tensors:
            if x._version != version:
                raise PlanError(f"forward or the loss writes to {name}, which no plan keeps alike",
                                where="forward", fix="register it as a buffer of the model")

    def _state(self, own: Any) -> Attributes:
        """Attributes, and what is not a buffer yet."""
        known, buffers = self.buffers.get(id(own), set()), vars(own).get("_buffers", {})
        found = {name: (value, _held(value), vars(own)) for name, value in attributes(own)}
        return found | {name: (value, value, buffers) for name, value in buffers.items()
                        if name not in known}

    def settled(self, values: Iterable[Tensor]) -> None:
        """Make the model as forward has left it, with these values for what it keeps."""
        given = dict(zip(map(id, self.kept), values, strict=True))

        def value_of(x: Any) -> Any:
            return given.get(id(x), x)

        self._restore((own, {name: (value_of(value), tree_map(value_of, items),
                                    vars(own) if id(value) in given else store)
                             for name, (value, items, store) in now.items()})
                      for own, now in self.after)

    def _restore(self, states: Iterable[tuple[Any, Attributes]]) -> None:
        """Give modules and settings the attributes that they had once."""
        for own, then in states:
            for name, (_, _, store) in self._state(own).items():
                if name not in then or then[name][2] is not store:
                    del store[name]
                if name not in then and isinstance(own, nn.Module):
                    own._non_persistent_buffers_set.discard(name)
            for name, (value, items, store) in then.items():
                store[name] = value
                if value is not items and not _equal(_held(value), items):
                    _refill(value, items)

    def _getter(self) -> Callable[..., Any]:
        def get(module: Any, key: str) -> Any:
            self.read.add((type(module), key))
            if (id(module), key) not in self.lines:
                self.early.add((id(module), key))
            return object.__getattribute__(module, key)

        return get

    def _setter(self) -> Callable[..., None]:
        write = nn.Module.__setattr__

        def put(module: Any, key: str, value: Any) -> None:
            frame = sys._getframe(1)
            file, number = frame.f_code.co_filename, frame.f_lineno
            line = linecache.getline(file, number).strip()
            self.lines[id(module), key] = f"{file}:{number}: {line}"
            held = vars(module).get("_buffers", {}).get(key)  # a stand-in of export has none yet
            if held is not None and held is not value and not file.startswith(_TORCH):
                raise TraceError(f"forward puts another tensor in the place of the buffer {key}",
                                 where=self.lines[id(module), key],
                                 fix=f"write into it: self.{key}.copy_(...)" + _OTHERS)
            write(module, key, value)

        return put


def _stops_gradients(node: fx.Node) -> bool:
    without = "wrap_with_set_grad_enabled" in str(node.target) and not node.args[0]
    return without or node.target is torch.ops.aten.detach.default


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


@contextlib.contextmanager
def _forgotten(model: nn.Module) -> Iterator[None]:
    """What cached functions keep of a trace has no values: their next call is to compute it."""
    try:
        yield
    finally:
        for own in _cached(model):
            found = [x for x in gc.get_referents(own) if x is not vars(own)]
            if any(isinstance(x, FakeTensor) for x in tree_leaves(found)):
                own.cache_clear()


def _cached(model: nn.Module) -> Iterator[Any]:
    """Cached functions of the model's classes, of their modules, and of what those import."""
    kinds = {kind for own in model.modules() for kind in type(own).__mro__}
    homes = {sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules}
    imported = {x for home in homes for x in vars(home).values() if isinstance(x, ModuleType)}
    for held in map(vars, (*kinds, *homes, *imported)):
        home = str(held.get("__module__") or held.get("__name__"))
        if home.partition(".")[0] not in _NO_TENSORS:
            values = (function_of(value) for value in list(held.values()))
            yield from (value for value in values if type(value) is _Cached)


def refuse_sparse(tensors: Iterable[Tensor], line: str) -> None:
    if any(t.layout != torch.strided for t in tensors):
        raise TraceError("sparse tensors cannot be traced", where=line or "forward",
                         fix="make them dense")


def refuse_large(model: nn.Module, reads: frozenset[Read]) -> None:
    """Arrays that are too large to be compared before each call."""
    for name, own in model.named_modules():
        for key, value in attributes(own):
            if isinstance(value, np.ndarray) and value.size > MOST_ELEMENTS and (
                    kind_of(type(own)), key) in reads:
                raise TraceError(f"forward reads an array of {value.size} numbers", fix="make it a "
                                 "buffer" + _OTHERS, where=f"{name}.{key}".lstrip("."))


def python_numbers() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state()))


def _held(value: Any) -> Any:
    if isinstance(value, dict):
        return list(value.items())
    return list(value) if isinstance(value, (list, set, deque)) else value


def _refill(value: Any, items: Any) -> None:
    """A list, a dict, a set or a deque with what it held before."""
    value.clear()
    (value.extend if isinstance(value, (list, deque)) else value.update)(
        dict(items) if isinstance(value, dict) else items)


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)):
        return len(old) == len(new) and all(map(_equal, old, new))
    return old is new or (isinstance(old, PLAIN) and isinstance(new, PLAIN) and bool(old == new))


def _unrolled(run: Callable[..., Any], _: bool, *args: Any) -> Any:
    """Reentrant checkpoints run forward without gradients and again in backward: once is enough."""
    trained = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        return run(*args)


def _averaged(own: _BatchNorm, x: Tensor) -> Tensor:
    """Without a momentum, statistics are the mean of those of all batches so far: torch makes a
    Python number of their count, which a trace cannot. A momentum of 1 gives those of this one."""
    count = own.num_batches_tracked
    if own.momentum is not None or count is None or not own.training:
        return _FORWARD(own, x)
    own._check_input_dim(x)
    means = cast(Tensor, own.running_mean), cast(Tensor, own.running_var)
    news = means[0].clone(), means[1].clone()
    y = F.batch_norm(x, news[0], news[1], own.weight, own.bias, True, 1.0, own.eps)
    count.add_(1)
    for mean, new in zip(means, news, strict=True):
        mean.add_((new - mean) / count)
    return y


def refuse_messages(func: Any) -> None:
    """Ranks are not in the same place of forward, so it must not communicate by itself."""
    if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        raise PlanError(f"forward communicates by itself ({func.overloadpacket.__name__})",
                        where="forward", fix="leave it out: the batch that a rank is given is that "
                        "of all, and so is what forward makes of it")


class NoMessages(TorchDispatchMode):
    """Around a forward that runs for real, on one rank."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_messages(func)
        return func(*args, **(kwargs or {}))


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
