"""Numbers that Python made of the number of rows: `2 / len(x)`, `math.log(len(x))`, `n * (n - 1)`.

A trace knows them as they are for `ROWS` rows. Whatever may be one is compared with a second trace,
of another number of rows; what differs is written as a formula of the rows of the whole batch, or
refused. Sizes that are multiples of the rows need none of this: they are followed anyway.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ..errors import TraceError
from ..model import ROWS, TensorInfo
from ..shard.loss_sums import made_of_rows, number_of_rows
from ..shard.rules import op_name
from .blocks import TracedBlock
from .clean import each_info, has_rows, info_of
from .losses import rows_in

OTHER_ROWS = 720_720  # divides by all up to 16, and `ROWS` by none: `n // 2` is no formula
NEAR, SAME = 1e-13, 1e-14
MOST_TYPED = 9  # digits of a number that somebody wrote
MOST_PARTS = 16  # into which rows are divided
FEW_DIGITS = 4  # of a constant that somebody wrote
MOST_ELEMENTS = 64  # of constants that are looked at
SMALL = 4096  # so many may well be written
NO_SIZE = 2**62  # ends such as 2**63 - 1
_HALVES = [k / 2 for k in range(-4, 5)]


class Formula(NamedTuple):
    """`n**power * (n + shift)**shifted * log(n)**logs`, of n rows."""

    power: float
    shift: float
    shifted: float
    logs: int

    def at(self, n: int) -> float:
        return made_of_rows(n, *self)


FORMULAS = [Formula(power, 0, 0, logs) for logs in (0, 1) for power in _HALVES if power or logs]
FORMULAS += [Formula(power, shift, shifted, 0) for shift in (-1, 1, -2, 2) for power, shifted in (
    *itertools.product((0, 1, -1), (1, -1)), (0, 0.5), (0, -0.5))]


def is_of_rows(number: int, most_parts: int = 1) -> bool:
    """Whether a whole number is a multiple of the number of rows, or close to one, or to a part."""
    number = abs(number)
    return any(abs(number * k - m * ROWS) <= 2 * k for k in range(1, most_parts + 1)
               if (m := round(number * k / ROWS)))


@functools.lru_cache(10_000)
def may_be_of_rows(number: float) -> bool:
    """Of a fraction: whether it is a simple number times something made of the rows; or cannot be
    told to be made of other numbers, as what was written so, a root or a logarithm of a fraction of
    small numbers."""
    made = [abs(number), number**2, abs(1 - number)]
    made += [math.exp(number)] if 1 < abs(number) < 40 else []
    if any(_is_simple(x / formula.at(ROWS)) for x in made for formula in FORMULAS):
        return True
    made += [number**4, number**2 * math.pi, abs(number) / math.pi]
    return not (_is_written(number, MOST_TYPED) or any(
        _is_fraction(y, 10**5, 10**9) for x in made if x for y in (x, 1 / x)))


def _is_simple(number: float) -> bool:
    return 1e-9 < number < 1e9 and (
        _is_written(float(f"{number:.13g}"), 4) or _is_fraction(number, 1000, 10**4))


def _is_written(number: float, most_digits: int) -> bool:
    """Whether so many digits write it."""
    return len(repr(abs(number)).partition("e")[0].replace(".", "").strip("0")) <= most_digits


def _is_fraction(value: float, most: int, largest: int) -> bool:
    """Whether it is one of small numbers. Large ones come near to whatever number there is."""
    above, below = (near := Fraction(value).limit_denominator(most)).as_integer_ratio()
    return (0 < above * below < largest and abs(float(near) / value - 1) < NEAR
            and not is_of_rows(above) and not is_of_rows(below))


class _Leaf(NamedTuple):
    """A number among the arguments of a node: its place there, and whether it is a value that is
    computed with, and no size."""

    node: fx.Node
    place: int
    number: Any
    is_value: bool


def written(graph: fx.Graph) -> Iterator[_Leaf]:
    """The numbers in a graph."""
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
    if not number or not math.isfinite(number) or abs(number) >= NO_SIZE:
        return False
    if number != int(number):
        return may_be_of_rows(number)
    number = int(number)
    if number % ROWS == 0:
        return _is_odd(number) or _is_computed_with(leaf)
    large = leaf.is_value and abs(number) > SMALL and not _is_round(number)
    return large or _is_odd(number) or picks_rows(leaf.node)


def _is_round(number: int) -> bool:
    """A power of ten or two, as people write them."""
    return not str(abs(number)).strip("0").strip("1") or not abs(number) & (abs(number) - 1)


def _told(place: int, otherwise: int = 0) -> Callable[[fx.Node], Any]:
    return lambda node: (node.args[place] if len(node.args) > place
                         else node.kwargs.get("dim", otherwise))


_PICKS: dict[str, Callable[[fx.Node], Any]] = {  # ops that are told numbers of rows, and their dims
    **dict.fromkeys(("slice", "narrow", "select", "unfold"), _told(1)),
    **dict.fromkeys(("split", "roll", "slice_scatter", "select_scatter"), _told(2)),
    **dict.fromkeys(("topk", "kthvalue"), _told(2, -1)),
    **dict.fromkeys(("tril", "triu", "diag"), lambda node: (-2, -1)),
    "diagonal": lambda node: node.args[2:4] or (0, 1),
    **dict.fromkeys(("pad", "constant_pad_nd"), lambda node: range(
        -1, -1 - len(node.args[1]) // 2, -1)),  # type: ignore[arg-type]
}


_COUNTS: dict[str, Callable[[fx.Node], Any]] = {
    **dict.fromkeys(("cumsum", "argsort", "sort"), _told(1, -1)), "topk": _told(2, -1),
    **dict.fromkeys(("bincount", "searchsorted"), lambda node: 0),
}


def picks_rows(node: fx.Node) -> bool:
    """Whether it takes some of the rows by their numbers."""
    return _is_along_rows(node, _PICKS)


def counts_rows(node: fx.Node) -> bool:
    """Whether it makes numbers of rows, or of what rows have."""
    made = node.op == "call_function" and not node.all_input_nodes and has_rows(info_of(node))
    return made or _is_along_rows(node, _COUNTS)


def _is_along_rows(node: fx.Node, dims_of: Mapping[str, Callable[[fx.Node], Any]]) -> bool:
    if op_name(node) not in dims_of or not node.all_input_nodes:
        return False
    shape = info_of(node.all_input_nodes[0]).shape
    dims = dims_of[op_name(node)](node)
    return any(shape[dim] % ROWS == 0 for dim in ([dims] if isinstance(dims, int) else dims)
               if -len(shape) <= dim < len(shape))


def _is_odd(size: int) -> bool:
    """Whether a whole number may be made of the rows, and not be a multiple of them."""
    rest, power = _apart(size, ROWS)
    return is_of_rows(int(rest), MOST_PARTS) or (not power and abs(size) > ROWS // 2)


def _is_computed_with(leaf: _Leaf) -> bool:
    """Whether a multiple of the rows is no size that is followed: a value, but no factor, as losses
    are divided by; and not where a value is made of numbers, as `arange(n)` is."""
    made = type(leaf.number) is int and not leaf.node.all_input_nodes
    return leaf.is_value and not made and not rows_in(leaf.node)[0]


def _apart(number: float, rows: int) -> tuple[float, int]:
    """A number without its factors of so many rows, and how many these are."""
    power = 0
    while number and number % rows == 0:
        number, power = number / rows, power + 1
    return number, power


def settle(graph: fx.Graph, consts: Mapping[fx.Node, Tensor], batch: list[fx.Node],
           other: Callable[[], tuple[fx.Graph, Mapping[fx.Node, Tensor]]]) -> set[int]:
    """Write numbers that are made of the number of rows as what makes them; `other` traces the
    model for `OTHER_ROWS`. Constants are given by their placeholders. Returns sizes that are no
    multiples of the rows and yet depend on them."""
    numbers, sizes = list(written(graph)), list(_sizes(graph))
    if not (any(map(_is_suspect, numbers)) or any(map(_is_odd, {*sizes}))
            or any(map(_may_hold, consts.values()))):
        return set()
    second, seconds = other()
    twins, others = list(written(second)), list(_sizes(second))
    alike = [(a.op, op_name(a)) for a in graph.nodes] == [(b.op, op_name(b)) for b in second.nodes]
    lengths = [(len(numbers), len(sizes), len(consts)), (len(twins), len(others), len(seconds))]
    if not alike or lengths[0] != lengths[1]:
        raise TraceError("what forward does depends on the number of rows", where="forward",
                         fix="let Python not decide by the size of the batch")
    for (place, value), twin in zip(consts.items(), seconds.values(), strict=True):
        if value.shape != twin.shape or not torch.equal(*(x.nan_to_num() for x in (value, twin))):
            _write_const(graph, place, value, twin, batch)
    for leaf, own in zip(numbers, twins, strict=True):
        if _differ(leaf.number, own.number) or (
                repr(leaf.number) != repr(own.number) and _is_computed_with(leaf)):
            _write(graph, leaf, own.number, batch)
    odd = {a for a, b in zip(sizes, others, strict=True) if _differ(a, b)}
    if seeming := [size for size in odd if size % ROWS == 0]:
        raise _refusal(f"a size, {seeming[0]} of {ROWS} rows,", "forward")
    return odd


def _sizes(graph: fx.Graph) -> Iterator[int]:
    for node in graph.nodes:
        for info in each_info(info_of(node)):
            yield from info.shape


def _differ(number: float, twin: float) -> bool:
    """Whether they depend on the rows otherwise than as multiples. NaN is as NaN."""
    return repr(number) != repr(twin) and _apart(number, ROWS) != _apart(twin, OTHER_ROWS)


def refuse_odd(pieces: Sequence[TracedBlock]) -> None:
    """Such sizes are known inside of a block only."""
    for piece in pieces:
        for slot in (*piece.inputs, *piece.outputs):
            if found := piece.odd.intersection(piece.infos[slot].shape):
                raise _refusal(f"a size of what {piece.name} takes or hands on, {min(found)} of "
                               f"{ROWS} rows,", piece.name)


def _may_hold(const: Tensor) -> bool:
    """Whether one of few constants may be such a number."""
    if const.numel() > MOST_ELEMENTS or const.is_complex():
        return False
    numbers = [x for x in const.detach().double().flatten().tolist() if math.isfinite(x)]
    return any(not _is_written(float(str(np.float32(x))), FEW_DIGITS)
               or is_of_rows(round(x), MOST_PARTS) for x in numbers)


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
            or not (whole or info.is_float or info.dtype == "bool")):
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
    if not number or not twin:
        return None
    for value, other, shifted in (number, twin, 1), (1 / number, 1 / twin, -1):
        times = round((value - other) / (ROWS - OTHER_ROWS))  # `times * n + more`
        more = round(value - times * ROWS)
        made = times * OTHER_ROWS + more
        if times and abs(more) <= MOST_PARTS and abs(made / other - 1) <= SAME:
            return float(times)**shifted, Formula(0, more / times, shifted, 0)
    apart, factor, formula = min((abs(1 - twin / f.at(OTHER_ROWS) / (number / f.at(ROWS))),
                                  number / f.at(ROWS), f) for f in FORMULAS)
    return (factor, formula) if apart <= SAME else None
