"""Parameters as scripts see them: whole tensors, of which each rank holds a part.

A plan that cuts a parameter makes it a `ShardedParameter`: its data is this rank's part, but what
Python does with it means the full tensor. Elementwise functions work on the parts, reductions to
one number add up over all ranks, each element once; all else is computed on the full tensor.
The library itself works on the plain parts, under `plainly()`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map

from ..errors import RunError
from .called import in_place, is_elementwise, name_of
from .spread import Spread

plainly = torch._C.DisableTorchFunctionSubclass
Args = Sequence[Any]


class Whole(Tensor):
    """What Python does with it means a full tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        with plainly():
            name = name_of(func)
            if name.startswith(("get ", "set ", "delete ")) and name not in _VIEWS:
                _refresh(args[1:])
                return ANSWERS.get(name, _asked)(func, *args)
            return _called(name, func, args, dict(kwargs or {}))

    def full(self) -> Tensor:
        """The full tensor, a copy of it."""
        return self.detach().clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with plainly():
            return memo.setdefault(id(self), self.full())

    def __reduce_ex__(self, proto: Any) -> Any:
        with plainly():
            full, wanted = self.full(), self.requires_grad
            if isinstance(self, nn.Parameter):
                full = nn.Parameter(full, wanted)
            return full.requires_grad_(wanted).__reduce_ex__(proto)


