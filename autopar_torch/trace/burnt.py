"""What a trace has burnt in, and whether it has changed since.

A trace goes on whatever happens to the module later. So the module tree is looked at before every
call: modes, hooks, which parameters are trained, and the plain attributes that forward was seen to
read. The quick check compares identities only; what it finds changed is described and compared.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .settings import (
    LONGEST,
    OUTSIDE,
    UNREAD,
    copied,
    is_plain,
    is_settings,
    roots,
    settings_in,
    shown,
    text_of,
    watched,
)

ReadAttributes = Mapping[tuple[str, str], str]  # (what holds it, attribute) -> its value, as text
Read = tuple[str, str]  # class of a module, attribute
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN = frozenset(vars(nn.Module())) - {"training"}
_IGNORED = frozenset({"_output_capturing_hooks_installed",  # by transformers, at its first call
                      "_flat_weights", "_flat_weight_refs"})  # which RNNs make of their parameters
MOST_ELEMENTS = 1 << 20  # of an array that is compared before each call
LIBRARIES = ("torch.", "transformers.")
_WORD = re.compile(r"[^][() ,]+")
_grad, _version = attrgetter("requires_grad"), attrgetter("_version")


def is_library(hook: Any) -> bool:
    """Hooks of libraries do their work within forward, where a trace sees it."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return f"{home}.".startswith(LIBRARIES)


def user_hooks(module: nn.Module) -> list[tuple[str, Any]]:
    return [(kind, hook) for kind in HOOKS for hook in getattr(module, kind, {}).values()
            if not is_library(hook)]


def attributes(own: Any) -> Iterator[tuple[str, Any]]:
    """What a module holds besides parameters, buffers, submodules and hooks; or a config, all."""
    for name, value in vars(own).items():
        if name not in _OWN and name not in _IGNORED:
            yield name, value


