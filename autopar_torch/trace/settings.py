"""Objects of settings: forward reads them as it runs, and a trace keeps what they were."""

from __future__ import annotations

import contextlib
import copy
import dis
import itertools
import os
import sys
import zlib
from collections import deque
from collections.abc import Container, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

OUTSIDE = "outside of the model: "
_OWN = ("autopar_torch",)  # its wrappers hold what is watched anyway
PLAIN = (int, float, bool, str, type(None))
# Settings of transformers that no forward reads: `save_pretrained` writes them, on one rank alone.
UNREAD = frozenset({"use_cache", "architectures", "dtype"})
DEPTH, MOST, LONGEST = 6, 1000, 1000  # of objects in objects; of objects; of a list
_NONE = ("torch", "numpy", "logging", "threading", "builtins", "functools")  # make no settings
_PYTHON = os.path.dirname(os.__file__)  # a package of the user's may have the name of one of its
_LIBRARIES = {*_NONE, *sys.stdlib_module_names, "transformers", "autopar_torch"}  # not followed


class Mention(NamedTuple):
    """A name that code mentions, and what holds its value: a dict, or an object."""

    name: str
    own: Any
    key: str

    def get(self) -> Any:
        if isinstance(self.own, dict):
            return self.own.get(self.key)
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            return getattr(self.own, self.key, None)

    def put(self, value: Any) -> None:
        own = self.own
        if isinstance(own, type):  # where it was
            own = next((base for base in own.__mro__ if self.key in vars(base)), own)
        put = own.__setitem__ if isinstance(own, dict) else partial(setattr, own)
        put(self.key, value)


def is_plain(value: Any, depth: int = 8) -> bool:
    """Whether a value is fully described by its text."""
    if isinstance(value, PLAIN):
        return True
    if isinstance(value, (tuple, list, set, deque)):
        return depth > 0 and len(value) <= LONGEST and all(is_plain(v, depth - 1) for v in value)
    return isinstance(value, dict) and is_plain(list(value.items()), depth)


def text_of(value: Any) -> str:
    """Of a plain value; a set has another order in every process."""
    if isinstance(value, dict):
        return f"dict {text_of(list(value.items()))}"
    if isinstance(value, (tuple, list, set, deque)):
        parts = [text_of(v) for v in value]
        return f"{type(value).__name__} {sorted(parts) if isinstance(value, set) else parts}"
    return repr(value)


def is_settings(value: Any) -> bool:
    """A namespace, a dataclass, a config, or any other object with attributes."""
    return (isinstance(getattr(value, "__dict__", None), dict)
            and not isinstance(value, (nn.Module, Tensor, type, ModuleType))
            and type(value).__module__.partition(".")[0] not in _NONE)


