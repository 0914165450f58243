"""What a trace has burnt in, and whether it has changed since.

A trace goes on whatever happens to the module later. So the module tree is looked at before every
call: modes, hooks, which parameters are trained, and the plain attributes that forward was seen to
read. The quick check compares identities only; what it finds changed is described and compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

ReadAttributes = Mapping[tuple[str, str], str]  # (what holds it, attribute) -> its value, as text
Read = tuple[str, str]  # class of a module, attribute
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PLAIN = (int, float, bool, str, type(None))
_OWN = frozenset(vars(nn.Module())) - {"training"}
_IGNORED = frozenset({"_output_capturing_hooks_installed"})  # by transformers, at its first call
# Settings of transformers that no forward reads: `save_pretrained` writes them, on one rank alone.
UNREAD = frozenset({"use_cache", "architectures", "dtype"})
_LIBRARIES = ("torch.", "transformers.")
_grad, _version = attrgetter("requires_grad"), attrgetter("_version")


def is_library(hook: Any) -> bool:
    """Hooks of libraries do their work within forward, where a trace sees it."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return f"{home}.".startswith(_LIBRARIES)


def user_hooks(module: nn.Module) -> list[tuple[str, Any]]:
    return [(kind, hook) for kind in HOOKS for hook in getattr(module, kind, {}).values()
            if not is_library(hook)]


def attributes(own: Any) -> Iterator[tuple[str, Any]]:
    """What a module holds besides parameters, buffers, submodules and hooks; or a config, all."""
    for name, value in vars(own).items():
        if name not in _OWN and name not in _IGNORED:
            yield name, value


def configs(modules: Iterable[nn.Module]) -> list[Any]:
    """The settings of Hugging Face models: forward reads them when it runs."""
    found = {id(c): c for m in modules if (c := vars(m).get("config")) is not None}
    return [c for c in found.values() if isinstance(getattr(c, "__dict__", None), dict)]


def kind_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_plain(value: Any, depth: int = 2) -> bool:
    """Whether a value is fully described by its text."""
    if isinstance(value, PLAIN):
        return True
    if isinstance(value, (tuple, list, set)):
        return depth > 0 and len(value) <= 1000 and all(is_plain(v, depth - 1) for v in value)
    return isinstance(value, dict) and is_plain(list(value.items()), depth)


class Burnt:
    """The state of a module tree; `number` rises whenever something in it has changed."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.number = model, 0
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
        """Equal on all ranks where the module is."""
        if self._digest[0] != self.number:
            text = repr(sorted(self.state.items()))
            made = hashlib.blake2b(text.encode(), digest_size=7).digest()
            self._digest = self.number, int.from_bytes(made)
        return self._digest[1]

    def _same(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # parameters that mean whole tensors are slow
            return (
                all(len(d) == len(values) and all(map(is_, d.values(), values))
                    for d, values in self._tables)
                and list(map(len, self._hooks)) == self._num_hooks
                and list(map(_grad, self._tensors)) == self._grads
                and list(map(_version, self._loose)) == self._versions
                and self._containers == self._copies
            )

    def _refresh(self) -> None:
        modules = dict(self.model.named_modules())
        tables: list[Any] = [vars(m) for m in modules.values()]
        tables += [
            t for m in modules.values() for t in (m._parameters, m._buffers, m._modules) if t
        ]
        tables += map(vars, configs(modules.values()))
        values = [v for m in modules.values() for _, v in attributes(m)]
        self._tables = [(table, list(table.values())) for table in tables]
        self._hooks = [getattr(m, kind) for m in modules.values() for kind in HOOKS]
        self._num_hooks = list(map(len, self._hooks))
        self._tensors = list(self.model.parameters())
        self._grads = list(map(_grad, self._tensors))
        self._loose = [v for v in values if isinstance(v, Tensor)]
        self._versions = list(map(_version, self._loose))
        self._containers = [v for v in values if isinstance(v, (list, dict, set)) and is_plain(v)]
        self._copies = [type(v)(v) for v in self._containers]
        state = dict(self._describe(modules, self.reads))
        if self.number == 0 or state != self.state:
            self.state: ReadAttributes = state
            self.number += 1

    def described(self, reads: frozenset[Read]) -> ReadAttributes:
        """What decides about a trace that has read these attributes."""
        return dict(self._describe(dict(self.model.named_modules()), reads))

    def _describe(self, modules: Mapping[str, nn.Module],
                  reads: frozenset[Read]) -> Iterator[tuple[tuple[str, str], str]]:
        for name, module in modules.items():
            kind = kind_of(type(module))
            yield (name, "class"), kind
            for key, value in attributes(module):
                if key == "training" or (kind, key) in reads:
                    yield (name, key), self._shown(value)
            for i, (where, hook) in enumerate(user_hooks(module)):
                yield (name, f"{where} {i}"), self._shown(hook)
        for name, tensor in tensors_of(self.model).items():
            yield (name, "requires_grad"), f"{tensor.requires_grad} {self._number(tensor)}"
        for i, config in enumerate(configs(modules.values())):
            for key, value in vars(config).items():
                if is_plain(value) and key not in UNREAD:
                    yield (f"config {i}", key), self._shown(value)

    def _shown(self, value: Any) -> str:
        """Text that differs for values that differ. An object is told by the order in which it was
        met, not by its address, which differs from rank to rank."""
        if is_plain(value):
            return f"{type(value).__name__} {_text(value)}"
        version = f" version {value._version}" if isinstance(value, Tensor) else ""
        return f"{type(value).__qualname__} {self._number(value)}{version}"

    def _number(self, thing: Any) -> int:
        return self._objects.setdefault(id(thing), (len(self._objects), thing))[0]


def _text(value: Any) -> str:
    """Of a plain value; a set has another order in every process."""
    if isinstance(value, dict):
        return f"dict {_text(list(value.items()))}"
    if isinstance(value, (tuple, list, set)):
        parts = [_text(v) for v in value]
        return f"{type(value).__name__} {sorted(parts) if isinstance(value, set) else parts}"
    return repr(value)


def tensors_of(model: nn.Module) -> dict[str, Any]:
    """Every parameter and buffer under each of its names."""
    return {name: tensor for items in (model.named_parameters, model.named_buffers)
            for name, tensor in items(remove_duplicate=False)}


def replaced(model: nn.Module, before: Mapping[str, Any]) -> list[str]:
    """Names of parameters and buffers that were added, removed, or are other objects now."""
    now = tensors_of(model)
    gone = [name for name in before if name not in now]
    return gone + [name for name, tensor in now.items() if before.get(name) is not tensor]
