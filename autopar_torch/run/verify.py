"""A plan that came with its shardings is looked at before it trains: against the rules, then by
running each of its programs once beside the whole block, on small random numbers."""

from __future__ import annotations

import copy
import logging
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from ..errors import ShardingError
from ..model import Block, TensorInfo
from ..plan import Plan, Sharding, Stage
from ..shard.allowed import check as check_sharding
from ..shard.collectives import Axis, run_moves
from ..shard.layout import WHOLE, Forms, Layouts, parse_forms
from ..shard.lower import lower
from ..shard.price import moves
from ..shard.rules import op_name
from ..trace import Traced
from ..trace.call import Call
from .shardings import groups, whole_values

if TYPE_CHECKING:
    from .model import ParallelModel
    from .program import Program

log = logging.getLogger("autopar_torch")
ROWS = 2  # of a trial
MOST_BYTES = 2 * 2**30  # of the parameters of a block that is tried whole on every rank
# Of the size (root of the sum of squares): where a number lies near the kink of a ReLU, another
# order of sums may flip it, so single elements do differ.
FINE, COARSE = 3e-4, 0.1
NOISE = 0.1  # of the largest gradient: others may cancel to nothing, as that of the bias of keys
_DROPS = {"dropout": 1, "feature_dropout": 1, "alpha_dropout": 1, "native_dropout": 1,
          "scaled_dot_product_attention": 4}  # argument that says how much is dropped  # fmt: skip


# --- against the rules ----------------------------------------------------------------------------


def check(plan: Plan, traced: Traced) -> None:
    """Every sharding is one of its kind's, and neighbours agree on what they share."""
    used = {number for replica in plan.replicas for stage in replica.stages
            for number in stage.shardings or () if number >= 0}  # fmt: skip
    for number in sorted(used):
        check_sharding(traced.programs[plan.shardings[number].kind], plan.shardings[number])
    for r, replica in enumerate(plan.replicas):
        held: dict[tuple[tuple[int, ...], str], str] = {}
        for group in groups(replica):
            stages = [replica.stages[s] for s in group]
            whole = whole_values(traced.graph, replica, group)
            _agree(plan, traced, stages, whole, held, f"Plan.replicas[{r}].stages{group}")


def _agree(plan: Plan, traced: Traced, stages: Sequence[Stage], whole: frozenset[str],
           held: dict[tuple[tuple[int, ...], str], str], where: str) -> None:  # fmt: skip
    """Over stages of one mesh: a value lies one way for all, whole where others see it too, and so
    does a parameter."""
    lying: dict[str, str] = {}
    for stage in stages:
        nothing: Layouts = (WHOLE,) * len(stage.axes)
        plain = Forms(nothing, nothing).text
        for index in range(*(stage.blocks or (0, 0))):
            block, sharding = traced.graph.blocks[index], plan.sharding(stage, index)
            for slot, name in {**block.inputs, **block.outputs}.items():
                text = sharding.forms[slot] if sharding else plain
                _same(lying.setdefault(name, plain if name in whole else text), text, block, name,
                      where)  # fmt: skip
            for slot, name in block.params.items():
                text = sharding.forms[slot] if sharding else plain
                first = held.setdefault((stage.devices, name), text)
                _same(lying.setdefault(name, first), text, block, name, where)


def _same(first: str, text: str, block: Block, name: str, where: str) -> None:
    if text != first:
        raise ShardingError(
            f"{name} lies as {text} in {block.name}, and as {first} for others that share it",
            where=f"{where}.shardings", fix="leave the shardings out to have them found",
        )  # fmt: skip


# --- by running it --------------------------------------------------------------------------------


class _Trial(NamedTuple):
    """One program of this rank."""

    block: Block
    sharding: Sharding
    axes: Sequence[Axis]
    context: dict[str, Any]
    rows: int
    device: torch.device


def probe(parallel: ParallelModel, call: Call, tensors: Sequence[Tensor]) -> None:
    """Run each program of the plan on its mesh; ranks that see other numbers than whole blocks
    give say so to all. All ranks call it; nothing that trains is changed."""
    buffers = {name: tensor.clone() for name, tensor in parallel.buffers_by_name.items()}
    failed = ""
    with torch.random.fork_rng(devices=_cuda(parallel.device)):
        program = parallel._programs[call.key, True][0]
        for trial in _trials(parallel, program, call, [t.to(parallel.device) for t in tensors]):
            found = _compared(trial, program.traced.programs[trial.block.kind])
            failed = failed or found  # the others go on too: every rank runs all
    for name, kept in buffers.items():
        parallel.buffers_by_name[name].copy_(kept)
    told = next(filter(None, parallel.world.gather(failed)), "")
    if told:
        raise ShardingError(told, where="Plan.shardings",
                            fix="leave the shardings out to have them found")  # fmt: skip


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _trials(parallel: ParallelModel, program: Program, call: Call,
            tensors: list[Tensor]) -> Iterator[_Trial]:  # fmt: skip
    """Each sharding of each stage of this rank once, in one order on all ranks of the stage."""
    whole = program.prologue.for_batch(call, tensors)
    rows = min(ROWS, call.num_rows)
    context = program.prologue.for_rows(call, tensors, whole, 0, rows)
    graph = program.traced.graph
    for _, runner in sorted(program.stages.items()):
        seen: set[int] = set()
        for index in range(runner.first, runner.last):
            number, block = runner.stage.sharding(index), graph.blocks[index]
            if number < 0 or number in seen:
                continue
            seen.add(number)
            size = sum(info.num_bytes(1) for info in graph.kinds[block.kind].params.values())
            if size > MOST_BYTES:
                log.info("not tried beside the whole block, as it is too large: %s", block.name)
                continue
            yield _Trial(block, parallel.plan.shardings[number], runner.axes, context,
                         rows, parallel.device)  # fmt: skip


