"""What Python decides by the number of rows: `if len(x) > 7`, `min(n, 64)`, `n % 2`, `n // 256`.

While a model is traced, sizes that are multiples of the rows remember how they are made, and so
does what is made of them. They count as for the many rows of the trace. Where Python has to know,
the answer is that for the rows of this call; the trace then serves calls with the same answers.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._export import non_strict_utils
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..model import ROWS
from .effects import attributes_set

Made = int | float | tuple[Any, ...]  # a number, ("n",), or an operator and its operands
Answers = dict[Made, Any]  # what was asked -> the answer
_N = ("n",)
_FEW = range(1, 65)  # numbers of rows that are tried
_TORCH = torch.__file__.rsplit("/", 1)[0]
_NO_MODEL = (f"{_TORCH}/", f"{__file__.rsplit('/', 2)[0]}/")  # who asks here means the trace
_BETWEEN = (__file__, f"{_TORCH}/_export/non_strict_utils.py")  # whose `min` and `max` those are
_SIZES = frozenset([Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement])  # type: ignore[attr-defined]
_LATER = ("add", "sub", "mul", "truediv", "pow", "neg", "pos", "abs")  # nobody has to know yet
_WHOLE = ("floordiv", "mod", "rshift", "and_")
_ROUNDED = ("round", "ceil", "floor", "trunc")
_ASKED = ("lt", "le", "gt", "ge", "eq", "ne", "bool")


def at(made: Made, num_rows: int) -> Any:
    """What it is for so many rows; the name of an error, where it is none."""
    if not isinstance(made, tuple):
        return made
    if made == _N:
        return num_rows
    operands = [at(own, num_rows) for own in made[1:]]
    try:
        return _function(made[0])(*operands)
    except (ArithmeticError, TypeError) as error:
        return type(error).__name__


def holds(answers: Answers, num_rows: int) -> bool:
    """Whether so many rows give the same answers."""
    return all(_answer(made, num_rows) == answer for made, answer in answers.items())


def _answer(made: Made, num_rows: int) -> Any:
    """Whether a size is 1 is asked before it is made larger, where it makes no difference: a single
    row is as many are."""
    alike = num_rows == 1 and isinstance(made, tuple) and made[0] in ("eq", "ne")
    return at(made, ROWS if alike else num_rows)


@contextlib.contextmanager
def asking(num_rows: int, rows: int, answers: Answers) -> Iterator[None]:
    """While it is entered, `rows` of a trace stand for `num_rows`; adds what is asked."""
    before, _Asking.now = _Asking.now, (num_rows, answers)
    try:
        with _Sizes(rows), attributes_set(builtins, len=_len):
            yield
    finally:
        _Asking.now = before


class _Asking:
    now: tuple[int, Answers] | None = None


class _Sizes(TorchFunctionMode):
    """Sizes of tensors that know how they are made."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _SIZES:
            for own in filter(is_known, (found, *args[:1])):
                if of_rows((args, kwargs)):
                    mark(own)
            return found
        if isinstance(found, torch.Size):
            return torch.Size(map(self._known, found))
        return self._known(found)

    def _known(self, size: int) -> int:
        if isinstance(size, torch.SymInt) or not size or size % self.rows:
            return size
        made: Made = _N
        rest = size // self.rows
        while rest % self.rows == 0:
            made, rest = ("mul", made, _N), rest // self.rows
        return _number(made if rest == 1 else ("mul", rest, made), size)


def _len(thing: Any, plain: Callable[[Any], int] = len) -> int:
    """Python makes a plain number of what `__len__` returns."""
    return thing.shape[0] if isinstance(thing, Tensor) and thing.dim() else plain(thing)


def min_max(*args: Any, plain: Any = non_strict_utils._tensor_min_max, **how: Any) -> Any:
    """What torch makes of `min` and `max` in a trace, with `min(x)` of a tensor, which it would
    compute without another, and of a number out of a tensor, which it asks for whole numbers alone.
    It stands here because who asks for it is asked about the rows."""
    if any(isinstance(x, torch.SymFloat) for x in args) and len(args) == 2:
        most = how["tensor_callable"] is torch.maximum
        return torch.sym_max(*args) if most else torch.sym_min(*args)
    alone = len(args) == 1 and isinstance(args[0], Tensor)
    return plain(*([list(args[0])] if alone else args), **how)


class OfRows:
    """A number that is made of the rows."""

    made: Made

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other  # type: ignore[operator]

    def __reduce__(self) -> Any:
        return _number, (self.made, _plain(self))


class RowCount(OfRows, int):
    __hash__ = int.__hash__

    def __floor__(self) -> int:
        return self

    __ceil__ = __trunc__ = __floor__


class RowRatio(OfRows, float):
    __hash__ = float.__hash__

    def __int__(self) -> int:
        return int(_asked(("trunc", self.made), int(_plain(self))))


def is_known(value: Any) -> bool:
    """Whether it is a small tensor of a trace that has values, as forward made it of numbers."""
    return getattr(value, "constant", None) is not None


def of_rows(given: Any) -> bool:
    """Whether numbers or known tensors among these depend on the number of rows."""
    return any(isinstance(x, OfRows) or (
        is_known(x) and hasattr(x.constant.untyped_storage(), "of_rows"))
        for x in pytree.tree_leaves(given))


def mark(known: Any) -> None:
    """Its memory holds what depends on the number of rows."""
    known.constant.untyped_storage().of_rows = True


def _number(made: Made, value: Any) -> Any:
    found: Any = (RowCount if isinstance(value, int) else RowRatio)(value)
    found.made = made
    return found


def _plain(value: Any) -> Any:
    return (int.__pos__ if isinstance(value, int) else float.__pos__)(value)


def _function(name: str) -> Callable[..., Any]:
    return next(getattr(home, name) for home in (operator, math, builtins) if hasattr(home, name))


def _operator(name: str, turned: bool = False) -> Callable[..., Any]:
    function = _function(name)

    def method(*operands: Any) -> Any:
        operands = operands[::-1] if turned else operands
        if not all(isinstance(own, (int, float)) for own in operands):
            return NotImplemented
        value = function(*map(_plain, operands))
        made = (name, *(getattr(own, "made", own) for own in operands))
        if name in _ASKED:
            return _asked(made, value)
        if {value}.issuperset(at(made, n) for n in _FEW):  # `2 * n // n`
            return value
        exact = name == "floordiv" and not any(at(("mod", *made[1:]), n) for n in _FEW)
        return _number(made, value) if name in _LATER or exact else _asked(made, value)

    return method


for _name in (*_LATER, *_WHOLE, *_ASKED):
    setattr(OfRows, f"__{_name.strip('_')}__", _operator(_name))
for _name in _ROUNDED:
    setattr(RowRatio, f"__{_name}__", _operator(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    setattr(OfRows, f"__r{_name}__", _operator(_name, turned=True))


def _asked(made: Made, otherwise: Any) -> Any:
    """The answer, where it is the model that asks."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _BETWEEN and frame.f_back:
        frame = frame.f_back
    if _Asking.now is None or frame.f_code.co_filename.startswith(_NO_MODEL):
        return otherwise
    num_rows, answers = _Asking.now
    answers[made] = answer = _answer(made, num_rows)
    if isinstance(answer, str):
        raise ZeroDivisionError(f"of {num_rows} rows")
    return answer