class Sharded(Whole):
    """This rank's part of a tensor, which stands for all of it."""

    spread: Spread

    def full(self) -> Tensor:
        return self.spread.gathered(self.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with plainly():
            if id(self) not in memo and not self.is_leaf:
                return super(Whole, self).__deepcopy__(memo)  # torch says why not
            if id(self) not in memo:
                fresh = mark(self.detach().clone(), self.spread, type(self))
                memo[id(self)] = fresh.requires_grad_(self.requires_grad)
            return cast(Tensor, memo[id(self)])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with plainly():
            return (f"{type(self).__name__}({tuple(self.spread.shape)}, of which this rank has "
                    f"{self.detach()!r})")


class ShardedParameter(Sharded, nn.Parameter):
    """A parameter of which some rank does not hold everything."""


class ShardedBuffer(Sharded):
    """A buffer of that kind."""


class Loan(Whole):
    """A view of a full tensor that was put together for it. Writing to it writes to the parts;
    when these have changed it is put together again."""

    source: Sharded
    base: Tensor
    seen: list[int]  # the version of the parts, shared by all views of `base`

    def __format__(self, spec: str) -> str:
        with plainly():
            return format(self.detach().as_subclass(Tensor), spec)


def mark(tensor: Tensor, spread: Spread, kind: type[Tensor] = Sharded) -> Tensor:
    """Make a plain part, as the object that it is, stand for the whole."""
    tensor.__class__ = kind
    cast(Sharded, tensor).spread = spread
    return tensor


def adopt(tensor: Tensor, spread: Spread) -> None:
    """Make the user's parameter or buffer, which holds this rank's part, stand for the whole."""
    hooks = cast(dict[int, Any], tensor._backward_hooks or {})
    hooks.update({key: seen_whole(hook, spread) for key, hook in hooks.items()})
    mark(tensor, spread, ShardedParameter if isinstance(tensor, nn.Parameter) else ShardedBuffer)


def unmark(tensor: Tensor) -> None:
    """Make the user's parameter or buffer a plain one again, which holds what it holds."""
    if isinstance(tensor, Sharded):
        parameter = isinstance(tensor, nn.Parameter)
        hooks = cast(dict[int, Any], tensor._backward_hooks or {})
        hooks.update({key: getattr(hook, "of_user", hook) for key, hook in hooks.items()})
        tensor.__class__ = nn.Parameter if parameter else Tensor  # type: ignore[assignment]


def local(tensor: Tensor) -> Tensor:
    """The plain part behind a tensor (the tensor itself, if it is plain)."""
    if not isinstance(tensor, Sharded):
        return tensor
    with plainly():
        return tensor.detach()


def _called(name: str, func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    if not args:  # nn.init calls with names only
        first = next(key for key in ("tensor", "input", "self", *kwargs) if key in kwargs)
        args = (kwargs.pop(first),)
    given = [y for x in (*args, *kwargs.values())
             for y in (x if isinstance(x, (list, tuple)) else (x,))]
    _refresh(given)
    result = NotImplemented
    if not any(isinstance(x, Sharded) for x in given):
        result = _on_whole(func, args, kwargs)
    elif "out" in kwargs and any(isinstance(x, Sharded) for x in _each(kwargs["out"])):
        return _into(func, args, kwargs)
    elif name in ANSWERS:
        result = ANSWERS[name](func, *args, **kwargs)
    if result is NotImplemented:
        result = _computed(name, func, args, kwargs)
    _write_back(kwargs.get("out", args[0] if in_place(name) else None))
    return result


# --- elementwise ------------------------------------------------------------------------------

def _computed(name: str, func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("out") is not None:
        return _on_whole(func, args, kwargs)
    if is_elementwise(name):
        each = _each_elementwise if name.startswith("_foreach_") else _elementwise
        return each(name, func, args, kwargs)
    if in_place(name) and isinstance(args[0], Sharded):
        return _rewritten(func, args, kwargs)
    return _on_whole(func, args, kwargs)


def _elementwise(name: str, func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    given = [*args, *kwargs.values()]
    if name in ("to", "type", "type_as"):  # another tensor only tells its type and device
        spread = args[0].spread if isinstance(args[0], Sharded) else None
    else:
        spread, given = _aligned(given, in_place(name))
    result = func(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
    return _marked(result, spread)


def _each_elementwise(name: str, func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """The same for every place of lists of tensors."""
    lists = [i for i, x in enumerate(args) if isinstance(x, (list, tuple))]
    rows = [_aligned(row, in_place(name)) for row in zip(*(args[i] for i in lists), strict=True)]
    columns = dict(zip(lists, map(list, zip(*(row for _, row in rows), strict=True)), strict=True))
    result = func(*(columns.get(i, x) for i, x in enumerate(args)), **kwargs)
    return result and [_marked(x, spread) for (spread, _), x in zip(rows, result, strict=True)]


def _marked(result: Any, spread: Spread | None) -> Any:
    if spread is None:
        return result
    if type(result) is Tensor:
        return mark(result, spread)
    return tree_map(lambda x: mark(x, spread) if type(x) is Tensor else x, result)


def _aligned(values: Iterable[Any], in_place: bool) -> tuple[Spread | None, list[Any]]:
    """The arguments as parts that are cut alike, and their spread; or all of them whole."""
    values = list(values)
    target = values[:1] if in_place else values
    try:
        shape = torch.broadcast_shapes(*(_shape(x) for x in values if isinstance(x, Tensor)))
    except RuntimeError:  # which the function itself raises, given whole tensors
        target = []
    spread = next((x.spread for x in target if isinstance(x, Sharded) and x.spread.shape == shape),
                  None)
    return spread, [_whole(x) if spread is None else _fitting(x, spread) for x in values]


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

_MOVES = ("batch_norm", "instance_norm")  # running statistics, and say so to nobody
_VIEWS = frozenset({"get data", "get T", "get mT", "get H", "get mH", "get real", "get imag"})


def _whole(value: Any) -> Any:
    return value.spread.whole(value) if isinstance(value, Sharded) else value


def _on_whole(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """Compute on full tensors, as in one process. A result that is a view knows its base."""
    bases: list[tuple[Sharded, Tensor, list[int]]] = []

    def full(value: Any) -> Any:
        if isinstance(value, Sharded):
            bases.append((value, _whole(value), [value._version]))
            return bases[-1][1]
        if isinstance(value, Loan):
            bases.append((value.source, value.base, value.seen))
        return value

    def lend(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            x.setflags(write=False)  # a copy: the parameter would not hear of it
        if type(x) is Tensor and x.numel():
            for source, base, seen in bases:
                if x.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
                    x.__class__ = Loan
                    loan = cast(Loan, x)
                    loan.source, loan.base, loan.seen = source, base, seen
        return x

    args, kwargs = tree_map(full, (tuple(args), kwargs))
    moved = [(source, base, base.clone()) for source, base, _ in bases
             if name_of(func) in _MOVES and isinstance(source, ShardedBuffer)]
    made = func(*args, **kwargs)
    for source, base, before in moved:
        if not torch.equal(base, before):
            source.data.copy_(source.spread.part(base))  # which torch does not count either
    return tree_map(lend, made)


def _each(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _into(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """A function that is to write its results somewhere, as `out=parameter`."""
    given = (*args, *kwargs.values())
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in given):
        raise RuntimeError("functions with out=... have no gradients, and something here needs one")
    made = _on_whole(func, args, {key: x for key, x in kwargs.items() if key != "out"})
    for target, value in zip(_each(kwargs["out"]), _each(made), strict=True):
        if not torch.can_cast(value.dtype, target.dtype):
            raise RuntimeError(f"{value.dtype} cannot be cast to {target.dtype}, that of out=")
        if not isinstance(target, Sharded):
            target.resize_(value.shape)
        target.copy_(_part(value, target.spread) if isinstance(target, Sharded) else value)
        _write_back(target)
    return type(made)(kwargs["out"]) if isinstance(made, tuple) else kwargs["out"]


def _refresh(given: Iterable[Any]) -> None:
    """Views whose parts have changed since."""
    for loan in (x for x in given if type(x) is Loan and x.source._version != x.seen[0]):
        if loan.base.requires_grad:
            raise RunError("this view was made before the parameter changed",
                           where=loan.source.spread.name,
                           fix="take the view again, or of p.detach()")
        loan.base.copy_(loan.source.full())
        loan.seen[0] = loan.source._version


def _write_back(written: Any) -> None:
    """Write what was written to a view back to the parts."""
    if type(written) is Loan:
        written.source.copy_(written.source.spread.part(written.base))
        written.seen[0] = written.source._version


def _rewritten(func: Any, args: Args, kwargs: dict[str, Any]) -> Tensor:
    """Written as a full tensor, of which every rank keeps its part."""
    target: Sharded = args[0]
    full = target.spread.whole(target)
    leaf = torch.is_grad_enabled() and target.is_leaf and target.requires_grad
    if leaf:  # torch refuses to write to it, unless the function knows better (nn.init)
        full = full.detach().requires_grad_()
    func(full, *tree_map(_whole, tuple(args[1:])), **tree_map(_whole, kwargs))
    with torch.set_grad_enabled(torch.is_grad_enabled() and not leaf):
        return target.copy_(_part(full, target.spread))


# --- the object itself ------------------------------------------------------------------------


def _part(value: Tensor, spread: Spread) -> Tensor:
    """The plain part of what is given for the whole."""
    if isinstance(value, Sharded):
        if value.spread.like(spread):
            return value.detach()
        value = value.spread.whole(value)
    if value.shape != spread.shape:
        raise RunError(f"its shape is {tuple(spread.shape)}, that of what is given "
                       f"{tuple(value.shape)}", where=spread.name,
                       fix="give a tensor of the full shape")
    return spread.part(value)


def _get_grad(func: Any, x: Tensor) -> Tensor | None:
    grad = func(x)
    return mark(grad, x.spread) if type(grad) is Tensor and isinstance(x, Sharded) else grad


def _set_grad(func: Any, x: Sharded, value: Tensor | None) -> None:
    if value is None or (isinstance(value, Sharded) and value.spread.like(x.spread)):
        func(x, value)
    else:
        func(x, mark(_part(value, x.spread), x.spread))


def _set_data(func: Any, x: Sharded, value: Tensor) -> None:
    func(x, _part(value, x.spread))
    increment_version(x)  # views that are there notice


def seen_whole(hook: Callable[[Any], Any], spread: Spread) -> Callable[[Any], Any]:
    """A hook that autograd calls with parts and that means whole gradients."""

    def call(grad: Tensor) -> Any:
        result = hook(grad if isinstance(grad, Sharded) else mark(grad.detach(), spread))
        with plainly():
            return _part(result, spread) if isinstance(result, Tensor) else result

    call.of_user = hook  # type: ignore[attr-defined]
    return call


def _grad(func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any,
          **kwargs: Any) -> Any:
    """torch.autograd.grad: gradients lie as what they are of."""
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if grad_outputs is not None:
        grad_outputs = [_fitting(x, end.spread) if isinstance(end, Sharded) else _whole(x)
                        for end, x in zip(_each(outputs), _each(grad_outputs), strict=True)]
    found = func(outputs, given, grad_outputs, *args, **kwargs)
    return tuple(_marked(g, x.spread if isinstance(x, Sharded) else None)
                 for x, g in zip(given, found, strict=True))


def _outlined(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function of which only the shape and type of arguments matter."""
    outlines = [torch.empty(x.spread.shape, dtype=x.dtype, device="meta")
                if isinstance(x, Sharded) else x for x in args]
    return func(*outlines, **kwargs)


def _random_like(func: Any, x: Sharded, *args: Any, **kwargs: Any) -> Any:
    return _outlined(func, x, *args, **{"device": x.device, **kwargs})


def _shaped_as(func: Any, x: Tensor, other: Tensor) -> Any:
    return NotImplemented if isinstance(x, Sharded) else _outlined(func, x, other)


_asked = operator.call  # of the part, which answers as the whole tensor would
_SHAPES = ("get shape", "size", "stride", "is_contiguous", "numel", "nelement", "get nbytes",
           "__len__", "dim", "ndimension", "get ndim")
_AS_IT_IS = (
    "requires_grad_", "retain_grad", "backward", "is_floating_point", "is_complex",
    "is_inference", "element_size", "data_ptr", "untyped_storage", "storage", "get_device",
    "register_post_accumulate_grad_hook", "result_type", "new_zeros", "new_ones", "new_empty",
    "new_full", "new_empty_strided", "is_pinned", "_is_view",
    "_has_compatible_shallow_copy_type", "__hash__", "share_memory_", "is_shared", "can_cast",
    "is_signed", "is_conj", "is_neg",
)

# Function -> what answers for it; NotImplemented leaves it to `_computed`.
ANSWERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_AS_IT_IS, _asked),
    **dict.fromkeys(_SHAPES, _outlined),
    "get grad": _get_grad,
    "set grad": _set_grad,
    "get data": lambda _, x: mark(x.detach(), x.spread),
    "set data": _set_data,
    "register_hook": lambda func, x, hook: func(x, seen_whole(hook, x.spread)),
    "grad": _grad,
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _random_like),
    **dict.fromkeys(("view_as", "expand_as", "reshape_as"), _shaped_as),
}
