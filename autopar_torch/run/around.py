"""A module around the user's, with the attributes of both."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

log = logging.getLogger("autopar_torch")


class Around(nn.Module):
    """What it has not itself is read from the user's module, set there, and deleted there."""

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
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
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_parameter(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        self.module.add_module(*args, **kwargs)

    register_module = add_module

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
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
            log.warning("attributes of the model that have names of its wrapper are found in "
                        "model.module only: %s", ", ".join(hidden))
