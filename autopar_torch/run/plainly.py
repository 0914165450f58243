"""Settings of an optimizer as plain values, and back."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..errors import CheckpointError

_FLOAT = "float"  # JSON has no infinity


def plain(value: Any, where: str) -> Any:
    """A value that JSON holds exactly; others are refused by name."""
    if hasattr(value, "item") and (not isinstance(value, Tensor) or value.numel() == 1):
        value = value.item()  # of torch or numpy
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(v, where) for v in value]
    raise CheckpointError(f"a {type(value).__name__} cannot be written down", where=where,
                          fix="keep numbers, texts and lists of them there")


def parsed(value: Any) -> Any:
    """The value again; tuples have become lists."""
    if isinstance(value, dict):
        return float(value[_FLOAT])
    return [parsed(v) for v in value] if isinstance(value, list) else value


def like(value: Any, here: Any) -> Any:
    """The value in the form that the optimizer has it in now."""
    if isinstance(here, Tensor) and isinstance(value, (int, float)):
        here.detach().fill_(value)  # compiled steps and schedulers know this object
        return here
    return tuple(value) if isinstance(here, tuple) and isinstance(value, list) else value
