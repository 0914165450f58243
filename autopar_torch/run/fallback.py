"""Data parallelism on the untouched module, for a model that cannot be exported."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import PlanError, TraceError
from ..plan import Plan
from ..trace.call import Call, named_outputs
from ..trace.capture import LossFn

if TYPE_CHECKING:
    from .model import ParallelModel

log = logging.getLogger("autopar_torch")


def adopt(parallel: ParallelModel, plan: Plan, error: TraceError, loss_fn: LossFn | None) -> None:
    """Train the module as it is, every rank on its rows; say why, on every rank."""
    reason = f"{error.what} ({error.where})"
    log.warning(
        "the model cannot be traced, so it trains with data parallelism on the untouched module; "
        "the loss is averaged by rows. Reason: %s", reason,
    )  # fmt: skip
    if plan.zero:
        log.warning("zero=%d is not honoured for a model that cannot be traced", plan.zero)
    parallel._plan = plan
    parallel.replica = next(r for r, replica in enumerate(plan.replicas)
                            if parallel.world.rank in replica.stages[0].devices)  # fmt: skip
    parallel.fallback_reason = reason
    if any(t.is_meta for t in parallel.module.parameters()):
        raise PlanError("a model on meta cannot be trained untraced", where=reason,
                        fix="build it on a real device, or make forward traceable")  # fmt: skip
    for tensor in [*parallel.module.parameters(), *parallel.module.buffers()]:
        tensor.data = tensor.data.to(parallel.device)
        if parallel.world.size > 1:
            dist.broadcast(tensor.data, 0)
    parallel.fallback = _Step(parallel, loss_fn)


class _Step(nn.Module):
    """Forward and backward of this rank's rows; gradients are summed by rows."""

    def __init__(self, parallel: ParallelModel, loss_fn: LossFn | None) -> None:
        super().__init__()
        self.parent = [parallel]  # in a list, so that it is no submodule of itself
        self.loss_fn = loss_fn

    def forward(self, call: Call, tensors: list[Tensor]) -> Any:
        from .model import Outputs, _hand_over

        parallel = self.parent[0]
        rows = parallel.local_slice(call.num_rows)
        share = (rows.stop - rows.start) / call.num_rows
        train = parallel.training and torch.is_grad_enabled()
        loss = torch.zeros((), device=parallel.device)
        if share:
            args, kwargs = call.rebuild(call.slice(tensors, rows.start, rows.stop))
            loss = self._loss(parallel.module, args, kwargs) * share
        grads = self._grads(parallel, loss) if train else []
        total = parallel.world.sum(loss.detach().clone())
        if train:
            return _hand_over(parallel._anchor, total, grads)
        return total if not parallel.outputs else Outputs(loss=total)

    def _loss(self, module: nn.Module, args: Any, kwargs: Any) -> Tensor:
        target = (kwargs.pop("target"),) if self.loss_fn and "target" in kwargs else ()
        output = module(*args, **kwargs)
        if self.loss_fn and target:
            return self.loss_fn(output, *target)
        named = named_outputs(output)
        if "loss" not in named:
            raise PlanError("the model returns no loss", where="forward",
                            fix="return a scalar loss, or pass loss_fn=")  # fmt: skip
        return named["loss"]

    def _grads(self, parallel: ParallelModel, loss: Tensor) -> list[tuple[Tensor, Tensor]]:
        params = [p for p in parallel.module.parameters() if p.requires_grad]
        if loss.requires_grad:
            found: tuple[Tensor | None, ...] = torch.autograd.grad(loss, params, allow_unused=True)
        else:
            found = (None,) * len(params)
        used = torch.tensor([float(g is not None) for g in found], device=parallel.device)
        parallel.world.sum(used)
        result = []
        for param, grad, seen in zip(params, found, used.tolist(), strict=True):
            if seen:
                full = torch.zeros_like(param) if grad is None else grad.contiguous()
                result.append((cast(Tensor, param), parallel.world.sum(full)))
        return result
