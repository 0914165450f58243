"""Exchanges as ops that a compiler sees: what they do is ours, their order is fixed by a chain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .collectives import Axis, Convert, run_moves
from .price import Move


class _Route(NamedTuple):
    """What a conversion does. Equal ones have one number, in every program."""

    ahead: tuple[Move, ...]
    back: tuple[Move, ...]
    axes: tuple[Axis, ...]


_numbers: dict[_Route, int] = {}
_routes: list[_Route] = []
_silent: list[bool] = []
_library = torch.library.Library("autopar_torch", "FRAGMENT")
_library.define("move(Tensor x, Tensor turn, int number, SymInt[] shape, bool back) "
                "-> (Tensor, Tensor)")


def number_of(convert: Convert) -> int:
    route = _Route(convert.ahead, convert.back, convert.axes)
    if route not in _numbers:
        _numbers[route] = len(_routes)
        _routes.append(route)
    return _numbers[route]


@contextlib.contextmanager
def rehearsed() -> Iterator[None]:
    """What runs inside sends nothing: its exchanges give zeros."""
    _silent.append(True)
    try:
        yield
    finally:
        _silent.pop()


def _move(x: Tensor, turn: Tensor, number: int, shape: list[int],
          back: bool) -> tuple[Tensor, Tensor]:
    route = _routes[number]
    if _silent:
        return x.new_zeros(shape), torch.empty_like(turn)
    y = run_moves(x, route.back if back else route.ahead, route.axes).contiguous()
    shared = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return y.clone() if shared else y, torch.empty_like(turn)


_library.impl("move", _move, "CompositeExplicitAutograd")


def _fake_move(x: Tensor, turn: Tensor, number: int, shape: list[int],
               back: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(shape), torch.empty_like(turn)


torch.library.register_fake("autopar_torch::move", _fake_move, lib=_library)


class _Moved(torch.autograd.Function):
    """The same steps as those of `Convert`, each after the one before it in either direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Tensor, number: int,
                shape: list[int]) -> tuple[Tensor, Tensor]:
        ctx.number, ctx.shape = number, list(x.shape)
        if not _routes[number].ahead:
            return x.view_as(x), turn.view_as(turn)
        return cast(tuple[Tensor, Tensor],
                    torch.ops.autopar_torch.move(x, turn, number, shape, False))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        dy, turn = grads
        if not ctx.needs_input_grad[0]:
            return None, turn, None, None
        if not _routes[ctx.number].back:
            return dy, turn, None, None
        dx, turn = torch.ops.autopar_torch.move(dy, turn, ctx.number, ctx.shape, True)
        return dx, turn, None, None


def moved(x: Tensor, turn: Tensor, number: int, shape: list[int]) -> tuple[Tensor, Tensor]:
    """The value where it is needed, and the turn of the next."""
    return cast(tuple[Tensor, Tensor], _Moved.apply(x, turn, number, shape))
