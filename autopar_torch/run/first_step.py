"""The first step beside the module as it is: whether a trace and a plan make of a batch what the
module makes of it in one process. Rank 0 looks, where that takes little time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..cluster import CPU_CORE, GPU
from ..errors import RunError
from ..guards import Guards
from ..plan import Plan
from ..shard.price import Prices, op_seconds
from ..trace import Traced
from ..trace.apart import run
from ..trace.burnt import tensors_of, user_hooks
from ..trace.call import Call
from ..trace.effects import python_numbers
from ..trace.form import LossFn, outputs_of
from ..trace.opaque import calls_modules
from .copies import apart
from .prologue import Prologue
from .randomness import generators, untouched
from .world import World

log = logging.getLogger("autopar_torch")
MOST_S = 0.5  # of the module's forward, by a datasheet
# Relative, and at all: what rounding and ties of a router may do; some norms are float32 anyway.
APART = {torch.float64: (1e-4, 1e-8)}
APART_ELSE = 1e-2, 1e-3
FIXED = {**dict.fromkeys(("rand", "rand_like", "randn", "randn_like", "uniform", "normal", "random",
                          "exponential", "randint", "randint_like"), 0.5),
         "bernoulli": 1.0}  # nothing is dropped


class FirstStep(NamedTuple):
    """What the module gives for the batch of a call, by name of output; of one that draws numbers,
    how far its trace is from it."""

    call: Call
    wanted: Mapping[str, Tensor]
    off: str = ""

    def compare(self, got: Mapping[str, Tensor]) -> None:
        if found := self.off or far(got, self.wanted):
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
    """Nothing is wanted where another rank looks. Where the module draws numbers, its trace is
    looked at in place of the plan: both with fixed numbers."""
    if model.world.rank or not model.guards.first_step or not _alike(model, traced, plan, call):
        return FirstStep(call, {})
    rest = call, tensors, model.loss_fn, model.device
    try:
        with torch.enable_grad():  # forward may ask for gradients
            # A copy, as forward may keep something, or write to a parameter.
            found, drew = as_it_is(apart(model.module), *rest)
            if not drew:
                return FirstStep(call, _floats(found))
            with FixedNumbers() as fixed:
                found, drew = as_it_is(apart(model.module), *rest)
                if drew or calls_modules(traced.programs.values()):
                    return FirstStep(call, {})
                own = whole(traced, apart(model.module), call, tensors, model.device)
        return FirstStep(call, {}, "" if fixed.unknown else far(own, _floats(found)))
    except Exception as error:  # whatever it is: the plan is what trains
        log.debug("the module does not run as it is: %s", error)
        return FirstStep(call, {})


def _floats(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in found.items() if x.dtype.is_floating_point}


class FixedNumbers(TorchDispatchMode):
    """What would be drawn is fixed: a module and its trace drop and add the same. `unknown`: they
    have drawn what this does not know."""

    unknown = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        names = [arg.name for arg in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        name = func._schema.name.removeprefix("aten::").removesuffix("_functional").rstrip("_")
        if "dropout_p" in given:  # of attention
            return func(**given | {"dropout_p": 0.0})
        if name == "native_dropout":
            x = given["input"]  # scaled, as in place, which draws a mask
            return x / (1 - given["p"]), torch.ones_like(x, dtype=torch.bool)
        if name not in FIXED:
            self.unknown = True
            return func(*args, **(kwargs or {}))
        with untouched(given.get("self", torch.empty(0)).device, python=False):
            drawn = func(*args, **(kwargs or {}))
        return drawn.fill_(FIXED[name] if drawn.is_floating_point() else given.get("low", 0))


def whole(traced: Traced, module: nn.Module, call: Call, tensors: Sequence[Tensor],
          device: torch.device) -> dict[str, Tensor]:
    """What a trace gives for a call in one process."""
    graph, state, rows = traced.graph, tensors_of(module), call.num_rows
    read = {*graph.outputs.values(), *(v for b in graph.blocks for v in b.context.values())}
    names = [node.name for node in traced.prologue.nodes if node.name in read]
    buffers = {name: x for name, x in state.items() if not isinstance(x, nn.Parameter)}
    here = [x.detach().to(device) for x in tensors]
    prologue = Prologue(traced, names, buffers, device)
    known = prologue.for_rows(call, here, prologue.for_batch(call, here), 0, rows)
    for block in graph.blocks:
        program = traced.programs[block.kind]
        given = {slot: known[name] for slot, name in (block.inputs | block.context).items()}
        given |= {slot: state[name].detach() for slot, name in block.params.items()}
        ends = [node.name for node in cast(Sequence[fx.Node], program.output_node().args[0])]
        found = run(program, given, rows, ends, device)
        known |= {name: found[end] for name, end in zip(block.outputs.values(), ends, strict=True)}
    return {name: known[value] for name, value in graph.outputs.items()}


def as_it_is(module: nn.Module, call: Call, tensors: Sequence[Tensor], loss_fn: LossFn | None,
             device: torch.device, inside: bool | None = None) -> tuple[dict[str, Tensor], bool]:
    """What a module gives for a call, by name, and whether it draws numbers, which then seem not
    to have been drawn."""
    with untouched(device), call.surroundings(device):
        before = _drawn(device)
        own = {id(x): x.clone() for x in tensors}  # forward may write to them
        given = call.rebuild([own[id(x)] for x in tensors])
        _, found = outputs_of(module, loss_fn, *given, inside)
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
