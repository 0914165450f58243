"""Who traces, and in what state it leaves the model and the process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..errors import AutoparError, RunError
from ..plan import Precision, check_precision
from ..trace import Traced, sent, trace
from ..trace.call import Call
from ..trace.capture import LossFn, describe_params
from .randomness import untouched
from .world import World

Tracer = Callable[[Call, bool, tuple[str, ...] | None], Traced]


def tracer(model: nn.Module, device: torch.device, loss_fn: LossFn | None,
           precision: Precision) -> Tracer:  # fmt: skip
    check_precision(precision)
    known = describe_params(model)
    dtype = torch.bfloat16 if precision == "bfloat16" else None

    def retrace(call: Call, training: bool, wanted: tuple[str, ...] | None) -> Traced:
        with _as_before(model, device):
            model.train(training)
            return trace(model, call, device=device, loss_fn=loss_fn, wanted=wanted, params=known,
                         dtype=dtype)  # fmt: skip

    return retrace


@contextlib.contextmanager
def _as_before(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Tracing runs forward as Python: it leaves no module in another mode, and draws no numbers
    that other ranks would not draw."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with untouched(device):
            yield
    finally:
        for module, training in modes:
            module.training = training


def once(own: Tracer, place: World) -> Tracer:
    """By rank 0 for all, who ask at the same time: tracing takes longer than reading the result, by
    more where ranks share cores, and nobody may see another model than the others."""
    if place.size == 1:
        return own

    def retrace(call: Call, training: bool, wanted: tuple[str, ...] | None) -> Traced:
        with place.doing("tracing"):
            return by_rank_0(call, training, wanted)

    def by_rank_0(call: Call, training: bool, wanted: tuple[str, ...] | None) -> Traced:
        data, failed = b"", None
        if place.rank == 0:
            try:
                data = sent.pack(own(call, training, wanted))
            except Exception as error:  # the others wait for an answer
                failed = error
                data = sent.pack(_told(error))
        found = sent.unpack(place.agree(data))
        if isinstance(found, AutoparError):
            raise found from failed
        return found

    return retrace


def _told(error: Exception) -> AutoparError:
    if isinstance(error, AutoparError):
        return error
    return RunError(f"tracing stopped: {type(error).__name__}: {error}", where="rank 0")
