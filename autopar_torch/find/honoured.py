"""What was asked of a search and cannot be, or is not, done: told, never passed over."""

from __future__ import annotations

import logging

import torch
from msgspec.structs import replace

from ..plan import Plan, Precision
from ..run.world import World
from ..search.space import Constraints
from ..trace import Traced

log = logging.getLogger("autopar_torch")
FIELDS = Constraints.__struct_fields__


def possible(limits: Constraints, traced: Traced, *, tell: bool) -> Constraints:
    """One replica where ops look at several rows at once, all forwards before any backward where
    the loss is made outside of the model, and nothing cut by ZeRO where nothing trains, whatever
    was asked for."""
    alone, outside = traced.graph.unjoined, "loss" not in traced.outputs
    trains = any(info.trainable for info in traced.graph.params.values())
    if alone and tell:
        asked = limits.dp not in (None, 1)
        log.log(logging.WARNING if asked else logging.INFO,
                "%s, as the rows of the batch depend on each other: %s",
                f"not honoured: dp={limits.dp}" if asked else "no data parallelism is looked at",
                traced.graph.coupling())
    if outside and tell and limits.schedule not in (None, "gpipe"):
        log.warning("not honoured: schedule=%s, as the model returns no loss", limits.schedule)
    if not trains and tell and limits.zero:
        log.warning("not honoured: zero=%d, as no parameter is trained", limits.zero)
    return replace(limits, dp=1 if alone else limits.dp, zero=limits.zero if trains else 0,
                   schedule="gpipe" if outside else limits.schedule)


def unsplit(limits: Constraints) -> Plan:
    """What one process does of what was asked for."""
    plan = Plan.uniform(num_micro_batches=limits.num_micro_batches or 1,
                        recompute=limits.recompute or False, precision=limits.precision,
                        grad_dtype=limits.grad_dtype)
    return replace(plan, reason="one process")


def done_alone(limits: Constraints) -> Constraints:
    """What `unsplit` does of what was asked."""
    return replace(limits, tp=1, pp=1, dp=1, zero=0, memory_bytes=None, rings="never")


def tell_unused(place: World, limits: Constraints, confirm: int, done: Constraints,
                 why: str) -> None:
    """Warn of what was asked of a search, if there is no search and it is not done anyway."""
    usual = Constraints()
    done = replace(done, batch_statistics=limits.batch_statistics)  # tracing honours it
    names = [n for n in FIELDS if getattr(limits, n) not in (getattr(usual, n), getattr(done, n))]
    names += ["confirm"] if confirm else []
    if names and place.rank == 0:
        log.warning("not honoured, as %s: %s", why, ", ".join(names))


def tell_precision(precision: Precision, device: torch.device) -> None:
    """A GPU computes float32 products at a fraction of its rate: nobody should do so unawares."""
    if (device.type, precision, torch.get_float32_matmul_precision()) == (
            "cuda", "float32", "highest"):
        log.warning('products are computed in full float32, the slowest way on %s: '
                    'torch.set_float32_matmul_precision("high") allows TF32, and '
                    'constraints={"precision": "bfloat16"} keeps float32 masters', device)
