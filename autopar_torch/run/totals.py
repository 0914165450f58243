"""One number of every element of a sharded tensor: sums, means, extremes, norms.

Every rank computes it for the atoms that it holds; one message joins them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import RunError
from .sharded import ANSWERS, Sharded, plainly
from .spread import summed
from .world import World

Each = Callable[[list[Tensor]], Sequence[Tensor]]  # one number of every tensor


class _Everyones(torch.autograd.Function):
    """Put this rank's numbers into the list of all atoms' numbers. All holders of an atom have the
    same number of it, and all ranks the same loss, so each takes the gradient of its places."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, slots: list[int], speaks: list[bool], count: int,
                world: World) -> Tensor:
        ctx.slots = slots
        every = own.new_zeros(count)
        every[slots] = own.where(torch.tensor(speaks, dtype=torch.bool, device=own.device), 0)
        return summed(every, world)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][ctx.slots], None, None, None, None


def _everyones(tensors: Sequence[Sharded], each: Each) -> Tensor:
    """`each` of every atom of tensors, on every rank, in one message."""
    rank, count = tensors[0].spread.world.rank, 0
    slots: list[int] = []
    speaks: list[bool] = []
    pieces: list[Tensor] = []
    none: list[Tensor] = []  # of what this rank has nothing of: its backward may be awaited, too
    for x in tensors:
        if not any(rank in atom.holders for atom in x.spread.atoms):
            none.append(x.reshape(-1)[:0])
        for slot, atom in enumerate(x.spread.atoms, count):
            if rank in atom.holders:
                slots.append(slot)
                speaks.append(atom.holders[0] == rank)
                pieces.append(x.spread.atom(x, atom))
        count += len(x.spread.atoms)
    widest = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    own = each([torch.zeros(1, dtype=widest, device=tensors[0].device)])[0].new_zeros(0)
    if pieces:
        own = torch.stack([number.to(own.dtype) for number in each(pieces)])
    own = torch.cat([own, *(x.to(own.dtype) for x in none)])
    return cast(Tensor, _Everyones.apply(own, slots, speaks, count, tensors[0].spread.world))


def _wide(kind: torch.dtype) -> torch.dtype | None:
    """The wider type in which torch adds up numbers of a type, if it does."""
    return torch.float32 if kind in (torch.bfloat16, torch.float16) else None


def _sum(x: Tensor) -> Tensor:
    return x.sum(dtype=_wide(x.dtype))


def _total(each: Callable[[Tensor], Tensor],
           join: Callable[[Tensor, int], Tensor]) -> Callable[..., Any]:
    def answer(func: Any, x: Tensor, *dims: Any, **options: Any) -> Any:
        if dims or options or not isinstance(x, Sharded) or not x.spread.shape.numel():
            return NotImplemented
        every = _everyones([x], lambda xs: [each(one) for one in xs])
        found = join(every, x.spread.shape.numel())
        return found.to(x.dtype) if x.is_floating_point() and found.is_floating_point() else found

    return answer


def _norm(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """torch.norm and Tensor.norm (`p`), linalg.vector_norm and linalg.norm (`ord`)."""
    order, *more = (*args, *kwargs.values()) or (None,)
    matrix = func is torch.linalg.norm and order is not None
    if order is None or (order == "fro" and not matrix):
        order = 2.0
    if matrix or more or not {"p", "ord"}.issuperset(kwargs) or isinstance(order, str) or (
            not isinstance(x, Sharded)):
        return NotImplemented
    return total_norm([x], float(order)).to(x.dtype)


def total_norm(tensors: Sequence[Tensor], order: float) -> Tensor:
    """The norm of all tensors as one vector, in one message."""

    def each(xs: list[Tensor]) -> Sequence[Tensor]:
        wide = next((_wide(x.dtype) for x in xs if _wide(x.dtype)), None)
        return torch._foreach_norm(xs, order, dtype=wide)

    with plainly():
        parts = [x for x in tensors if isinstance(x, Sharded)]
        rest = [x for x in tensors if not isinstance(x, Sharded)]
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if parts and not learns and 0.0 < order < math.inf:
            return _norm_of(parts, rest, order, each)
        found = [_everyones(parts, each)] if parts else []
        found += [torch.stack(list(each(rest)))] if rest else []
        numbers = torch.cat(found)
        return numbers.sum() if order == 0 else torch.linalg.vector_norm(numbers, order)


def _norm_of(parts: Sequence[Sharded], rest: Sequence[Tensor], order: float, each: Each) -> Tensor:
    """Without gradients a rank needs to know only what it speaks for: one number per rank."""

    def powers(xs: Sequence[Tensor]) -> Tensor:
        numbers = torch.stack(list(each([*xs, start])))
        return numbers.double().pow(order).sum()

    widest = functools.reduce(torch.promote_types, (x.dtype for x in (*parts, *rest)))
    start = torch.zeros(1, dtype=widest, device=parts[0].device)
    total = parts[0].spread.world.sum(powers([own for x in parts for own in x.spread.said(x)]))
    return (total + powers(rest)).pow(1.0 / order).to(each([start])[0].dtype)


def clip_grad_norm(module: nn.Module, max_norm: float, norm_type: float,
                   error_if_nonfinite: bool, foreach: bool | None) -> Tensor:
    """torch's clip_grad_norm_ over every element of the model once, in one message."""
    params = [p for p in module.parameters() if p.grad is not None]
    if not params or not norm_type:
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = total_norm([cast(Tensor, p.grad) for p in params], float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RunError(f"the norm of all gradients is {float(norm)}, so they cannot be clipped",
                       where="clip_grad_norm_",
                       fix="find what made them so, or pass error_if_nonfinite=False")
    with plainly():
        nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach is not False)
    return norm


def _unscaled(func: Any, grads: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale gradients as GradScaler does; if one rank finds an infinity, all ranks know."""
    func(grads, found_inf, inv_scale)
    world = next(x.spread.world for x in grads if isinstance(x, Sharded))
    total = world.sum(found_inf.detach().clone())
    found_inf.copy_((total != 0).to(found_inf.dtype))


ANSWERS.update(
    {
        "sum": _total(_sum, lambda every, _: every.sum()),
        "mean": _total(_sum, lambda every, count: every.sum() / count),
        "max": _total(torch.max, lambda every, _: every.max()),
        "min": _total(torch.min, lambda every, _: every.min()),
        "amax": _total(torch.amax, lambda every, _: every.amax()),
        "amin": _total(torch.amin, lambda every, _: every.amin()),
        "any": _total(lambda x: x.any().int(), lambda every, _: every.any()),
        "all": _total(lambda x: x.all().int(), lambda every, _: every.all()),
    }
)
ANSWERS.update(dict.fromkeys(("norm", "linalg_vector_norm", "linalg_norm", "vector_norm"), _norm))
ANSWERS["_amp_foreach_non_finite_check_and_unscale_"] = _unscaled
