"""What a call of the model returns: what the model itself would have returned.

In training only the loss, and what `outputs=` asks for, comes from all ranks: the call returns the
loss, which can be indexed and asked for attributes like the model's own output, or a tuple that can
be used like the loss; what was not gathered is there as a placeholder that says so when it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import RunError
from ..trace.form import Form, Named, as_tree


class NotGatheredError(RunError, TypeError):
    """An output was used that training does not bring together."""


class Withheld:
    """Stands for an output that was not gathered: any use of it is an error."""

    def __init__(self, name: str, why: str, fix: str) -> None:
        self.error = NotGatheredError(f"{name} {why}", where=f"the model's output {name!r}",
                                      fix=fix)

    def __repr__(self) -> str:
        return f"<{self.error.what}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        _refuse(next(leaf for leaf in flat if isinstance(leaf, Withheld)))


def _refuse(self: Withheld, *args: Any, **__: Any) -> Any:
    error = object.__getattribute__(self, "error")
    if args == ("dtype",):  # by which libraries ask for tensors
        raise AttributeError("dtype") from error
    raise error


_USES = (
    "iter len bool float int index contains getitem setitem getattr call add radd sub rsub mul "
    "rmul truediv rtruediv matmul rmatmul pow neg abs lt le gt ge eq ne array"
)
for _use in _USES.split():
    setattr(Withheld, f"__{_use}__", _refuse)
Withheld.__hash__ = object.__hash__  # type: ignore[method-assign]


class Loss(Tensor):
    """The loss, and around it what the model returned with it."""

    own: Any
    named: dict[str, Any]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        named = self.__dict__.get("named", {})
        if name in named:
            return named[name]
        return getattr(self.__dict__.get("own"), name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, slice)):
            return self.own[key]
        if isinstance(key, str):
            return self.named[key] if key in self.named else self.own[key]
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)

    def __contains__(self, key: object) -> bool:
        return key in self.own


class LossInDict(Loss):
    """Where the model returns a dict, scripts ask whether it is one."""

    __class__ = property(lambda _: dict)  # type: ignore[assignment]

    def __new__(cls, items: Any) -> Any:
        """Of what is made of its items by its type."""
        return dict(items)


class LossLike:
    """A tuple that is read like a loss where it is used as one."""

    _loss: Tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._loss if name == "loss" else getattr(self._loss, name)

    def __reduce__(self) -> Any:
        return _plain_maker(type(self).__mro__[2]), (tuple(self),)  # type: ignore[call-overload]


for _use in ("float", "format", "mul", "rmul", "truediv", "rtruediv", "sub", "rsub", "neg"):
    setattr(LossLike, f"__{_use}__", lambda self, *args, _use=f"__{_use}__": getattr(
        self._loss, _use)(*args))


@functools.cache
def _with_loss(kind: type) -> type:
    made = type(kind.__name__, (LossLike, kind), {})
    pytree.register_pytree_node(made, lambda own: (list(own), None),
                                lambda leaves, _: _plain_maker(kind)(leaves))
    return made


def _plain_maker(kind: Any) -> Any:
    return getattr(kind, "_make", kind)


def returned(values: dict[str, Tensor], form: Form, rows: int, train: bool) -> Any:
    """The model's own output; in training the loss, with the rest of the output around it."""
    if not train:
        return form.fill(values, _not_traced, rows)
    if form.is_bare:
        return values["loss"]
    own = form.fill(values, _not_gathered, rows)
    if isinstance(own, tuple):  # scripts ask whether it is one
        made: Any = tuple.__new__(_with_loss(type(own)), own)
        made._loss = values["loss"]
        return made
    loss = values["loss"].as_subclass(LossInDict if type(own) is dict else Loss)
    loss.own = own
    loss.named = {**{name: _not_gathered(name) for name in form.names}, **values}
    return loss


def leave(module: nn.Module, values: dict[str, Tensor], form: Form) -> dict[str, Tensor]:
    """Put what forward leaves in attributes there; the rest is what it returns."""
    for path, value in form.left:
        owner, _, key = path.rpartition(".")
        if isinstance(value, Named):
            value = values.get(path, _not_left(path))
        vars(module.get_submodule(owner))[key] = value
    paths = {path for path, _ in form.left}
    return {name: value for name, value in values.items() if name not in paths}


def ends_of(output: Any) -> list[Tensor]:
    """What a backward can begin at."""
    leaves = pytree.tree_leaves(as_tree(output))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _not_gathered(name: str) -> Withheld:
    fix = (f"parallelize(..., outputs=({name!r},)), or ask for it in eval mode; if your loss is "
           "made of it, parallelize(..., loss_fn=), which gets all outputs")
    return Withheld(name, "is not gathered in training", fix)


def _not_left(path: str) -> Withheld:
    return Withheld(path, "is left by forward, and training brings such together only if they are "
                    "single numbers", "return it from forward, or look at it in eval mode")


def _not_traced(name: str) -> Withheld:
    return Withheld(name, "is no tensor, so a trace does not keep it",
                    "return it as a tensor, or compute it outside of forward")