def _alike(now: Collection[Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def _holds_others(value: Any) -> bool:
    """A list of arrays or tensors, say."""
    return (isinstance(value, (list, tuple, dict, deque)) and len(value) <= LONGEST
            and not is_plain(value))


def _is_unused(value: Any) -> bool:
    """An empty container: libraries register objects in it where they are first used, which may be
    on one rank alone. Where plain values come into it, it is described."""
    return isinstance(value, (dict, list, set, deque)) and not value


def kind_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class Burnt:
    """The state of a module tree, and of its loss; `number` rises whenever something in it has
    changed."""

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        self.model, self.loss_fn, self.number = model, loss_fn, 0
        self.num_outside = 0  # how often something has changed that may differ from rank to rank
        self.reads: frozenset[Read] = frozenset()
        self._objects: dict[int, tuple[int, Any]] = {}  # identity -> number, and the object
        self._digest = (0, 0)
        self._tables: list[tuple[Any, list[Any]]] = []
        self._refresh()

    def compare(self) -> int:
        """Compare with what was seen last; how often it changed."""
        if not self._same():
            self._refresh()
        return self.number

    def accept(self) -> None:
        """Attributes of modules are other objects now, as a step has left something there."""
        self._tables = [(table, list(table.values())) for table, _ in self._tables]

    def learn(self, reads: frozenset[Read]) -> None:
        """Attributes that a trace has read, by class."""
        if not reads <= self.reads:
            self.reads |= reads
            self._refresh()

    @property
    def digest(self) -> int:
        """Equal on all ranks where the module is, whatever else they have (as `rank`). A list that
        was a set of texts has another order on each: only what it holds counts."""
        if self._digest[0] != self.number:
            text = repr([self.num_outside, *sorted(
                (key, sorted(_WORD.findall(value))) for key, value in self.state.items()
                if not key[0].startswith(OUTSIDE))])
            made = hashlib.blake2b(text.encode(), digest_size=7).digest()
            self._digest = self.number, int.from_bytes(made)
        return self._digest[1]

    def _same(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # parameters that mean whole tensors are slow
            return (
                all(_alike(d.values(), values) for d, values in self._tables)
                and not any(self._empty)
                and list(map(len, self._hooks)) == self._num_hooks
                and list(map(_grad, self._tensors)) == self._grads
                and list(map(_version, self._loose)) == self._versions
                and self._containers == self._copies
                and all(_alike(tree_leaves(own), leaves) for own, leaves in self._nests)
                and all(np.array_equal(own, then) for own, then in self._arrays)
                and all(mention.get() is value for mention, value in self._mentioned)
            )

    def _refresh(self) -> None:
        modules, named = watched(self.model, self.loss_fn)
        self._around = {name: own for name, own in modules.items() if name.startswith(OUTSIDE)}
        held = [t for m in modules.values() for t in (m._parameters, m._buffers, m._modules)]
        self._empty = [table for table in held if not table]
        self._mentioned = [(mention, value) for mention in named
                           if is_plain(value := mention.get()) or is_settings(value)
                           or isinstance(value, (Tensor, np.ndarray)) or any(roots(value))]
        settings = list(self._settings(modules, self.reads))
        owners = [*modules.values(), *(own for _, own in settings)]
        tables: list[Any] = [*map(vars, owners), *filter(None, held)]
        values = [v for own in owners for _, v in attributes(own)]
        values += [value for _, value in self._mentioned]
        values += [x for item in modules.items() for _, x in outside_tensors(*item)]
        self._nests = [(v, tree_leaves(v)) for v in values if _holds_others(v)]
        values += [leaf for _, leaves in self._nests for leaf in leaves]
        self._tables = [(table, list(table.values())) for table in tables]
        self._hooks = [getattr(m, kind) for m in modules.values() for kind in HOOKS]
        self._num_hooks = list(map(len, self._hooks))
        self._tensors = list(self.model.parameters())
        self._grads = list(map(_grad, self._tensors))
        self._loose = [v for v in values if isinstance(v, Tensor)]
        self._versions = list(map(_version, self._loose))
        self._containers = [v for v in values if isinstance(v, (list, dict, set, deque))
                            and is_plain(v)]
        self._copies = [*map(copied, self._containers)]
        self._arrays = [(v, v.copy()) for v in values if isinstance(v, np.ndarray)
                        and v.size <= MOST_ELEMENTS]
        state = dict(self._describe(modules, self.reads, settings))
        outside = {key: text for key, text in state.items() if key[0].startswith(OUTSIDE)}
        if self.number and not (outside.items() <= self.state.items() and state.keys() >= {
                key for key in self.state if key[0] == OUTSIDE}):
            self.num_outside += 1
        if self.number == 0 or state != self.state:
            self.state: ReadAttributes = state
            self.number += 1

    def described(self, reads: frozenset[Read]) -> ReadAttributes:
        """What decides about a trace that has read these attributes."""
        modules = {**dict(self.model.named_modules()), **self._around}
        return dict(self._describe(modules, reads, self._settings(modules, reads)))

    def _settings(self, modules: Mapping[str, nn.Module],
                  reads: frozenset[Read]) -> Iterator[tuple[str, Any]]:
        """Objects that forward reads when it runs."""
        held = [(f"{name}.{key}", value) for name, own in modules.items()
                for key, value in attributes(own)
                if key == "config" or (kind_of(type(own)), key) in reads]
        return settings_in(held + [(f"{OUTSIDE}{name}", value)
                                   for (name, *_), value in self._mentioned])

    def _describe(self, modules: Mapping[str, nn.Module], reads: frozenset[Read],
                  settings: Iterable[tuple[str, Any]]) -> Iterator[tuple[tuple[str, str], str]]:
        for name, module in modules.items():
            kind = kind_of(type(module))
            yield (name, "class"), kind
            for key, value in attributes(module):
                if key == "training" or (kind, key) in reads:
                    yield (name, key), self._shown(value)
            yield from (((name, key), self._shown(x)) for key, x in outside_tensors(name, module))
            for i, (where, hook) in enumerate(user_hooks(module)):
                yield (name, f"{where} {i}"), self._shown(hook)
        for name, tensor in tensors_of(self.model).items():
            yield (name, "requires_grad"), f"{tensor.requires_grad} {self._number(tensor)}"
        for (name, *_), value in self._mentioned:
            if not is_settings(value) and not _is_unused(value):
                yield (OUTSIDE, name), self._shown(value)
        for path, own in settings:
            for key, value in attributes(own):
                if (is_plain(value) and key not in UNREAD) or isinstance(
                        value, (Tensor, np.ndarray)):
                    yield (path, key), self._shown(value)

    def _shown(self, value: Any) -> str:
        """Text that differs for values that differ. An object is told by the order in which it was
        met, not by its address, which differs from rank to rank."""
        if is_plain(value):
            return f"{type(value).__name__} {text_of(value)}"
        if isinstance(value, np.ndarray):
            return shown(value)
        if _holds_others(value):
            return f"{type(value).__name__} {[self._shown(leaf) for leaf in tree_leaves(value)]}"
        version = f" version {value._version}" if isinstance(value, Tensor) else ""
        return f"{type(value).__qualname__} {self._number(value)}{version}"

    def _number(self, thing: Any) -> int:
        return self._objects.setdefault(id(thing), (len(self._objects), thing))[0]


def outside_tensors(name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Of a module outside, which a trace holds for constants."""
    if name.startswith(OUTSIDE):
        for held in (module._parameters, module._buffers):
            yield from ((key, x) for key, x in held.items() if x is not None)


def tensors_of(model: nn.Module) -> dict[str, Any]:
    """Every parameter and buffer under each of its names."""
    return {name: tensor for items in (model.named_parameters, model.named_buffers)
            for name, tensor in items(remove_duplicate=False)}


def frozen_of(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, p in model.named_parameters() if not p.requires_grad)


def replaced(model: nn.Module, before: Mapping[str, Any]) -> list[str]:
    """Names of parameters and buffers that were added, removed, or are other objects now."""
    now = tensors_of(model)
    gone = [name for name in before if name not in now]
    return gone + [name for name, tensor in now.items() if before.get(name) is not tensor]
