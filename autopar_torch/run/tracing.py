"""Which rank traces, and in what state tracing leaves the model and the process."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from .. import progress
from ..errors import AutoparError, TraceError
from ..model import ROWS, ParamInfo
from ..plan import Precision
from ..trace import Traced, opaque, serialize, trace
from ..trace.call import Call
from ..trace.capture import describe_params, user_line
from ..trace.form import LossFn
from .prologue import Prologue
from .randomness import untouched
from .sharded import Sharded
from .world import World

log = logging.getLogger("autopar_torch")
MOST_BRANCHES = 16
Tracer = Callable[[Call, bool, tuple[str, ...] | None], Traced]


def tracer(model: nn.Module, device: torch.device, loss_fn: LossFn | None,
           precision: Precision, local: bool, in_order: bool = False) -> Tracer:
    full: dict[str, ParamInfo] = {}  # later the model holds parts of its parameters
    dtype = torch.bfloat16 if precision == "bfloat16" else None

    def retrace(call: Call, training: bool, wanted: tuple[str, ...] | None) -> Traced:
        progress.tell("tracing the model")
        now = describe_params(model)
        full.update({name: info for name, info in now.items() if name not in full})
        placed = {name for name, own in model.named_buffers() if isinstance(own, Sharded)}
        known = {name: replace(full[name], trainable=info.trainable) for name, info in now.items()}
        grads = wanted is not None or torch.is_grad_enabled()  # inference_mode(False) sets it
        with (untouched(device), modes_kept(model, training), torch.inference_mode(False),
              torch.set_grad_enabled(grads)):
            try:
                return trace(model, call, device=device, loss_fn=loss_fn, wanted=wanted,
                             params=known, dtype=dtype, local=local, placed=placed,
                             in_order=in_order)
            except Exception as error:
                told = _with_hint(_told(error), call, training)
                if isinstance(told, TraceError):
                    told.decided = getattr(error, "decided", ())
                raise told from error.__cause__ or error

    return retrace


def _with_hint(error: AutoparError, call: Call, training: bool) -> AutoparError:
    """Sizes that do not fit may be those of an input that has no rows."""
    if not training:
        return type(error)(error.what, where=error.where, fix=f"{error.fix}{'; ' * bool(error.fix)}"
                           "under replicas without ZeRO the plain module may be asked instead, as "
                           "model.module(...)")
    n, many = call.num_rows, sum(call.rows) > 1
    states = [shape for shape, dim in zip(call.shapes, call.rows_dims, strict=True)
              if dim is None and n in shape[1:]]
    if states and " size" in error.what:
        return type(error)(
            f"{error.what} (an input is {states[0]}, of which no dim is taken for the {n} rows)",
            where=error.where, fix="if it is a state of layers which the first call had not got "
            f"(None), start from one of zeros; {error.fix}")
    if f"{ROWS}" not in error.what or not many:
        return error
    return type(error)(
        f"{error.what} (an input is taken for rows if its first dim is {n}, as the batch's; if one "
        f"is none, say a mask of {n} x {n}, call with another number of rows first, or make it a "
        "buffer)", where=error.where, fix=error.fix)


@contextlib.contextmanager
def modes_kept(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in the given mode. If it is in that mode, the modes of submodules stay."""
    modes = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before


def for_batch(own: Tracer, buffers: Mapping[str, Tensor], call: Call, tensors: Sequence[Tensor],
              *how: Any) -> Traced:
    """A trace whose branches are those that this batch takes. Where that cannot be traced, or they
    are too many, nothing is decided: a module that asks is computed whole, if there is one."""
    told: TraceError | None = None
    for _ in range(MOST_BRANCHES):
        try:
            traced = own(call, *how)
        except TraceError as error:
            if call.decided is None or not error.decided:
                raise (told or error) from None
            told = error
            *before, last = error.decided
            assumed = len(error.decided) > len(call.decided)
            call = dataclasses.replace(call, decided=(*before, not last) if assumed else None)
            continue
        if not traced.decided or any(t.is_meta for t in (*tensors, *buffers.values())):
            return traced
        found = Prologue(traced, (), dict(buffers), tensors[0].device).decided(call, tensors)
        if found == tuple(answer for _, answer in traced.decided):
            return traced
        call = dataclasses.replace(call, decided=found)
    return own(dataclasses.replace(call, decided=None), *how)


def in_rows_or_one(own: Tracer, model: nn.Module, call: Call, tensors: list[Tensor],
                   *how: Any) -> tuple[Call, list[Tensor], Traced]:
    """A trace for any number of rows; where there is none, of the batch as one."""
    try:
        return call, tensors, for_batch(own, dict(model.named_buffers()), call, tensors, *how)
    except TraceError as error:
        return in_one_row(own, model, call, tensors, *how, error=error)


def in_one_row(own: Tracer, model: nn.Module, call: Call, tensors: Sequence[Tensor], *how: Any,
               error: AutoparError) -> tuple[Call, list[Tensor], Traced]:
    """The batch traced as it is where its rows cannot be told apart, as those of a graph and of its
    matrix: nothing of it is shared out. `error`: why they cannot."""
    whole, given = call.as_one_row(tensors)
    try:
        traced = for_batch(own, dict(model.named_buffers()), whole, given, *how)
    except TraceError:
        raise error from None
    log.warning("the rows of the batch cannot be told apart, so it is one: no replicas and no "
                "micro-batches share it. Reason: %s (%s)", error.what, error.where)
    return whole, given, traced


def once(own: Tracer, place: World, model: nn.Module) -> Tracer:
    """Rank 0 traces for all ranks, which ask at the same time: tracing takes longer than reading
    the result, most of all where ranks share cores, and all ranks must see the same model."""
    if place.size == 1:
        return own

    def retrace(*asked: Any) -> Traced:
        data, failed = b"", None
        with place.doing("tracing"):
            if place.rank == 0:
                try:
                    data = serialize.pack(own(*asked))
                except Exception as error:  # the others wait for an answer
                    data, failed = serialize.pack(_told(error)), error
            found = serialize.unpack(place.agree(data))
        if isinstance(found, AutoparError):
            raise found from failed
        opaque.bind([*found.programs.values(), found.prologue], model)
        return found

    return retrace


def _told(error: Exception) -> AutoparError:
    """The error as all ranks raise it, whatever it was."""
    if isinstance(error, AutoparError):
        return error
    return TraceError(f"tracing stopped: {type(error).__name__}: {error}", where=user_line(error))
