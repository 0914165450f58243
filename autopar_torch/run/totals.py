"""One number of every element of a sharded tensor: sums, means, extremes, norms.

Every rank computes it for the atoms that it holds; one message joins them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from .sharded import ANSWERS, Sharded, plainly
from .spread import everyones

log = logging.getLogger("autopar_torch")


def _each(func: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda tensors: [func(x) for x in tensors]


def _joined(x: Tensor, first: Callable[[Tensor], Tensor],
            then: Callable[[Tensor], Tensor]) -> Any:  # fmt: skip
    every, _ = everyones([(cast(Sharded, x).spread, x)], _each(first))
    return then(every)


def _is_total(x: Any, dims: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    asked = [kwargs.get(key) for key in ("dim", "axis", "keepdim", "keepdims", "out")]
    return isinstance(x, Sharded) and not dims and not any(x is not None and x is not False
                                                           for x in asked)  # fmt: skip


def _sum(func: Any, x: Tensor, *dims: Any, dtype: torch.dtype | None = None, **kw: Any) -> Any:
    if not _is_total(x, dims, kw):
        return NotImplemented
    wide = _wide(dtype or x.dtype)
    found = _joined(x, lambda t: t.sum(dtype=wide), lambda every: every.sum(dtype=every.dtype))
    return found if wide is None else found.to(dtype or x.dtype)


def _wide(kind: torch.dtype) -> torch.dtype | None:
    """In which torch adds up numbers of a type, if it is another one that they are rounded to."""
    return torch.float32 if kind in (torch.bfloat16, torch.float16) else None


def _mean(func: Any, x: Tensor, *dims: Any, dtype: torch.dtype | None = None, **kw: Any) -> Any:
    found = _sum(func, x, *dims, dtype=dtype, **kw)
    if found is NotImplemented or not (found.is_floating_point() or found.is_complex()):
        return NotImplemented
    return found / math.prod(cast(Sharded, x).spread.shape)


def _extreme(name: str) -> Callable[..., Any]:
    def answer(func: Any, x: Tensor, *dims: Any, **kw: Any) -> Any:
        if not _is_total(x, dims, kw) or not math.prod(cast(Sharded, x).spread.shape):
            return NotImplemented
        return _joined(x, lambda t: getattr(t, name)(), lambda every: getattr(every, name)())

    return answer


def _truth(name: str) -> Callable[..., Any]:
    def answer(func: Any, x: Tensor, *dims: Any, **kw: Any) -> Any:
        if not _is_total(x, dims, kw):
            return NotImplemented
        return _joined(x, lambda t: getattr(t, name)().to(torch.uint8),
                       lambda every: getattr(every.bool(), name)())  # fmt: skip

    return answer


def _norm(func: Any, x: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False,
          dtype: torch.dtype | None = None, **kw: Any) -> Any:  # fmt: skip
    """torch.norm and Tensor.norm (`p`), linalg.vector_norm and linalg.norm (`ord`)."""
    of_vectors = func is not torch.linalg.norm
    order = kw.pop("p", ord)
    order = 2.0 if order is None or (order == "fro" and of_vectors) else order
    if isinstance(order, str) or kw or not _is_total(x, (), {"dim": dim, "keepdim": keepdim}):
        return NotImplemented
    if not of_vectors and ord is not None:
        return NotImplemented
    _tell_once("each norm of a parameter or gradient is a message between the ranks; "
               "model.clip_grad_norm_() needs one for all")  # fmt: skip
    return norms([x], float(order), dtype)[0]


def norms(tensors: Sequence[Tensor], order: float,
          dtype: torch.dtype | None = None) -> list[Tensor]:  # fmt: skip
    """The norm of each tensor, in one message."""
    found = zip(tensors, _norms_of_atoms(tensors, order, dtype), strict=True)
    return [_norm_of(numbers, order).to(dtype or x.dtype) for x, numbers in found]


def total_norm(tensors: Sequence[Tensor], order: float) -> Tensor:
    """The norm of all tensors as one vector, in one message."""
    with plainly():
        if order == 0:
            return _norm_of(torch.stack(norms(tensors, order)), 1.0)
        return _norm_of(torch.cat(_norms_of_atoms(tensors, order)), order)


def _norms_of_atoms(tensors: Sequence[Tensor], order: float,
                    dtype: torch.dtype | None = None) -> list[Tensor]:  # fmt: skip
    def each(xs: list[Tensor]) -> list[Tensor]:
        kind = dtype or next((_wide(x.dtype) for x in xs if _wide(x.dtype)), None)
        return list(torch._foreach_norm(xs, order, dtype=kind))

    parts = [x for x in tensors if isinstance(x, Sharded)]
    rest = [x for x in tensors if not isinstance(x, Sharded)]
    every, counts = everyones([(x.spread, x) for x in parts], each) if parts else (None, [])
    split = iter(every.split(counts)) if every is not None else iter(())
    alone = iter(each(rest) if rest else [])
    return [next(split) if isinstance(x, Sharded) else next(alone)[None] for x in tensors]


def _norm_of(numbers: Tensor, order: float) -> Tensor:
    if len(numbers) == 1:
        return numbers[0]
    if order == 0:
        return numbers.sum()
    return torch.linalg.vector_norm(numbers, order)


def _foreach_norm(func: Any, tensors: Any, ord: Any = 2, dtype: Any = None) -> Any:
    return norms(tensors, float(ord), dtype)


def _unscaled(func: Any, grads: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
    """What one rank finds infinite is so for everyone."""
    func(grads, found_inf, inv_scale)
    world = next(x.spread.world for x in grads if isinstance(x, Sharded))
    total = world.sum(found_inf.detach().clone())
    found_inf.copy_((total != 0).to(found_inf.dtype))


@cache
def _tell_once(text: str) -> None:
    log.info("%s", text)


ANSWERS.update(
    {
        "sum": _sum,
        "mean": _mean,
        "max": _extreme("max"),
        "min": _extreme("min"),
        "amax": _extreme("amax"),
        "amin": _extreme("amin"),
        "any": _truth("any"),
        "all": _truth("all"),
        "norm": _norm,
        "linalg_vector_norm": _norm,
        "linalg_norm": _norm,
        "vector_norm": _norm,
        "_foreach_norm": _foreach_norm,
        "_amp_foreach_non_finite_check_and_unscale_": _unscaled,
    }
)
