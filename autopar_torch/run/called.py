"""What a function is that Python calls with a tensor, by its name."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch

_OPERATOR = re.compile(
    "__(?:([ir]?)(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor)"
    "|neg|pos|abs|invert|eq|ne|lt|le|gt|ge)__"
)


@cache
def name_of(func: Any) -> str:
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name.strip('_')} {func.__self__.__name__}"
    operator = _OPERATOR.fullmatch(name)
    if operator is None:
        return name
    return "operator_" if operator[1] == "i" else "operator"


def in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


_ALSO = frozenset({
    "operator", "multiply", "subtract", "divide", "absolute", "negative", "greater",
    "greater_equal", "less", "less_equal", "not_equal", "floor_divide", "copy", "zero", "fill",
    "clone", "detach", "contiguous", "positive", "zeros_like", "ones_like", "full_like",
    "empty_like", "float", "double", "half", "bfloat16", "int", "long", "bool", "to", "type",
    "cpu", "cuda", "pin_memory",
})
# Tagged so, but they reduce, draw numbers, or are something else with other arguments.
_NOT = frozenset(("equal", "max", "min", "where", "rrelu", "native_dropout_backward"))


@cache
def is_elementwise(name: str) -> bool:
    base = name.removeprefix("_foreach_")
    if base.startswith("__") or base.rstrip("_") in _NOT:
        return False
    packets = [getattr(torch.ops.aten, one, None) for one in (base, base.rstrip("_"))]
    return base.rstrip("_") in _ALSO or any(
        torch.Tag.pointwise in getattr(packet, overload).tags
        for packet in packets if packet is not None for overload in packet.overloads()
    )
