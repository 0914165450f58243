"""A plan that came with its shardings is tried before it trains: each of its programs runs once
beside the whole block, on small random numbers."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..errors import ShardingError
from ..model import Block, TensorInfo
from ..plan import Sharding
from ..shard.collectives import Axis, run_moves
from ..shard.layout import Forms, Layouts, parse_forms
from ..shard.lower import lower
from ..shard.price import Prices, moves, op_costs
from ..shard.rules import op_name
from ..trace.call import Call
from .model import ParallelModel
from .program import Program
from .randomness import generators, untouched

ROWS = 2  # of a trial
MOST_BYTES = 2 * 2**30  # of the parameters of a block that is tried whole on every rank
MOST_KEPT = 8 * 2**30  # of all that its ops make
# Of the size (root of the sum of squares): where a number lies near the kink of a ReLU, another
# order of sums may flip it, so single elements do differ.
FINE, COARSE = 3e-4, 0.1
NOISE = 0.1  # of the largest gradient: others may cancel to nothing, as that of the bias of keys
_DROPS = {"dropout": 1, "feature_dropout": 1, "alpha_dropout": 1, "native_dropout": 1,
          "scaled_dot_product_attention": 4}  # argument that says how much is dropped


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
    buffers = {name: tensor.clone() for name, tensor in parallel.store.buffers.items()}
    with untouched(parallel.device, python=False):
        program = parallel._programs[call.key, True, True][0]
        found = [  # after one that is wrong the others go on too: every rank runs all
            _compared(trial, program.traced.programs[trial.block.kind])
            for trial in _trials(parallel, program, call, tensors)
        ]
    for name, kept in buffers.items():
        parallel.store.buffers[name].copy_(kept)
    everyone = parallel.world.gather(next(filter(None, found), ""))
    if told := next(filter(None, everyone), ""):
        raise ShardingError(told, where="Plan.shardings",
                            fix="leave the shardings out to have them found")


def _trials(parallel: ParallelModel, program: Program, call: Call,
            tensors: Sequence[Tensor]) -> Iterator[_Trial]:
    """Each sharding of each stage of this rank once, in one order on all ranks of the stage."""
    here = [t.to(parallel.device) for t in tensors]
    coupled = program.traced.graph.coupled  # offsets of bags, say, point to all rows
    rows = call.num_rows if coupled else min(ROWS, call.num_rows)
    with parallel.numbers.drawing_alike():
        whole = program.prologue.for_batch(call, here)
    context = program.prologue.for_rows(call, here, whole, 0, rows)
    graph = program.traced.graph
    for _, runner in sorted(program.stages.items()):
        blocks = {runner.stage.sharding(b): graph.blocks[b]
                  for b in reversed(range(runner.first, runner.last))}
        for number, block in sorted(blocks.items()):
            size = sum(info.num_bytes() for info in graph.kinds[block.kind].params.values())
            made = sum(op_costs(node, Prices(rows=rows))[1] for node in program.traced.programs[
                block.kind].nodes if node.op == "call_function")
            if number >= 0 and size <= MOST_BYTES and made <= MOST_KEPT:
                yield _Trial(block, parallel.plan.shardings[number], runner.axes,
                             {slot: context[name] for slot, name in block.context.items()},
                             rows, parallel.device)


def _compared(trial: _Trial, graph: fx.Graph) -> str:
    """What is wrong with a program, nothing if it does what the whole block does."""
    calm = _calm(graph)
    infos = {node.name: node.meta["info"] for node in calm.find_nodes(op="placeholder")}
    given = {n: trial.context[n] if n in trial.context else _random(n, info, trial)
             for n, info in infos.items()}
    try:
        whole, own = _ran(calm, given, trial, None), _ran(calm, given, trial, trial.sharding)
    except RuntimeError as error:
        return f"{_named(trial)}: {error}"
    coarse = any(info.dtype in ("bfloat16", "float16") for info in infos.values())
    floor = NOISE * max((_size(x) for n, x in whole.items() if n.startswith("the")), default=0.0)
    for name, expected in whole.items():
        off = _distance(own[name], expected, floor if name.startswith("the") else 0.0)
        if not off <= (COARSE if coarse else FINE):
            return f"{_named(trial)}: {name} is off by {off:.1e} of its size"
    return ""


def _named(trial: _Trial) -> str:
    return f"{trial.block.name} ({trial.sharding.kind}) under sharding {trial.sharding.key}"


def _ran(graph: fx.Graph, given: dict[str, Any], trial: _Trial,
         sharding: Sharding | None) -> dict[str, Tensor]:
    """Outputs and gradients of a program, brought together to whole ones where it is split."""
    axes = trial.axes if sharding else ()
    whole = Forms.whole(len(axes))
    plain = whole.value
    forms = {n: parse_forms(text) for n, text in sharding.forms.items()} if sharding else {}

    def moved(x: Tensor, source: Layouts, target: Layouts) -> Tensor:
        return run_moves(x.detach(), moves(source, target), axes)

    def form(name: str) -> Forms:
        return forms.get(name, whole)

    args = {n: x if n in trial.context
            else moved(x, plain, form(n).value).clone().requires_grad_(x.requires_grad)
            for n, x in given.items()}
    for one in generators(trial.device):  # what else is random draws the same in both programs
        one.manual_seed(0)
    results = lower(graph, sharding, axes, rows=trial.rows, device=trial.device)(*args.values())
    found, ends, grads = {}, [], []
    for k, result in enumerate(results):
        if isinstance(result, Tensor):
            found[f"result {k}"] = full = moved(result, form(f"y{k}").value, plain)
            if result.requires_grad:
                ends.append(result)
                grad = _numbers(f"grad of y{k}", full.shape, full.dtype, full.device)
                grads.append(moved(grad, plain, form(f"y{k}").grad))
    if ends:
        torch.autograd.backward(ends, grads)
    for name, arg in args.items():
        if name not in trial.context and arg.requires_grad:
            grad = torch.zeros_like(arg) if arg.grad is None else arg.grad
            found[f"the gradient of {name}"] = moved(grad, form(name).grad, plain)
    return found


def _random(slot: str, info: TensorInfo, trial: _Trial) -> Tensor:
    """The same on all ranks. Vectors are near one: they are norms, scales and variances."""
    dtype, shape = getattr(torch, info.dtype), info.at(trial.rows)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.full(shape, dtype == torch.bool, dtype=dtype, device=trial.device)
    value = _numbers(slot, shape, dtype, trial.device)
    if slot.startswith("w_"):
        value = 1 + value / 10 if len(shape) < 2 else value / math.sqrt(max(1, shape[-1]))
    return value.requires_grad_(info.grad)


def _numbers(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    draw = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=draw, device="cpu").to(device=device, dtype=dtype)


def _calm(graph: fx.Graph) -> fx.Graph:
    """The same program without dropout: parts of a value draw other numbers than the whole."""
    calm = copy.deepcopy(graph)
    for node in calm.nodes:
        place = _DROPS.get(op_name(node)) if node.op == "call_function" else None
        if place is not None and len(node.args) > place:
            node.update_arg(place, 0.0)
        elif place is not None and "dropout_p" in node.kwargs:
            node.update_kwarg("dropout_p", 0.0)
    return calm


def _distance(value: Tensor, expected: Tensor, floor: float) -> float:
    """Distance of two tensors, relative to their size; NaN in both counts as equal."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return math.inf
    return _size(_real(value) - _real(expected)) / max(_size(expected), floor, 1e-6)


def _size(x: Tensor) -> float:
    return float(_real(x).norm())


def _real(x: Tensor) -> Tensor:
    return torch.nan_to_num((torch.view_as_real(x) if x.is_complex() else x).double(), nan=1e30)