def _compared(trial: _Trial, graph: fx.Graph) -> str:
    """What is wrong with a program, nothing if it does what the whole block does."""
    calm, sharding, rows = _calm(graph), trial.sharding, trial.rows
    names = [node.name for node in calm.find_nodes(op="placeholder")]
    infos = {node.name: node.meta["info"] for node in calm.find_nodes(op="placeholder")}
    made = {n: _random(n, infos[n], rows, trial.device)
            for n in names if n not in trial.block.context}  # fmt: skip
    forms = {n: parse_forms(text) for n, text in sharding.forms.items()}
    try:
        whole = _ran(lower(calm, None, (), rows=rows, device=trial.device), names, made, trial, {})
        own = _ran(lower(calm, sharding, trial.axes, rows=rows, device=trial.device), names, made,
                   trial, forms)  # fmt: skip
    except RuntimeError as error:
        return f"{_named(trial)}: {error}"
    limit = COARSE if any(_is_coarse(info) for info in infos.values()) else FINE
    floor = NOISE * max((_size(x) for n, x in whole.items() if n.startswith("the")), default=0.0)
    for name, expected in whole.items():
        off = _distance(own[name], expected, floor if name.startswith("the") else 0.0)
        if not off <= limit:
            return f"{_named(trial)}: {name} is off by {off:.1e} of its size"
    return ""


def _is_coarse(info: TensorInfo) -> bool:
    return info.dtype in ("bfloat16", "float16")


def _named(trial: _Trial) -> str:
    return f"{trial.block.name} ({trial.sharding.kind}) under sharding {trial.sharding.key}"


def _ran(module: fx.GraphModule, names: Sequence[str], made: dict[str, Tensor], trial: _Trial,
         forms: dict[str, Forms]) -> dict[str, Tensor]:  # fmt: skip
    """Outputs and gradients of a program, brought together to whole ones where it is split."""
    args: list[Any] = []
    for name in names:
        if name in trial.block.context:
            args.append(trial.context[trial.block.context[name]])
            continue
        value = _part(made[name], forms.get(name), trial.axes)
        args.append(value.clone().requires_grad_(made[name].requires_grad))
    results = module(*args)
    found, ends = {}, []
    for k, result in enumerate(results):
        if not isinstance(result, Tensor):
            continue
        form = forms.get(f"y{k}")
        found[f"result {k}"] = _whole(result.detach(), form.value if form else (), trial.axes)
        if result.requires_grad:
            full = found[f"result {k}"]
            grad = _numbers(f"grad of y{k}", full.shape, full.dtype, full.device)
            lies = Forms(form.grad, form.grad) if form else None
            ends.append((result, _part(grad, lies, trial.axes)))
    if ends:
        torch.autograd.backward([y for y, _ in ends], [g for _, g in ends])
    for name, arg in zip(names, args, strict=True):
        if name not in trial.block.context and arg.requires_grad:
            grad = torch.zeros_like(arg) if arg.grad is None else arg.grad
            lying = forms[name].grad if name in forms else ()
            found[f"the gradient of {name}"] = _whole(grad, lying, trial.axes)
    return found


def _part(full: Tensor, form: Forms | None, axes: Sequence[Axis]) -> Tensor:
    if form is None:
        return full.detach()
    start: Layouts = (WHOLE,) * len(axes)
    return run_moves(full.detach(), moves(start, form.value), axes)


def _whole(own: Tensor, layouts: Layouts, axes: Sequence[Axis]) -> Tensor:
    end: Layouts = (WHOLE,) * len(layouts)
    return run_moves(own.detach(), moves(layouts, end), axes)


def _random(slot: str, info: TensorInfo, rows: int, device: torch.device) -> Tensor:
    """The same on all ranks. Vectors are near one: they are norms, scales and variances."""
    dtype = getattr(torch, info.dtype)
    shape = info.at(rows)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.full(shape, dtype == torch.bool, dtype=dtype, device=device)
    value = _numbers(slot, shape, dtype, device)
    if slot.startswith("w_"):
        value = 1 + value / 10 if len(shape) < 2 else value / math.sqrt(max(1, shape[-1]))
    return value.requires_grad_(info.grad)


def _numbers(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=draw).to(device=device, dtype=dtype)


def _calm(graph: fx.Graph) -> fx.Graph:
    """The same program without chance: parts of a value draw other numbers than the whole."""
    calm = copy.deepcopy(graph)
    for node in calm.nodes:
        place = _DROPS.get(op_name(node)) if node.op == "call_function" else None
        if place is not None and len(node.args) > place:
            node.update_arg(place, 0.0)
        elif place is not None and "dropout_p" in node.kwargs:
            node.update_kwarg("dropout_p", 0.0)
    return calm


def _distance(value: Tensor, expected: Tensor, floor: float) -> float:
    """Of two tensors, beside their size; what is no number in both is equal."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return math.inf
    a, b = _real(value), _real(expected)
    return float((a - b).norm()) / max(_size(expected), floor, 1e-6)


def _size(x: Tensor) -> float:
    return float(_real(x).norm())


def _real(x: Tensor) -> Tensor:
    return torch.nan_to_num((torch.view_as_real(x) if x.is_complex() else x).double(), nan=1e30)
