"""Whether the rows of a batch may be shared out among replicas of a module that is not traced.

The module itself runs on few rows of the first batch, together and apart: losses and gradients,
weighed by rows, have to add up. Parameters, buffers and random numbers are left as they were.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..trace.call import Call
from ..trace.form import LossFn, outputs_of
from .randomness import untouched

log = logging.getLogger("autopar_torch")
MOST_ROWS = 4
LIMIT = {torch.float64: 1e-6, torch.float32: 1e-3}
FARTHEST = 1e-2  # of the largest gradient: below it, a parameter's is noise


class _Tried(NamedTuple):
    loss: Tensor
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]  # as the run left them


def refusal(model: nn.Module, call: Call, tensors: list[Tensor], loss_fn: LossFn | None,
            device: torch.device) -> str:
    """Why not; nothing if they may be, or if there is one row only."""
    count = min(call.num_rows, MOST_ROWS)
    if count < 2:
        return ""
    rows = call.slice(tensors, 0, count)
    with untouched(device), torch.random.fork_rng(devices=[]):
        why = ""
        for dtype, limit in LIMIT.items():
            try:
                own = copy.deepcopy(model).to(dtype)
                given = _as_type(rows, dtype)
                whole = _run(own, call, given, loss_fn, device)
            except Exception as error:  # of the model, whatever it is
                if count < call.num_rows and _runs(model, call, tensors, loss_fn, device, dtype):
                    return f"{count} of {call.num_rows} rows alone do not run ({str(error)[:80]})"
                log.debug("the model does not run on %d rows in %s: %s", count, dtype, error)
                continue
            if not whole.loss.isfinite():
                continue
            for change in (_same, _far):
                why = why or _apart(own, call, [change(t, r) for t, r in zip(
                    given, call.rows, strict=True)], count, loss_fn, device, limit)
            return why
    log.warning("whether rows depend on each other could not be tried on %d rows", count)
    return ""


def _as_type(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype) if t.is_floating_point() else t for t in tensors]


def _runs(model: nn.Module, call: Call, tensors: list[Tensor], loss_fn: LossFn | None,
          device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the model runs on the whole batch."""
    try:
        _run(copy.deepcopy(model).to(dtype), call, _as_type(tensors, dtype), loss_fn, device)
    except Exception as error:  # of the model, whatever it is
        log.debug("the model does not run in %s: %s", dtype, error)
        return False
    return True


def _same(value: Tensor, has_rows: bool) -> Tensor:
    return value


def _far(value: Tensor, has_rows: bool) -> Tensor:
    """Rows that differ in size: what looks at the largest of all shows."""
    if not has_rows or not value.is_floating_point():
        return value
    size = torch.arange(1, len(value) + 1, dtype=value.dtype, device=value.device)
    return value * size.view(-1, *[1] * (value.dim() - 1))


def _run(model: nn.Module, call: Call, tensors: list[Tensor], loss_fn: LossFn | None,
         device: torch.device) -> _Tried:
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    drops = {m: m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)}
    for module in drops:
        module.p = 0.0
    torch.manual_seed(0)
    try:
        with torch.enable_grad(), call.surroundings(device):
            _, named = outputs_of(model, loss_fn, *call.rebuild(tensors))
            loss = named["loss"]
            params = {n: p for n, p in model.named_parameters() if p.requires_grad}
            found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        left = {name: value.clone() for name, value in model.named_buffers()}
    finally:
        for module, chance in drops.items():
            module.p = chance
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(buffers[name])
    grads = {n: torch.zeros_like(p) if g is None else g
             for (n, p), g in zip(params.items(), found, strict=True)}
    return _Tried(loss.detach(), grads, left)


def _apart(model: nn.Module, call: Call, tensors: list[Tensor], count: int,
           loss_fn: LossFn | None, device: torch.device, limit: float) -> str:
    whole = _run(model, call, tensors, loss_fn, device)
    for first in {1, count // 2}:
        try:
            parts = [(size / count, _run(model, call, call.slice(tensors, start, start + size),
                                         loss_fn, device))
                     for start, size in ((0, first), (first, count - first))]
        except Exception as error:  # of the model, whatever it is
            return f"{first} of {count} rows alone do not run ({str(error)[:80]})"
        for n, kept in whole.buffers.items():
            if not all(torch.allclose(kept, p.buffers[n], limit, limit, True) for _, p in parts):
                return f"the buffer {n} would record the rows of one rank only"
        largest = max((float(g.abs().max()) for g in whole.grads.values()), default=0.0)
        wants: dict[str, Any] = {"the loss": (whole.loss, [(s, p.loss) for s, p in parts])}
        wants |= {f"the gradient of {n}": (g, [(s, p.grads[n]) for s, p in parts])
                  for n, g in whole.grads.items()}
        for name, (want, found) in wants.items():
            total = sum(share * value for share, value in found)
            size = max(float(want.abs().max()), FARTHEST * largest) if want.dim() else float(
                want.abs())
            if want.numel() and float((total - want).abs().max()) > limit * size:
                return f"{name} of few rows together is not that of the rows apart"
    return ""
