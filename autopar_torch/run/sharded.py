"""Parameters as scripts see them: whole tensors, of which each rank holds a part.

A plan that cuts a parameter makes it a `ShardedParameter`: its data is this rank's part, but what
Python does with it means the full tensor. Elementwise functions work on the parts, reductions to
one number ask everyone and count every element once, anything else is computed on the full tensor.
The library itself works on the plain parts, under `plainly()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import RunError
from .spread import Spread

plainly = torch._C.DisableTorchFunctionSubclass
Args = Sequence[Any]


class Sharded(Tensor):
    """This rank's part of a tensor, which stands for all of it."""

    spread: Spread

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:  # fmt: skip
        name, kwargs = _name(func), dict(kwargs or {})
        if not args:  # nn.init calls with names only
            first = next(key for key in ("tensor", "input", "self", *kwargs) if key in kwargs)
            args = (kwargs.pop(first),)
        with plainly():
            _refresh(args)
            answer = ANSWERS.get(name)
            result = NotImplemented if answer is None else answer(func, *args, **kwargs)
            if result is NotImplemented:
                result = _computed(name, func, args, kwargs)
            _write_back(name, args, kwargs)
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return cast(Tensor, memo[id(self)])
        with plainly():
            if not self.is_leaf:
                raise RunError("only tensors that a script made itself can be deep-copied",
                               where=f"part of {self.spread.name}",
                               fix="call detach() first")  # fmt: skip
            fresh = mark(self.detach().clone(), self.spread, type(self))
            memo[id(self)] = fresh.requires_grad_(self.requires_grad)
        return fresh

    def __reduce_ex__(self, proto: Any) -> Any:
        with plainly():
            full = self.spread.gathered(self.detach())
            if isinstance(self, nn.Parameter):
                return nn.Parameter(full, self.requires_grad).__reduce_ex__(proto)
            return full.requires_grad_(self.requires_grad).__reduce_ex__(proto)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with plainly():
            return (f"{type(self).__name__}({tuple(self.spread.shape)}, of which this rank has "
                    f"{self.detach()!r})")  # fmt: skip


class ShardedParameter(Sharded, nn.Parameter):
    """A parameter of which some rank does not hold everything."""


class ShardedBuffer(Sharded):
    """A buffer of that kind."""


class Loan(Tensor):
    """A view of a full tensor that was put together for it. Writing to it writes to the parts;
    when these have changed it is put together again."""

    source: Sharded
    base: Tensor
    seen: list[int]  # the version of the parts, shared by all views of `base`

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:  # fmt: skip
        if any(issubclass(kind, Sharded) for kind in types):
            return NotImplemented
        with plainly():
            _refresh(args)
            result = func(*args, **(kwargs or {}))
            _write_back(_name(func), args, kwargs or {})
            first = next(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Loan))
            return _lent(result, first.source, first.base, first.seen)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with plainly():
            return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, proto: Any) -> Any:
        with plainly():
            return self.detach().clone().__reduce_ex__(proto)


def mark(tensor: Tensor, spread: Spread, kind: type[Tensor] = Sharded) -> Tensor:
    """Make a plain part, as the object that it is, stand for the whole."""
    tensor.__class__ = kind
    cast(Sharded, tensor).spread = spread
    return tensor


def adopt(tensor: Tensor, spread: Spread) -> None:
    """Make the user's parameter or buffer, which holds this rank's part, stand for the whole."""
    hooks = tensor._backward_hooks
    for key, hook in list((hooks or {}).items()):
        cast(dict[int, Any], hooks)[key] = seen_whole(hook, spread)
    mark(tensor, spread, ShardedParameter if isinstance(tensor, nn.Parameter) else ShardedBuffer)


def local(tensor: Tensor) -> Tensor:
    """The plain part behind a tensor (the tensor itself, if it is plain)."""
    if not isinstance(tensor, Sharded):
        return tensor
    with plainly():
        return tensor.detach()


def _name(func: Any) -> str:
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name.strip('_')} {func.__self__.__name__}"
    return _OPERATORS.get(name, name)


def _in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


# --- elementwise ------------------------------------------------------------------------------

