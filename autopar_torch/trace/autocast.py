"""Autocast written out: a model that is traced under it has its casts as ops, and runs without it.

What autocast does to an op is not looked up in a list but observed: the op runs on tensors without
data, under autocast, and the casts that it makes of its arguments are written down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import TraceError

aten = torch.ops.aten
ArgCasts = dict[int, torch.dtype]  # number of an argument (of all, flat) -> what it is cast to
_known: dict[Any, tuple[ArgCasts, torch.dtype | None]] = {}


class _Heard(TorchDispatchMode):
    """Records the casts of some tensors, or of views of them, while it is entered."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()
        self.casts: ArgCasts = {}
        self.places = {_storage(t): i for i, t in enumerate(given) if isinstance(t, Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        place = self.places.get(_storage(args[0])) if func is aten._to_copy.default else None
        if place is not None:
            self.casts.setdefault(place, result.dtype)
        return result


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def spell_out(graph: fx.Graph, node: fx.Node, new: fx.Node, dtype: torch.dtype,
              info: Callable[[Tensor], Any]) -> None:
    """Put the casts of `node`, which was traced under autocast, before its copy `new`."""
    op = node.target
    if not isinstance(op, OpOverload) or op._schema.is_mutable or "val" not in node.meta:
        return
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    given = [leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    floats = [t for t in given if isinstance(t, Tensor) and t.is_floating_point()]
    if not floats or not any(_has_kernel(op, key) for key in (
            f"Autocast{floats[0].device.type.upper()}", "CompositeImplicitAutograd")):
        return  # autocast knows neither the op nor what it is made of
    seen = ((x.dtype, x.dim(), x.device.type) if isinstance(x, Tensor) else repr(x) for x in given)
    key = (op, dtype, spec, tuple(seen))
    if key not in _known:
        where = str(new.meta["module"] or "forward")
        _known[key] = _what_it_does(node, op, given, spec, dtype, where)
    casts, result = _known[key]
    copies = pytree.tree_leaves((new.args, new.kwargs))
    with graph.inserting_before(new):
        for place, to in casts.items():
            copies[place] = graph.call_function(aten.to.dtype, (copies[place], to))
            copies[place].meta = {**new.meta, "info": info(cast(Any, given[place]).to(to))}
    new.args, new.kwargs = pytree.tree_unflatten(copies, spec)
    if result is not None:
        new.kwargs = {**new.kwargs, "dtype": result}


def _has_kernel(op: OpOverload, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def _what_it_does(node: fx.Node, op: OpOverload, given: list[Any], spec: Any, dtype: torch.dtype,
                  where: str) -> tuple[ArgCasts, torch.dtype | None]:
    """(casts of arguments, `dtype=` or None) with which the op does the same without autocast."""
    want = _dtypes(node.meta["val"])
    if not want:
        return {}, None  # a number
    kind = next(t.device.type for t in given if isinstance(t, Tensor))
    casts = _casts(op, given, spec, torch.autocast(kind, dtype, cache_enabled=False))
    if not _has_kernel(op, f"Autocast{kind.upper()}"):  # the op's own casts stay in it
        own = _casts(op, given, spec, torch.autocast(kind, enabled=False))
        casts = {place: to for place, to in casts.items() if own.get(place) != to}
    ready = [t.to(casts[i]) if i in casts else t for i, t in enumerate(given)]
    args, kwargs = pytree.tree_unflatten(ready, spec)
    for more in ({}, {"dtype": want[0]}):
        try:
            with torch.no_grad(), torch.autocast(kind, enabled=False):
                if _dtypes(op(*args, **{**kwargs, **more})) == want:
                    return casts, more.get("dtype")
        except (RuntimeError, TypeError):  # the op refuses such arguments
            continue
    raise TraceError(f"what autocast does to {op.name()} cannot be written out",
                     where=where, fix="turn autocast off around it, or everywhere, and ask for "
                     "precision='bfloat16'")


def _casts(op: OpOverload, given: list[Any], spec: Any, state: Any) -> ArgCasts:
    args, kwargs = pytree.tree_unflatten(given, spec)
    heard = _Heard(given)
    try:
        with torch.no_grad(), state, heard:
            op(*args, **kwargs)
    except RuntimeError:  # mixed precision, where autocast is off
        return {}
    return heard.casts


def _dtypes(value: Any) -> list[torch.dtype]:
    return [t.dtype for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
