"""What a call of the model returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Outputs(dict[str, Any]):
    """What a model returned, by name, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def returned(values: dict[str, Tensor], names: tuple[str, ...]) -> Any:
    return values["loss"] if names == ("loss",) else Outputs(values)