_OPERATORS = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add_", "__sub__": "sub", "__rsub__": "rsub",
    "__isub__": "sub_", "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul_", "__div__": "div",
    "__truediv__": "div", "__rdiv__": "div", "__rtruediv__": "div", "__idiv__": "div_",
    "__itruediv__": "div_", "__floordiv__": "floor_divide", "__rfloordiv__": "floor_divide",
    "__ifloordiv__": "floor_divide_", "__mod__": "remainder", "__rmod__": "remainder",
    "__imod__": "remainder_", "__pow__": "pow", "__rpow__": "pow", "__ipow__": "pow_",
    "__neg__": "neg", "__pos__": "positive", "__abs__": "abs", "__invert__": "bitwise_not",
    "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "__and__": "bitwise_and", "__rand__": "bitwise_and", "__iand__": "bitwise_and_",
    "__or__": "bitwise_or", "__ror__": "bitwise_or", "__ior__": "bitwise_or_",
    "__xor__": "bitwise_xor", "__rxor__": "bitwise_xor", "__ixor__": "bitwise_xor_",
}  # fmt: skip
_ALSO = frozenset({
    "multiply", "subtract", "divide", "absolute", "negative", "greater", "greater_equal", "less",
    "less_equal", "not_equal", "floor_divide", "copy", "zero", "fill", "clone", "detach",
    "contiguous", "positive", "zeros_like", "ones_like", "full_like", "empty_like", "float",
    "double", "half", "bfloat16", "int", "long", "bool", "to", "type", "cpu", "cuda", "pin_memory",
})  # fmt: skip
# Tagged so, but they reduce, draw numbers, or are something else with other arguments.
_NOT = frozenset(("equal", "max", "min", "where", "rrelu", "native_dropout_backward"))


@cache
def _is_elementwise(name: str) -> bool:
    base = name.removeprefix("_foreach_")
    if base.startswith("__") or base.rstrip("_") in _NOT:
        return False
    packets = [getattr(torch.ops.aten, one, None) for one in (base, base.rstrip("_"))]
    return base.rstrip("_") in _ALSO or any(
        torch.Tag.pointwise in getattr(packet, overload).tags
        for packet in packets if packet is not None for overload in packet.overloads()
    )  # fmt: skip


