"""Numbers that Python made of the number of rows: `2 / len(x)`, `math.log(len(x))`, `n * (n - 1)`.

A trace knows them as they are for `ROWS` rows. Whatever may be one is compared with a second trace,
of another number of rows; what differs is written as a formula of the rows of the whole batch, or
refused. Sizes that are multiples of the rows need none of this: they are followed anyway.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ..errors import TraceError
from ..model import ROWS, TensorInfo
from ..shard.loss_sums import number_of_rows
from ..shard.rules import op_name
from .clean import info_of

OTHER_ROWS = 720_720  # divides by all up to 16, and `ROWS` by none: `n // 2` is no formula
MOST_DENOMINATOR, LARGE, NEAR, SAME = 10**5, 10**9, 1e-13, 1e-12
MOST_TYPED = 9  # digits of a number that somebody wrote
MOST_PARTS = 16  # into which rows are divided
FEW_DIGITS = 4  # of a constant that somebody wrote
NO_SIZE = 2**62  # ends such as 2**63 - 1
_HALVES = [k / 2 for k in range(-4, 5)]


class Formula(NamedTuple):
    """`factor * n**power * (n + shift)**shifted * log(n)**logs`."""

    power: float
    shift: int
    shifted: int
    logs: int

    def at(self, n: int) -> float:
        return float(n**self.power * (n + self.shift)**self.shifted * math.log(n)**self.logs)


FORMULAS = [Formula(power, 0, 0, logs) for logs in (0, 1) for power in _HALVES if power or logs] + [
    Formula(power, shift, shifted, 0) for power, shift, shifted in itertools.product(
        (0, 1, -1), (-1, 1, -2, 2), (1, -1))]


def is_of_rows(number: int, most_parts: int = 1) -> bool:
    """Whether a whole number is a multiple of the number of rows, or close to one, or to a part."""
    number = abs(number)
    return any(abs(number * k - m * ROWS) <= 2 * k for k in range(1, most_parts + 1)
               if (m := round(number * k / ROWS)))


@functools.lru_cache(10_000)
def may_be_of_rows(number: float) -> bool:
    """False for what is known to be made of other numbers: it was written so, or it is a root or a
    logarithm of a fraction of small numbers."""
    if not math.isfinite(number) or abs(number) > 1e30 or number == int(number):
        return math.isfinite(number) and abs(number) < 1e30 and is_of_rows(int(number))
    digits = repr(abs(number)).partition("e")[0].replace(".", "").strip("0")
    if len(digits) <= MOST_TYPED:
        return _has_rows(Fraction(repr(number)))
    found = [abs(number), number**2, number**4, number**2 * math.pi,
             abs(number) / math.pi, abs(1 - number)]
    found += [math.exp(number)] if abs(number) < 40 else []
    for value in (y for x in found if x for y in (x, 1 / x)):
        near = Fraction(value).limit_denominator(MOST_DENOMINATOR)
        size = near.numerator * near.denominator  # large ones are near to whatever number
        if 0 < size < LARGE and abs(float(near) / value - 1) < NEAR:
            return _has_rows(near)
    return True


def _has_rows(value: Fraction) -> bool:
    return is_of_rows(value.numerator) or is_of_rows(value.denominator)


class _Leaf(NamedTuple):
    """A number among the arguments of a node: its place there, and whether it is a value that is
    computed with, and no size."""

    node: fx.Node
    place: int
    number: Any
    is_value: bool


def _leaves(graph: fx.Graph) -> Iterator[_Leaf]:
    for node in graph.nodes:
        schema = node.target._schema if isinstance(node.target, OpOverload) else None
        named = {a.name: a for a in schema.arguments} if schema else {}
        given = [*zip(schema.arguments if schema else itertools.repeat(None), node.args),  # noqa: B905
                 *((named.get(name), value) for name, value in node.kwargs.items())]
        for place, (argument, value) in enumerate(given):
            kind = str(argument.real_type) if argument else ""
            values = any(word in kind for word in ("Tensor", "float", "number"))
            for leaf in pytree.tree_leaves(value):
                if type(leaf) in (int, float):
                    yield _Leaf(node, place, leaf, values or type(leaf) is float)


def _is_suspect(leaf: _Leaf) -> bool:
    number = leaf.number
    if type(number) is float and number % ROWS:
        return may_be_of_rows(number)
    number = int(number)
    if not number or abs(number) >= NO_SIZE:
        return False
    rest, power = _apart(number, ROWS)
    if power and not is_of_rows(int(rest)):
        made = type(leaf.number) is int and not leaf.node.all_input_nodes  # as `arange(n)` is
        return leaf.is_value and not made and not scales(leaf.node)
    return abs(number) > ROWS // 2 or is_of_rows(number, MOST_PARTS)


def _apart(number: float, rows: int) -> tuple[float, int]:
    """A number without its factors of so many rows, and how many these are."""
    power = 0
    while number and number % rows == 0:
        number, power = number / rows, power + 1
    return number, power


def scales(node: fx.Node) -> bool:
    """Whether a value is multiplied or divided, as losses are by the number of rows."""
    return op_name(node) in ("mul", "div") and len(node.args) == 2 and not node.kwargs


def settle(graph: fx.Graph, consts: Mapping[fx.Node, Tensor], batch: list[fx.Node],
           other: Callable[[], tuple[fx.Graph, Mapping[fx.Node, Tensor]]]) -> None:
    """Write numbers that are made of the number of rows as what makes them; `other` traces the
    model for `OTHER_ROWS`. Constants are given by their placeholders."""
    leaves = list(_leaves(graph))
    if not any(map(_is_suspect, leaves)) and not any(map(_may_hold, consts.values())):
        return
    second, seconds = other()
    twins = list(_leaves(second))
    alike = [(a.op, op_name(a)) for a in graph.nodes] == [(b.op, op_name(b)) for b in second.nodes]
    if not alike or len(leaves) != len(twins) or len(consts) != len(seconds):
        raise TraceError("what forward does depends on the number of rows", where="forward",
                         fix="let Python not decide by the size of the batch")
    for (place, value), twin in zip(consts.items(), seconds.values(), strict=True):
        if value.shape != twin.shape or not torch.equal(*(x.nan_to_num() for x in (value, twin))):
            _write_const(graph, place, value, twin, batch)
    for leaf, own in zip(leaves, twins, strict=True):
        both = _apart(leaf.number, ROWS), _apart(own.number, OTHER_ROWS)
        if leaf.number != own.number and (both[0] != both[1] or _is_suspect(leaf)):
            _write(graph, leaf, own.number, batch)


def _may_hold(const: Tensor) -> bool:
    """Whether a constant may be such a number."""
    if const.numel() != 1 or const.is_complex():
        return False
    typed = len(str(np.float32(const.item())).strip("-0.").replace(".", "")) <= FEW_DIGITS
    return is_of_rows(round(float(const))) if typed else True


def _write_const(graph: fx.Graph, place: fx.Node, value: Tensor, twin: Tensor,
                 batch: list[fx.Node]) -> None:
    found = _formula(value.item(), twin.item()) if value.numel() == twin.numel() == 1 else None
    if found is None or not batch or value.dim():
        raise _refusal("a constant", "forward")
    with graph.inserting_after(batch[0]):
        number = _number(graph, batch[0], found, value.dtype, "")
    place.replace_all_uses_with(number)


def _write(graph: fx.Graph, leaf: _Leaf, twin: Any, batch: list[fx.Node]) -> None:
    node, place = leaf.node, leaf.place
    found = _formula(leaf.number, twin)
    packet: Any = getattr(node.target, "_overloadpacket", None)
    info = info_of(node)
    whole = type(leaf.number) is int and isinstance(info, TensorInfo) and "int" in info.dtype
    if (found is None or not batch or not leaf.is_value or not hasattr(packet, "Tensor")
            or place >= len(node.args) or node.args[place] is not leaf.number
            or not isinstance(info, TensorInfo)
            or not (whole or info.dtype.startswith(("float", "bool")))):
        raise _refusal(f"what {op_name(node)} takes, {leaf.number} of {ROWS} rows,",
                       str(node.meta.get("line")) or "forward")
    with graph.inserting_before(node):
        number = _number(graph, batch[0], found, torch.int64 if whole else torch.float32,
                         node.meta.get("module", ""))
    node.target = packet.Tensor
    node.update_arg(place, number)


def _number(graph: fx.Graph, batch: fx.Node, found: tuple[float, Formula], dtype: torch.dtype,
            module: str) -> fx.Node:
    number = graph.call_function(number_of_rows, (batch, found[0], *found[1], dtype))
    number.meta = {"info": TensorInfo((), str(dtype).removeprefix("torch.")), "module": module}
    return number


def _refusal(what: str, where: str) -> TraceError:
    return TraceError(
        f"{what} depends on the number of rows in a way that cannot be followed", where=where,
        fix="sizes may be multiples of the rows n; numbers may be like n, n - 1, sqrt(n), log(n), "
        "n * (n - 1) or 1 / n, times a constant, and scale or be added to floats")


def _formula(number: float, twin: float) -> tuple[float, Formula] | None:
    """What is so much for `ROWS` rows and for `OTHER_ROWS`."""
    for formula in FORMULAS:
        factor, again = number / formula.at(ROWS), twin / formula.at(OTHER_ROWS)
        if abs(factor - again) <= SAME * abs(factor):
            return factor, formula
    return None
