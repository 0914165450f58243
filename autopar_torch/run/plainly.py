"""Settings of an optimizer as plain values, and back."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..errors import CheckpointError

_FLOAT = "float"  # JSON has no infinity


def plain(value: Any, where: str) -> Any:
    """A value that JSON holds exactly; others are refused by name."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if hasattr(value, "item") and not isinstance(value, Tensor):  # a number of numpy
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, (list, tuple)):
        return [plain(v, where) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value) and _FLOAT not in value:
        return {k: plain(v, where) for k, v in value.items()}
    raise CheckpointError(f"a {type(value).__name__} cannot be written down", where=where,
                          fix="keep numbers, texts and lists of them there")  # fmt: skip


def revived(value: Any, here: Any) -> Any:
    """The value again, in the form that the optimizer has it in now."""
    if isinstance(here, Tensor) and isinstance(value, (int, float)):
        here.detach().fill_(value)  # compiled steps and schedulers know this object
        return here
    if isinstance(value, dict):
        if value.keys() == {_FLOAT} and isinstance(value[_FLOAT], str):
            return float(value[_FLOAT])
        return {k: revived(v, None) for k, v in value.items()}
    if isinstance(value, list):
        olds = here if isinstance(here, (list, tuple)) and len(here) == len(value) else value
        made = [revived(v, old) for v, old in zip(value, olds, strict=True)]
        return tuple(made) if isinstance(here, tuple) else made
    return value