def _computed(name: str, func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    if isinstance(kwargs.get("out"), Sharded):
        raise RunError("a part cannot take the result of a function as out=", where=name,
                       fix="write parameter.copy_(result)")  # fmt: skip
    if name.startswith(("get ", "set ", "delete ")) and name not in _VIEWS:
        return func(*args, **kwargs)
    if _is_elementwise(name):
        if name.startswith("_foreach_"):
            return _each_elementwise(name, func, args, kwargs)
        return _elementwise(name, func, args, kwargs)
    if _in_place(name) and isinstance(args[0], Sharded):
        return _rewritten(func, args, kwargs)
    return _on_whole(func, args, kwargs)


def _elementwise(name: str, func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    if name in ("to", "type", "type_as") and not isinstance(args[0], Sharded):
        return func(*args, **kwargs)
    keys, count = list(kwargs), len(args)
    given = [*args, *kwargs.values()]
    if name in ("to", "type"):  # another tensor only tells its type and device
        spread: Spread | None = args[0].spread
    else:
        spread, given = _aligned(given, _in_place(name))
    result = func(*given[:count], **dict(zip(keys, given[count:], strict=True)))
    return result if spread is None else _marked(result, spread)


def _each_elementwise(name: str, func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """The same for every place of lists of tensors."""
    lists = [i for i, x in enumerate(args) if isinstance(x, (list, tuple))]
    rows = [_aligned(row, _in_place(name)) for row in zip(*(args[i] for i in lists), strict=True)]
    columns = dict(zip(lists, map(list, zip(*(row for _, row in rows), strict=True)), strict=True))
    result = func(*(columns.get(i, x) for i, x in enumerate(args)), **kwargs)
    if not isinstance(result, (list, tuple)):
        return result
    return [x if spread is None else _marked(x, spread)
            for (spread, _), x in zip(rows, result, strict=True)]  # fmt: skip


def _marked(result: Any, spread: Spread) -> Any:
    return tree_map(lambda x: mark(x, spread) if type(x) is Tensor else x, result)


def _aligned(values: Iterable[Any], in_place: bool) -> tuple[Spread | None, list[Any]]:
    """Arguments as parts that lie alike, and how; or all of them whole."""
    values = list(values)
    spreads = [x.spread for x in values if isinstance(x, Sharded)]
    if not spreads:
        return None, values
    shapes = [_shape(x) for x in values if isinstance(x, Tensor)]
    try:
        shape = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        shape = torch.Size((-1,))
    if in_place:
        spread = values[0].spread if isinstance(values[0], Sharded) else None
    else:
        spread = next((s for s in spreads if s.shape == shape), None)
    if spread is None or spread.shape != shape:
        if in_place and spread is not None:
            raise RunError(f"shapes {', '.join(str(tuple(s)) for s in shapes)} do not fit",
                           where=f"writing to {spread.name}",
                           fix="give a tensor of its shape")  # fmt: skip
        return None, [_whole(x) for x in values]
    return spread, [_fitting(x, spread) for x in values]


def _fitting(value: Any, spread: Spread) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, Sharded):
        if value.spread.like(spread):
            return value
        value = value.spread.whole(value)
    if value.dim() == 0 and not value.requires_grad:
        return value
    return spread.part(value.expand(spread.shape))


def _shape(tensor: Tensor) -> torch.Size:
    return tensor.spread.shape if isinstance(tensor, Sharded) else tensor.shape


# --- anything else ----------------------------------------------------------------------------

_VIEWS = frozenset({"get T", "get mT", "get H", "get mH", "get real", "get imag"})


def _whole(value: Any) -> Any:
    return value.spread.whole(value) if isinstance(value, Sharded) else value


def _on_whole(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """Computed on full tensors, as in one process."""
    made: list[tuple[Sharded, Tensor]] = []

    def full(value: Any) -> Any:
        if isinstance(value, Sharded):
            made.append((value, _whole(value)))
            return made[-1][1]
        return value

    args, kwargs = tree_map(full, (tuple(args), kwargs))
    result = func(*args, **kwargs)
    for source, base in made:
        result = _lent(result, source, base, [source._version])
    return result


def _lent(result: Any, source: Sharded, base: Tensor, seen: list[int]) -> Any:
    """Results that are views of a full tensor know whose it is."""

    def lend(x: Any) -> Any:
        if type(x) is not Tensor or not x.numel():
            return x
        if x.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
            x.__class__ = Loan
            loan = cast(Loan, x)
            loan.source, loan.base, loan.seen = source, base, seen
        return x

    return tree_map(lend, result)


def _refresh(args: Args) -> None:
    """Views whose parts have changed since."""
    given = [y for x in args for y in (x if isinstance(x, (list, tuple)) else (x,))]
    for loan in (x for x in given if type(x) is Loan):
        if loan.source._version == loan.seen[0]:
            continue
        if loan.base.requires_grad:
            raise RunError("this view was made before the parameter changed",
                           where=loan.source.spread.name,
                           fix="take the view again, or of p.detach()")  # fmt: skip
        loan.base.copy_(loan.source.spread.gathered(loan.source.detach()))
        loan.seen[0] = loan.source._version


def _write_back(name: str, args: Args, kwargs: dict[str, Any]) -> None:
    """What was written to a view goes to the parts."""
    loan = kwargs.get("out", args[0] if args and _in_place(name) else None)
    if type(loan) is Loan:
        loan.source.copy_(loan.source.spread.part(loan.base))
        loan.seen[0] = loan.source._version


def _rewritten(func: Any, args: Args, kwargs: dict[str, Any]) -> Tensor:
    """Written as a full tensor, of which every rank keeps its part."""
    target: Sharded = args[0]
    full = target.spread.whole(target)
    leaf = torch.is_grad_enabled() and target.is_leaf and target.requires_grad
    if leaf:  # torch refuses to write to it, unless the function knows better (nn.init)
        full = full.detach().requires_grad_()
    func(full, *tree_map(_whole, tuple(args[1:])), **tree_map(_whole, kwargs))
    if full.shape != target.spread.shape:
        raise RunError("its shape cannot change", where=target.spread.name,
                       fix="change the model before parallelize()")  # fmt: skip
    with torch.set_grad_enabled(torch.is_grad_enabled() and not leaf):
        return target.copy_(target.spread.part(full))


# --- the object itself ------------------------------------------------------------------------


def _get_grad(func: Any, x: Sharded) -> Tensor | None:
    grad = func(x)
    return mark(grad, x.spread) if type(grad) is Tensor else grad


def _given_whole(x: Sharded, value: Tensor) -> Tensor:
    """A new content for a part, plain."""
    if isinstance(value, Sharded):
        if value.spread.like(x.spread):
            return value.detach()
        value = value.spread.whole(value)
    if value.shape != x.spread.shape:
        raise RunError(f"its shape is {tuple(x.spread.shape)}, that of what is given "
                       f"{tuple(value.shape)}", where=x.spread.name,
                       fix="assign a tensor of the full shape")  # fmt: skip
    return x.spread.part(value)


def _set_grad(func: Any, x: Sharded, value: Tensor | None) -> None:
    same = isinstance(value, Sharded) and value.spread.like(x.spread)
    if value is None or same:
        func(x, value)
    else:
        func(x, mark(_given_whole(x, value), x.spread))


def _set_data(func: Any, x: Sharded, value: Tensor) -> None:
    func(x, _given_whole(x, value))
    increment_version(x)  # views that are there notice


def _hook(func: Any, x: Sharded, hook: Callable[[Any], Any]) -> Any:
    return func(x, seen_whole(hook, x.spread))


def seen_whole(hook: Callable[[Any], Any], spread: Spread) -> Callable[[Any], Any]:
    """A hook that autograd calls with parts and that means whole gradients."""

    def call(grad: Tensor) -> Any:
        seen = grad if isinstance(grad, Sharded) else mark(grad.detach(), spread)
        result = hook(seen)
        if not isinstance(result, Tensor):
            return result
        return local(_fitting_plainly(result, spread))

    return call


def _fitting_plainly(value: Tensor, spread: Spread) -> Tensor:
    with plainly():
        return cast(Tensor, _fitting(value, spread))


def _grad(func: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.autograd.grad: gradients lie as their inputs."""
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    found = func(outputs, given, *args, **kwargs)
    return tuple(mark(g, x.spread) if isinstance(x, Sharded) and type(g) is Tensor else g
                 for x, g in zip(given, found, strict=True))  # fmt: skip


def _size(func: Any, x: Sharded, dim: int | None = None) -> Any:
    return x.spread.shape if dim is None else x.spread.shape[dim]


def _stride(func: Any, x: Sharded, dim: int | None = None) -> Any:
    strides = torch.empty(x.spread.shape, device="meta").stride()
    return strides if dim is None else strides[dim]


def _random_like(func: Any, x: Sharded, *args: Any, **kwargs: Any) -> Any:
    return func(torch.empty((), dtype=x.dtype, device=x.device).expand(x.spread.shape), *args,
                **kwargs)  # fmt: skip


def _shaped_as(func: Any, x: Tensor, other: Tensor) -> Any:
    """Of the other only the shape counts."""
    if isinstance(x, Sharded):
        return NotImplemented
    return func(x, torch.empty((), dtype=other.dtype, device=other.device).expand(_shape(other)))


def _asked(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The part knows it, or does it, as the whole would."""
    return func(*args, **kwargs)


def _numel(func: Any, x: Sharded) -> int:
    return x.spread.shape.numel()


_AS_IT_IS = (
    "requires_grad_", "retain_grad", "backward", "is_floating_point", "is_complex",
    "is_inference", "element_size", "data_ptr", "untyped_storage", "storage", "get_device",
    "register_post_accumulate_grad_hook", "result_type", "new_zeros", "new_ones", "new_empty",
    "new_full", "new_tensor", "new_empty_strided", "is_pinned", "_is_view",
    "_has_compatible_shallow_copy_type", "__hash__", "share_memory_", "is_shared", "can_cast",
    "is_signed", "is_conj", "is_neg",
)  # fmt: skip

# Function -> what answers for it; NotImplemented leaves it to `_computed`.
ANSWERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_AS_IT_IS, _asked),
    "get shape": lambda _, x: x.spread.shape,
    "size": _size,
    "stride": _stride,
    "is_contiguous": lambda func, x, **kw: True,
    "numel": _numel,
    "nelement": _numel,
    "get nbytes": lambda _, x: _numel(_, x) * x.element_size(),
    "__len__": lambda _, x: x.spread.shape[0],
    "dim": lambda _, x: len(x.spread.shape),
    "ndimension": lambda _, x: len(x.spread.shape),
    "get ndim": lambda _, x: len(x.spread.shape),
    "get grad": _get_grad,
    "set grad": _set_grad,
    "get data": lambda _, x: mark(x.detach(), x.spread),
    "set data": _set_data,
    "register_hook": _hook,
    "grad": _grad,
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _random_like),
    **dict.fromkeys(("view_as", "expand_as", "reshape_as"), _shaped_as),
}
