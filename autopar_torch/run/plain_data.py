"""`parameter.data = value`, where the parameter is a plain one and the value stands for a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .sharded import Sharded, plainly

_DATA: Any = vars(torch._C.TensorBase)["data"]


class Data:
    """`data` of every parameter: torch would take this rank's part for the whole."""

    __name__ = "data"

    def __get__(self, x: Tensor | None, owner: Any = None) -> Any:
        return self if x is None else _DATA.__get__(x, owner)

    def __set__(self, x: Tensor, value: Tensor) -> None:
        if isinstance(value, Sharded) and not isinstance(x, Sharded):
            with plainly():
                value = value.full()
        _DATA.__set__(x, value)


def attend() -> None:
    nn.Parameter.data = Data()  # type: ignore[assignment]