def settings_in(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Objects of settings among named values and inside of them, with a path, the nearest first."""
    todo, seen = deque((*own, DEPTH) for own in values), set[int]()
    while todo and len(seen) < MOST:
        path, value, depth = todo.popleft()
        if id(value) in seen or is_plain(value):
            continue
        seen.add(id(value))
        held: Iterable[tuple[Any, Any]] = ()
        if is_settings(value):
            yield path, value
            held = vars(value).items()
        elif isinstance(value, dict):
            held = value.items()
        elif isinstance(value, (tuple, list, deque)):
            held = enumerate(itertools.islice(value, LONGEST))
        todo.extend((f"{path}.{key}", own, depth - 1) for key, own in list(held) if depth)


def copied(value: Any) -> Any:
    """A copy of a plain value; what has no copy, as `sys.flags`, is its own."""
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever it has against copies
        return value


def function_of(value: Any) -> Any:
    """Of a method or a property; anything else is itself."""
    if isinstance(value, (MethodType, classmethod, staticmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def roots(value: Any) -> Iterator[tuple[str, nn.Module]]:
    """A module, or those in a list or dict."""
    if isinstance(value, nn.Module):
        yield "", value
    held = value.items() if isinstance(value, dict) else (
        enumerate(value) if isinstance(value, (list, tuple)) else ())
    for key, own in itertools.islice(held, LONGEST):
        if isinstance(own, nn.Module):
            yield str(key), own


def watched(model: nn.Module, loss_fn: Any) -> tuple[dict[str, nn.Module], list[Mention]]:
    """The modules of a model by name, those outside that it mentions too, and all that they and its
    loss mention."""
    modules = dict(model.named_modules())
    given = Mention("loss_fn", {"loss_fn": loss_fn}, "loss_fn")
    while True:
        num, known = len(modules), {*map(id, modules.values())}
        found, places = [given], dict[str, list[Any]]()
        for mention in mentioned({type(own) for own in modules.values()}, [loss_fn]):
            same = places.setdefault(mention.name, [])  # as variables of two functions of one name
            if not any(own is mention.own for own in same):
                same.append(mention.own)
            number = next(k for k, own in enumerate(same) if own is mention.own)
            found.append(mention._replace(name=f"{mention.name} {number}") if number else mention)
        for mention in found:
            modules |= {".".join(filter(None, (f"{OUTSIDE}{mention.name}", root, name))): own
                        for root, top in roots(mention.get()) for name, own in top.named_modules()
                        if id(own) not in known and not _is_library(type(own), _OWN)}
        if len(modules) == num:
            return modules, found


def mentioned(kinds: Iterable[type], functions: Iterable[Any]) -> Iterator[Mention]:
    """What forward of these classes, and what it calls by name, may read besides: attributes of the
    classes, global names, variables of functions around, attributes of modules and classes."""
    seen = set[int]()
    for kind in (None, *kinds):
        held = {key: base for base in reversed(kind.__mro__ if kind else ())
                if not _is_library(base) for key in vars(base)}
        todo: deque[Any] = deque(vars(held[key])[key] for key in ("forward",) if key in held)
        todo.extend(() if kind else functions)
        while todo:
            own = function_of(todo.popleft())
            if not isinstance(own, FunctionType) or _is_library(own) or id(own) in seen:
                continue
            seen.add(id(own))
            attributes, names = _names(own.__code__)
            for key in attributes & held.keys():
                yield Mention(f"{held[key].__qualname__}.{key}", kind, key)
                todo.append(vars(held[key])[key])
            found = [Mention(f"{own.__module__}.{name}", own.__globals__, name)
                     for name in names & own.__globals__.keys()]
            found += [Mention(f"{own.__qualname__}.{name}", cell, "cell_contents") for name, cell
                      in zip(own.__code__.co_freevars, own.__closure__ or (), strict=True)]
            for mention in found:
                yield mention
                value = mention.get()
                todo.append(value)
                if isinstance(value, (ModuleType, type)) and not _is_library(value):
                    for key in attributes & vars(value).keys():
                        yield Mention(f"{value.__name__}.{key}", value, key)
                        todo.append(vars(value)[key])


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """Of attributes, and of globals."""
    names = {str(step.argval) for step in dis.get_instructions(code)
             if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = [_names(own) for own in code.co_consts if isinstance(own, CodeType)]
    return (set(code.co_names).union(*(own for own, _ in inner)),
            names.union(*(own for _, own in inner)))


def _is_library(own: Any, names: Container[str] = _LIBRARIES) -> bool:
    home = getattr(own, "__module__", None) or getattr(own, "__name__", "")
    name = str(home).partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None) or _PYTHON
    return name in names and (name not in sys.stdlib_module_names or file.startswith(_PYTHON))


def shown(value: Any) -> str:
    """Text of an argument that is no tensor, by what it holds: never an address."""
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {zlib.crc32(value.tobytes())}"
    if is_settings(value):
        return repr([(path, type(own).__qualname__, sorted(
            (key, shown(item)) for key, item in vars(own).items() if not is_settings(item)))
            for path, own in settings_in([("", value)])])
    if isinstance(value, FunctionType):
        code, cells = value.__code__, [Mention("", own, "cell_contents").get()
                                       for own in value.__closure__ or ()]
        return repr((code.co_filename, code.co_firstlineno, value.__qualname__,
                     shown(value.__defaults__),
                     [shown(own) for own in cells if not isinstance(own, FunctionType)]))
    if isinstance(value, partial):
        return repr([shown(own) for own in (value.func, *value.args, *value.keywords.items())])
    text = text_of(value)
    return type(value).__qualname__ if text == object.__repr__(value) else text
