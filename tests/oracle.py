"""The oracle for every plan: one process, same seed, same global batch.

`compare` trains a zoo model under a plan and, on rank 0, an untouched copy in one process, and
returns the worst relative differences of losses, gradient norms and parameters after three AdamW
steps. Differences of parameters are relative to the largest parameter. Adam's eps is 1e-6: some
gradients are zero but for rounding (the bias of attention keys), and a smaller eps would turn that
rounding into steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import autopar_torch as ap
import zoo
from autopar_torch.run import tracing
from autopar_torch.trace import serialize
from autopar_torch.trace.row_branches import holds

ROWS, STEPS = 8, 3
TOLERANCE = 1e-5
_REFERENCES: dict[Any, Any] = {}

PLANS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"num_micro_batches": 4}, {"recompute": True}],
    2: [
        {"tp": 2},
        {"pp": 2},
        {"dp": 2},
        {"pp": 2, "num_micro_batches": 4, "schedule": "gpipe"},
        {"pp": 2, "num_micro_batches": 3, "schedule": "1f1b", "recompute": True},
        {"pp": 2, "num_micro_batches": 4, "schedule": "interleaved", "virtual": 2},
        {"pp": 2, "num_micro_batches": 4, "schedule": "zero_bubble"},
        {"dp": 2, "bucket_bytes": 2000},
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 2, "num_micro_batches": 2},
        {"dp": 2, "zero": 3, "num_micro_batches": 2},
        {"dp": 2, "zero": 3, "recompute": True},
        {"tp": 2, "num_micro_batches": 4, "recompute": True},
    ],
    4: [
        {"tp": 4},
        {"tp": 4, "tp_mesh": (2, 2)},
        {"pp": 4, "num_micro_batches": 4},
        {"dp": 4, "zero": 3},
        {"pp": 2, "dp": 2, "num_micro_batches": 2, "bucket_bytes": 2000},
        {
            "pp": 2,
            "dp": 2,
            "num_micro_batches": 2,
            "schedule": "interleaved",
            "virtual": 2,
            "zero": 2,
        },
        {"tp": 2, "pp": 2, "num_micro_batches": 2},
        {"tp": 2, "dp": 2, "zero": 2},
        {"pp": 2, "dp": 2, "num_micro_batches": 2, "schedule": "zero_bubble", "zero": 1},
    ],
    8: [
        {"tp": 2, "pp": 2, "dp": 2, "num_micro_batches": 2},
        {"tp": 2, "pp": 2, "dp": 2, "zero": 3, "num_micro_batches": 2, "schedule": "gpipe"},
    ],
}


def loss_of(output: Any) -> Tensor:
    """The loss in whatever a zoo model returns."""
    if isinstance(output, Tensor):
        return output
    return output[1] if isinstance(output, tuple) else output.loss


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-6)


def train(model: Any, clip: Any, name: str, pad: bool, rows: int = ROWS) -> tuple[list[float], ...]:
    """Losses and gradient norms of a few steps, as any training loop would run them."""
    opt = optimizer(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model(**zoo.batch(name, rows, seed=step, pad=pad)))
        loss.backward()
        norms.append(float(clip(1.0)))
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, norms


def reference(name: str, pad: bool, rows: int = ROWS) -> Any:
    """One process, kept for the next plan."""
    key = (name, pad, rows)
    if key not in _REFERENCES:
        model = zoo.build(name)
        params = list(model.parameters())
        history = train(model, lambda m: torch.nn.utils.clip_grad_norm_(params, m), name, pad, rows)
        state = {k: v.detach().clone() for k, v in model.state_dict().items()}
        _REFERENCES[key] = (*history, state)
    return _REFERENCES[key]


def _must_split(plan: ap.Plan, name: str) -> None:
    """A plan with tensor axes has to cut parameters, else its numbers would say nothing."""
    forms = [text for sharding in plan.shardings for slot, text in sharding.forms.items()
             if slot.startswith("w_")]
    if forms and sum("S" in text for text in forms) < len(forms) / 8:
        raise AssertionError(f"hardly any parameter of {name} is split: {forms}")


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """For tables: a model of the zoo is traced for the first of its plans, which are many."""
    known: dict[str, bytes] = {}
    trace = tracing.trace

    def once(model: Any, call: Any, **options: Any) -> Any:
        modes = [module.training for module in model.modules()]
        key = repr((model, call.key, call.rows_dims, modes, sorted(options.items())))
        found: Any = serialize.unpack(known[key]) if key in known else None
        if found is None or not holds(found.answers, call.num_rows):
            known[key] = serialize.pack(trace(model, call, **options))
        return serialize.unpack(known[key])

    with mock.patch.object(tracing, "trace", once):
        yield


def compare(name: str, plan: ap.Plan, pad: bool, rows: int = ROWS) -> dict[str, float]:
    """Worst relative differences; the same on every rank."""
    torch.manual_seed(0)
    model = ap.parallelize(zoo.build(name), plan=plan)
    losses, norms = train(model, model.clip_grad_norm_, name, pad, rows)
    _must_split(model.plan, name)
    state = model.state_dict()
    worst = torch.zeros(3, dtype=torch.float64)
    if not dist.is_initialized() or dist.get_rank() == 0:
        want_losses, want_norms, want = reference(name, pad, rows)
        top = max(float(v.abs().max()) for v in want.values() if v.is_floating_point())
        worst[0] = max(abs(a - b) / abs(b) for a, b in zip(losses, want_losses, strict=True))
        worst[1] = max(abs(a - b) / abs(b) for a, b in zip(norms, want_norms, strict=True))
        worst[2] = max(float((state[k].double() - v.double()).abs().max()) / top
                       for k, v in want.items())
    if dist.is_initialized():
        dist.broadcast(worst, 0)
    return dict(zip(("loss", "norm", "params"), worst.tolist(), strict=True))


def text(degrees: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in degrees.items()) or "one process"


def row(name: str, degrees: dict[str, Any], pad: bool) -> tuple[str, float]:
    """(what to print, worst difference); a plan that does not apply says why, and counts as 0."""
    try:
        worst = compare(name, ap.Plan.uniform(**degrees), pad)
    except ap.AutoparError as error:
        return f"does not apply: {error.what}", 0.0
    shown = " ".join(f"{k} {v:.1e}" for k, v in worst.items())
    return shown, max(worst.values())
