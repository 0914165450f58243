"""The first step beside the module as it is: whether a trace and a plan make of a batch what the
module makes of it in one process. Rank 0 looks, where that takes little time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..cluster import CPU_CORE, GPU
from ..errors import RunError
from ..guards import Guards
from ..plan import Plan
from ..shard.price import Prices, op_seconds
from ..trace import Traced
from ..trace.burnt import user_hooks
from ..trace.call import Call
from ..trace.effects import python_numbers
from ..trace.form import LossFn, outputs_of
from .copies import apart
from .randomness import generators, untouched
from .world import World

log = logging.getLogger("autopar_torch")
MOST_S = 0.5  # of the module's forward, by a datasheet
# Relative, and at all: what rounding and ties of a router may do; some norms are float32 anyway.
APART = {torch.float64: (1e-4, 1e-8)}
APART_ELSE = 1e-2, 1e-3


class FirstStep(NamedTuple):
    """What the module gives for the batch of a call, by name of output."""

    call: Call
    wanted: Mapping[str, Tensor]

    def compare(self, got: Mapping[str, Tensor]) -> None:
        if found := far(got, self.wanted):
            raise RunError(f"{found} from what the module itself gives for this batch",
                           where="the first step",
                           fix="report the model, please, as it was traced for another; guards="
                           '{"first_step": False} trains all the same')


def far(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Which output is not what was wanted, and by how much."""
    for name, want in wanted.items():
        if name not in got or got[name].shape != want.shape or not (
                want.numel() and want.isfinite().all()):
            continue
        apart, size = float((got[name].detach() - want).abs().max()), float(want.abs().max())
        relative, least = APART.get(want.dtype, APART_ELSE)
        if not apart <= max(relative * size, least):  # nor is it a number
            return f"`{name}` is off by {apart:.3g} (at most {size:.3g})"
    return ""


class Fresh(Protocol):
    """A model that is about to take up its first plan."""

    module: nn.Module
    world: World
    device: torch.device
    guards: Guards
    loss_fn: LossFn | None
    _to_load: list[Any]  # checkpoints, before the first step


def of(model: Fresh, traced: Traced, plan: Plan, call: Call,
       tensors: Sequence[Tensor]) -> FirstStep:
    """Nothing is wanted where the module draws numbers, or another rank looks."""
    if model.world.rank or not model.guards.first_step or not _alike(model, traced, plan, call):
        return FirstStep(call, {})
    try:
        module = apart(model.module)  # forward may keep something, or write to a parameter
        with torch.enable_grad():  # forward may ask for gradients
            found, drew = as_it_is(module, call, tensors, model.loss_fn, model.device)
    except Exception as error:  # whatever it is: the plan is what trains
        log.debug("the module does not run as it is: %s", error)
        return FirstStep(call, {})
    return FirstStep(call, {} if drew else {
        name: x.detach() for name, x in found.items() if x.dtype.is_floating_point})


def as_it_is(module: nn.Module, call: Call, tensors: Sequence[Tensor], loss_fn: LossFn | None,
             device: torch.device, inside: bool | None = None) -> tuple[dict[str, Tensor], bool]:
    """What a module gives for a call, by name, and whether it draws numbers, which then seem not
    to have been drawn."""
    with untouched(device), call.surroundings(device):
        before = _drawn(device)
        _, found = outputs_of(module, loss_fn, *call.rebuild(tensors), inside)
        return found, before != _drawn(device)


def _alike(model: Fresh, traced: Traced, plan: Plan, call: Call) -> bool:
    """Whether the module is to give the same, and soon: in this precision, with the parameters that
    are trained, and without hooks."""
    if plan.precision != "float32" or call.autocast or traced.graph.local or model._to_load:
        return False
    return not any(map(user_hooks, model.module.modules())) and not any(
        p.is_meta for p in model.module.parameters()) and _seconds(model, traced, call) <= MOST_S


def _seconds(model: Fresh, traced: Traced, call: Call) -> float:
    prices = Prices(GPU if model.device.type == "cuda" else CPU_CORE, rows=call.num_rows)
    return sum(op_seconds(node, prices, 1) for block in traced.graph.blocks
               for node in traced.programs[block.kind].nodes if node.op == "call_function")


def _drawn(device: torch.device) -> list[object]:
    return [*(bytes(one.get_state().numpy()) for one in generators(device)), python_numbers()]
