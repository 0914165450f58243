"""Around each op of a trace: how many there may be, and which small values are known."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils._mode_utils import no_dispatch

from ..errors import TraceError
from ..model import ROWS
from .effects import attributes_set, refuse_messages
from .row_branches import is_known, mark, of_rows

MOST_OPS, MOST_SECONDS = 200_000, 900.0
MOST_PARTS = 256  # of the batch, in so many ops; fewer in more
MOST_OPS_OF_PARTS = 1 << 13
MOST_KNOWN = 64  # elements: what forward itself makes of numbers may decide what it does
_WHOLE = ((), (0,), (0, 2**63 - 1))  # slices
_RANGES = (torch.ops.aten.arange.default, torch.ops.aten.arange.start,
           torch.ops.aten.arange.start_step)


class TooLongError(RuntimeError):
    """The trace would hardly end."""


@contextlib.contextmanager
def each_op() -> Iterator[None]:
    """So many ops and seconds for a trace: loops are written out step by step. Known values are
    kept with fake tensors, which drop them when data is written to their memory. The tracer's own
    record would not, and leaves nothing in the graph of what it decided, so it is switched off."""
    plain, end = FakeTensorMode.dispatch, time.monotonic() + MOST_SECONDS
    num_ops = num_parts = 0

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal num_ops, num_parts
        num_ops, num_parts = num_ops + 1, num_parts + _num_parts(func, args)
        if num_ops > MOST_OPS or time.monotonic() > end:
            raise TooLongError(f"forward has more than {MOST_OPS} ops, or takes more than "
                               f"{MOST_SECONDS:.0f} s to trace")
        if num_parts * max(num_ops / MOST_OPS_OF_PARTS, 1) > MOST_PARTS:
            raise TooLongError("forward goes through the batch row by row, or by few rows")
        refuse_messages(func)
        if _asks(func, args) and of_rows(args):
            raise TraceError("Python asks for the value of a tensor that is made of the number of "
                             "rows", where="forward", fix="ask for the number itself: len(x) > 5")
        made: Any = plain(mode, func, types, args, kwargs or {})
        for own in filter(is_known, made if isinstance(made, (tuple, list)) else (made,)):
            if of_rows(args):
                mark(own)
        if func in _RANGES and all(type(x) is int for x in args) and made.numel() <= MOST_KNOWN:
            with no_dispatch():
                made.constant = func(*args, dtype=made.dtype)
            mode.fake_tensor_converter.add_constant_storage_mapping(made)
        return made

    with (attributes_set(FakeTensorMode, dispatch=dispatch),
          attributes_set(fake_tensor, CONSTANT_NUMEL_LIMIT=MOST_KNOWN),
          attributes_set(proxy_tensor, CONSTANT_NUMEL_LIMIT=0)):
        yield


def _asks(func: Any, args: Any) -> bool:
    """Whether Python will see values of what an op is given, or how many there are of a kind."""
    tags = getattr(func, "tags", ())
    if func is torch.ops.aten.index.Tensor:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _num_parts(func: Any, args: Any) -> int:
    """Of how many parts of the batch an op makes values of their own."""
    name = func.overloadpacket.__name__
    if name not in ("unbind", "split", "select", "slice"):
        return 0
    at = 2 if name == "split" else 1
    size = args[0].shape[args[at] if len(args) > at else 0] if args[0].dim() else 0
    if not size or size % ROWS or (name == "slice" and tuple(args[2:]) in _WHOLE):
        return 0
    if name == "unbind":
        return size
    return -(-size // args[1]) if name == "split" else 1
