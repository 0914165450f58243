"""Where torch would take this rank's part of a tensor for the whole that it stands for.

`parameter.data = value` of a plain parameter, `torch.tensor(parameter)`, what torch.func is given,
and what scripts for DDP reduce themselves.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch.jit._builtins import _register_builtin
from torch.utils._device import _device_constructors

from ..errors import RunError
from ..trace.functions import DATA
from .sharded import Sharded, Whole, plainly


class Data:
    """`data` of every parameter."""

    __name__ = "data"

    def __get__(self, x: Tensor | None, owner: Any = None) -> Any:
        return self if x is None else DATA.__get__(x, owner)

    def __set__(self, x: Tensor, value: Tensor) -> None:
        if isinstance(value, Sharded) and not isinstance(x, Sharded):
            with plainly():
                value = value.full()
        DATA.__set__(x, value)


_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)


class _Done:
    """Of a communication that was none."""

    def wait(self, *_: Any) -> bool:
        return True


def attend() -> None:
    nn.Parameter.data = Data()  # type: ignore[assignment]
    _device_constructors()  # which torch keeps: the function itself, that a default device is for
    torch.tensor = _of_whole(torch.tensor)
    _register_builtin(torch.tensor, "aten::tensor")  # for torch.jit
    dist.all_reduce = _among_equals(dist.all_reduce, adds=True)
    dist.broadcast = _among_equals(dist.broadcast, adds=False)
    for home, name in (eager_transforms, "_wrap_tensor_for_grad"), (vmap, "_add_batch_dim"):
        setattr(home, name, _of_whole(getattr(home, name)))


def _of_whole(plain: Any) -> Any:
    @functools.wraps(plain)
    def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, Whole):
            with plainly(), torch._C._DisableFuncTorch():
                data = data.full()
        return plain(data, *args, **kwargs)

    return tensor


def _among_equals(plain: Any, adds: bool) -> Any:
    """Every rank has the same whole tensor, so a sum of it is a multiple, and all else is as it
    is."""
    @functools.wraps(plain)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, Sharded):
            return plain(tensor, *args, **kwargs)
        op = kwargs.get("op", args[0] if args else dist.ReduceOp.SUM)
        if adds and op not in _OPS:
            raise RunError(f"all_reduce of a part of a parameter by {op}", where="all_reduce",
                           fix="sum, average, or take the least or the largest")
        if adds and op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size(kwargs.get("group", args[1] if args[1:] else None)))
        return _Done() if kwargs.get("async_op") or args[2:3] == (True,) else None

    return call
