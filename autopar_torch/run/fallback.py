"""Data parallelism on the untouched module, for a model that cannot be exported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import PlanError, TraceError
from ..plan import Plan
from ..trace.burnt import user_hooks
from ..trace.call import Call
from ..trace.form import LossFn, form_of, outputs_of
from . import shared_out
from .handover import hand_over
from .model import ParallelModel
from .randomness import dropout_apart
from .returned import returned

log = logging.getLogger("autopar_torch")


def adopt(parallel: ParallelModel, plan: Plan, error: TraceError, loss_fn: LossFn | None,
          source: Callable[[str], Tensor | None], call: Call, tensors: list[Tensor]) -> None:
    """Train the module as it is, every rank on its rows; say why, on every rank."""
    reason = f"{error.what} ({error.where})"
    if parallel.world.size > 1:
        _refuse_whole_batch(parallel.module, reason)
    log.warning(
        "the model cannot be traced, so it trains with data parallelism on the untouched module; "
        "the loss is averaged by rows. Reason: %s", reason,
    )
    if any(t.is_meta for t in parallel.module.parameters()):
        raise PlanError("a model on meta cannot be trained untraced", where=reason,
                        fix="build it on a real device, or make forward traceable")
    for name, tensor in [*parallel.module.named_parameters(), *parallel.module.named_buffers()]:
        tensor.data = cast(Tensor, source(name))
    if parallel.world.size > 1:
        _refuse_coupled(parallel, call, tensors, loss_fn, reason)
    parallel.adopt_untraced(_plain(plan, parallel.outputs), reason, _Step(parallel, loss_fn))


def _refuse_whole_batch(model: nn.Module, reason: str) -> None:
    """Refuse what looks at the whole batch: on several ranks it would see only its rank's rows."""
    for name, module in model.named_modules():
        seen = [f"the hook {getattr(hook, '__qualname__', hook)}" for _, hook in user_hooks(module)]
        if isinstance(module, _BatchNorm) and module.training:
            seen.append(type(module).__name__)
        if seen:
            raise PlanError(
                f"{seen[0]} of {name or 'the model'} would see the rows of one rank only, as the "
                "model cannot be traced", where=reason,
                fix="take it out (a hook: return what it records as an output), make forward "
                "traceable, or train in one process",
            )


def _refuse_coupled(parallel: ParallelModel, call: Call, tensors: list[Tensor],
                    loss_fn: LossFn | None, reason: str) -> None:
    """Rank 0 tries few rows together and apart; all ranks follow what it finds."""
    why = ""
    if parallel.world.rank == 0:
        why = shared_out.refusal(parallel.module, call, tensors, loss_fn, parallel.device)
    if why := parallel.world.told(why, str):
        raise PlanError(
            f"the batch cannot be shared out among replicas: {why}; the model cannot be traced",
            where=reason, fix="make forward traceable, let rows not depend on each other and "
            "labels count alike in every row, say batch_dim= if rows do not come first, or train "
            "in one process",
        )


def _plain(plan: Plan, outputs: tuple[str, ...]) -> Plan:
    """The part of a plan that is done: replicas, each on its rows. What is dropped is logged."""
    alike = len({replica.num_micro_batches for replica in plan.replicas}) == 1
    replicas = tuple(
        replace(replica, num_micro_batches=1 if alike else replica.num_micro_batches,
                stages=tuple(replace(stage, recompute=False) for stage in replica.stages))
        for replica in plan.replicas
    )
    kept = replace(plan, replicas=replicas, zero=0, precision="float32")
    asked = {"zero": plan.zero, "precision": plan.precision != "float32", "outputs": outputs,
             "num_micro_batches, recompute": replicas != plan.replicas}
    if dropped := [name for name, wanted in asked.items() if wanted]:
        log.warning("not honoured, as the model cannot be traced: %s", ", ".join(dropped))
    return kept


class _Step:
    """Forward and backward of this rank's rows; gradients are summed by rows."""

    def __init__(self, parallel: ParallelModel, loss_fn: LossFn | None) -> None:
        self.parallel, self.loss_fn = parallel, loss_fn

    def __call__(self, call: Call, tensors: list[Tensor]) -> Any:
        parallel = self.parallel
        if not (parallel.training and torch.is_grad_enabled()):  # each rank runs the whole batch
            with call.surroundings(parallel.device):
                form, named = outputs_of(parallel.module, self.loss_fn, *call.rebuild(tensors))
            return returned(named, form, call.num_rows, train=False)
        parallel.begin_step()
        if parallel.world.size == 1:
            return self._step(call, tensors)
        with parallel.numbers.drawing(), dropout_apart(parallel.replica):
            return self._step(call, tensors)

    def _step(self, call: Call, tensors: list[Tensor]) -> Any:
        parallel = self.parallel
        rows = parallel.local_slice(call.num_rows)
        share = (rows.stop - rows.start) / call.num_rows
        loss, form = torch.zeros((), device=parallel.device), form_of(["loss"])
        if share:
            own = call.rebuild(call.slice(tensors, rows.start, rows.stop))
            with call.surroundings(parallel.device):
                form, named = outputs_of(parallel.module, self.loss_fn, *own)
            if "loss" not in named:
                raise PlanError("the model returns no loss", where="forward",
                                fix="return a scalar loss, or pass loss_fn=")
            loss = named["loss"] * share
        total = parallel.world.sum(loss.detach().clone())
        parts = {(rows.start, rows.stop): loss} if share else {}
        parallel.non_finite.check(parallel.num_steps, parallel.replica, total, parts)
        total = hand_over(parallel.anchor, total, self._grads(loss))
        return returned({"loss": total}, form, call.num_rows, train=True)

    def _grads(self, loss: Tensor) -> list[tuple[Tensor, Tensor]]:
        params = [p for p in self.parallel.module.parameters() if p.requires_grad]
        found = (torch.autograd.grad(loss, params, allow_unused=True) if loss.requires_grad
                 else (None,) * len(params))
        used = torch.tensor([float(g is not None) for g in found], device=self.parallel.device)
        self.parallel.world.sum(used)
        result = []
        for param, grad, seen in zip(params, found, used.tolist(), strict=True):
            if seen:
                full = torch.zeros_like(param) if grad is None else grad.contiguous()
                result.append((cast(Tensor, param), self.parallel.world.sum(full)))
        return result
