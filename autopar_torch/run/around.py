"""A module around the user's, with the attributes of both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import nn

from ..progress import warn

log = logging.getLogger("autopar_torch")
_SHARED = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class Around(nn.Module):
    """What it has not itself is read from the user's module, set there, and deleted there. Its
    children, parameters and buffers are those of the user's module, under their names."""

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not yet
            raise AttributeError(name)
        return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload, no-any-return]

    def __bool__(self) -> bool:
        return True

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":  # no child: whoever walks along children meets those of the user's
            vars(self).update({name: value, **{own: getattr(value, own) for own in _SHARED}})
        elif self._is_own(name):  # not as a child or parameter, of which the user's has that name
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_parameter(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        self.module.add_module(*args, **kwargs)

    register_module = add_module

    def train(self, mode: Any = True, *more: Any, **named: Any) -> Any:
        if more or named or not isinstance(mode, int):  # a method of the model's own
            return self.module.train(mode, *more, **named)  # type: ignore[call-arg]
        self.module.train(bool(mode))
        return self

    @property
    def training(self) -> bool:  # type: ignore[override]
        """That of the module, whoever has set it."""
        return "module" not in vars(self) or vars(self)["module"].training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in vars(self):
            self.module.training = mode

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        self.module.apply(fn)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """Of `load_state_dict()` of a module around this one."""
        self.module._load_from_state_dict(*args)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)

    def _is_own(self, name: str) -> bool:
        """Until it is made, all is; then what it has, may have, or keeps to itself."""
        own = vars(self)
        return ("_is_made" not in own or name in own or name == "module"
                or hasattr(type(self), name)
                or any(name in getattr(kind, "__annotations__", {}) for kind in type(self).__mro__)
                or (name.startswith("_") and not hasattr(self.module, name)))

    def _ready(self) -> None:
        """From now on the user sets attributes, too."""
        self._is_made = True
        theirs = {**vars(self.module), **self.module._buffers, **self.module._parameters,
                  **self.module._modules}
        if hidden := sorted(name for name in theirs.keys() - vars(nn.Module()).keys()
                            if name[0] != "_" and self._is_own(name)
                            and str(vars(self).get(name)) != str(theirs[name])):
            warn(log, "attributes of the model that have names of its wrapper are found in "
                      "model.module only: %s", ", ".join(hidden))
