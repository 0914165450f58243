"""Times and bytes of lowered blocks, run one after another as a training step runs them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from ..model import Block, TensorInfo
from ..profile import BlockCost, BlockNeed
from ..shard.again import run_again
from ..shard.collectives import Axis
from ..shard.compiled import compiled
from ..shard.layout import local_shape, parse_forms
from ..shard.linear import WeightQueue, delivered, wants_delivery
from ..shard.lower import lower
from ..trace import Traced
from .bytes import Counting
from .room import num_copies
from .samples import Columns, Sample, sampled, scales, seconds
from .stats import uncertainty

WHOLE = ("forward", "backward", "added")  # what the rounds of a chain are made of
PHASES = (*WHOLE, "input", "weight")
BACKWARDS = ("backward", "input", "added")  # the backwards of a round take turns at these
Context = Callable[[int], dict[str, Any]]  # rows -> values of the prologue
Linears = Callable[..., contextlib.AbstractContextManager[None]]  # "input", or anything else
Axes = Callable[[tuple[int, ...]], Sequence[Axis] | None]  # mesh -> this rank's axes on it


class Counted(NamedTuple):
    """One run whose bytes are counted: its moments, and bytes of outputs and of their gradients."""

    marks: tuple[int, int, int, int, int]
    out: int
    given: int


class Ground:
    """Random numbers that parameters and inputs of all chains are made of. Chains never run at the
    same time, so each has them from the first one on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flat: dict[torch.dtype, Tensor] = {}
        self.used: Counter[torch.dtype] = Counter()

    def begin(self, shapes: Iterable[tuple[list[int], torch.dtype]]) -> None:
        """Another chain, which will take these."""
        self.used.clear()
        wanted: Counter[torch.dtype] = Counter()
        for shape, dtype in shapes:
            wanted[dtype] += _aligned(shape)
        for dtype, size in wanted.items():
            if dtype.is_floating_point and (
                    dtype not in self.flat or self.flat[dtype].numel() < size):
                self.flat.pop(dtype, None)
                empty = torch.empty(size, dtype=dtype, device=self.device)
                self.flat[dtype] = empty.normal_(0.0, 0.02)

    def take(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """A tensor of its own, as far as autograd sees."""
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        start, flat = self.used[dtype], self.flat[dtype]
        self.used[dtype] += _aligned(shape)
        strides = torch.empty(shape, device="meta").stride()
        return flat.new_empty(0).set_(flat.untyped_storage(), start, shape, strides)


def _aligned(shape: Sequence[int]) -> int:
    return -(-math.prod(shape) // 64) * 64


@dataclass
class Runner:
    """One lowered block with inputs of its own."""

    need: BlockNeed
    module: fx.GraphModule
    args: list[Any]
    grads: list[Tensor]  # of outputs that need one; made before bytes are counted
    outputs: tuple[Any, ...] = ()
    queue: WeightQueue = field(default_factory=WeightQueue)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    counted: Counted | None = None

    def forward(self, keep: bool = True) -> None:
        self.outputs, sample = sampled(self.run)
        if keep:
            self.samples.setdefault("forward", []).append(sample)

    def run(self) -> tuple[Any, ...]:
        return cast(tuple[Any, ...], run_again(self.module, self.args, self.need.recompute))

    def backward(self, how: str = "backward") -> None:
        """All of it, or "added": onto gradients that are there, or "input": only that part."""
        ends = [y for y in self.outputs if isinstance(y, Tensor) and y.requires_grad]
        if not self.grads:
            self.grads = [torch.ones_like(y) for y in ends]

        def work() -> None:
            if ends:
                torch.autograd.backward(ends, self.grads)

        with self.queue if how == "input" else contextlib.nullcontext():
            _, sample = sampled(work)
        self.outputs = ()
        self.samples.setdefault(how, []).append(sample)

    def weights(self) -> None:
        if self.queue.waiting:
            _, sample = sampled(self.queue.flush)
            self.samples.setdefault("weight", []).append(sample)

    def clear(self) -> None:
        self.grads = []
        for arg in self.args:
            if isinstance(arg, Tensor) and arg.requires_grad:
                arg.grad = None


class TimedChain:
    """All blocks of one mesh, kind of plan and number of rows, as a chain."""

    def __init__(self, needs: Sequence[BlockNeed], traced: Traced, axes: Sequence[Axis] | None,
                 context: dict[str, Any], ground: Ground) -> None:
        self.active, self.device = axes is not None, ground.device
        self.exchanges = any(need.sharding for need in needs)
        self.runners: list[Runner] = []
        self.first: list[Runner] = []
        self.num_bytes: dict[BlockNeed, dict[str, float]] = {}
        self.backwards = itertools.cycle(BACKWARDS)
        self.num_rounds = 0
        self.switched: list[Sample] = []  # forwards of `typical` just after backwards
        if axes is None:
            return
        blocks = {block.kind: block for block in reversed(traced.graph.blocks)}
        runs = [(need, blocks[need.kind]) for need in needs
                for _ in range(num_copies(traced.graph, need.kind))]
        ground.begin(shape for need, block in runs for shape in _shapes(need, block, traced, axes))
        self.runners = [_runner(need, block, traced, axes, context, ground) for need, block in runs]
        firsts = {id(runner.need): runner for runner in reversed(self.runners)}
        self.first = [firsts[id(need)] for need in needs]

    def warm_up(self) -> None:
        """Run all once, untimed."""
        with self._linears():
            for runner in self.runners:
                runner.run()

    def _linears(self, how: str = "") -> contextlib.AbstractContextManager[None]:
        return delivered(wants_delivery(self.device, how == "input"))

    def round(self) -> None:
        """All forwards, then all backwards from the last. Most weight gradients that come late are
        added to earlier ones, as at the end of a pipeline."""
        self.num_rounds += 1
        how = next(self.backwards)
        with self._linears(how):
            for runner in self.runners:
                runner.forward(keep=how != "input")
            for runner in reversed(self.runners):
                runner.backward(how)
        if how == "input":
            for runner in reversed(self.runners):
                runner.weights()
        if how == "added":
            for runner in self.runners:
                runner.clear()
        with self._linears():
            self.switched.append(sampled(self.typical.run)[1])

    @property
    def typical(self) -> Runner:
        """A block of a kind of which there are several: one of its kind runs just before it."""
        kinds = Counter(runner.need for runner in self.runners)
        return [r for r in self.runners if r.need == kinds.most_common(1)[0][0]][-1]

    def switch_s(self) -> float:
        """How much longer a forward takes right after backwards, when a core has to fetch its
        program again. (A backward after forwards is what a round measures.)"""
        usual = median([s.compute_s for s in self.typical.samples["forward"]])
        return max(0.0, median([s.compute_s for s in self.switched]) - usual)

    def run_counted(self, count: Counting) -> None:
        """Each block once while its bytes are counted; they do not vary."""
        for runner in self.first:
            runner.counted = _run_counted(runner, count, self._linears)

    def read_bytes(self, count: Counting) -> None:
        for runner in self.first:
            if runner.counted is not None:
                self.num_bytes[runner.need] = _bytes(runner.counted, count)

    def forget(self) -> None:
        self.num_rounds = 0
        self.switched.clear()
        for runner in self.runners:
            runner.samples.clear()

    def result(self) -> dict[BlockNeed, BlockCost]:
        scale, found = scales(self.columns), {}
        for need in {r.need for r in self.runners}:
            forward, backward, added, early, late = (
                seconds(self._samples(need, phase), scale) for phase in PHASES
            )
            found[need] = BlockCost(
                need.rows, forward[0], backward[0], early[0], late[0],
                forward[1], backward[1], **self.num_bytes.get(need, {}),
                added_s=added[0] - backward[0] if added[0] else 0.0,
            )
        return found

    @property
    def columns(self) -> Columns:
        """Samples of whole backwards only: a backward in two parts would count twice."""
        return [r.samples[phase] for r in self.runners for phase in WHOLE if phase in r.samples]

    def _samples(self, need: BlockNeed, phase: str) -> list[Sample]:
        """Samples of a cell, over all its copies."""
        return [s for r in self.runners if r.need == need for s in r.samples.get(phase, [])]

    def errors(self) -> dict[str, float]:
        """How uncertain every block is, by its least certain phase."""
        return {
            f"{need.kind} ({need.key or 'whole'}) at {need.rows} rows":
                max(uncertainty([s.wall_s for s in self._samples(need, phase)]) for phase in PHASES)
            for need in {r.need: None for r in self.runners}
        }


def _runner(need: BlockNeed, block: Block, traced: Traced, axes: Sequence[Axis],
            context: dict[str, Any], ground: Ground) -> Runner:
    graph = traced.programs[need.kind]
    module = lower(graph, need.sharding, axes, rows=need.rows, device=ground.device)
    if need.compiled:
        module = compiled(module, need.kind)
    args = []
    for node in graph.find_nodes(op="placeholder"):
        info = node.meta["info"]
        if node.name in block.context:
            args.append(context[block.context[node.name]])
            continue
        args.append(ground.take(*_shape(node.name, info, need, axes)))
        args[-1].requires_grad_(info.grad)
        if node.name in block.params and info.grad:
            kept = traced.graph.params[block.params[node.name]].dtype
            args[-1].grad_dtype = getattr(torch, kept)
    return Runner(need, module, args, [])


def _shapes(need: BlockNeed, block: Block, traced: Traced,
            axes: Sequence[Axis]) -> Iterator[tuple[list[int], torch.dtype]]:
    for node in traced.programs[need.kind].find_nodes(op="placeholder"):
        if node.name not in block.context:
            yield _shape(node.name, node.meta["info"], need, axes)


def _shape(slot: str, info: TensorInfo, need: BlockNeed,
           axes: Sequence[Axis]) -> tuple[list[int], torch.dtype]:
    """Of this rank's part of a parameter or an input."""
    shape = list(info.at(need.rows))
    if need.sharding is not None and slot in need.sharding.forms:
        form = parse_forms(need.sharding.forms[slot])
        shape = local_shape(tuple(shape), form.value, tuple(axis.parts for axis in axes))
    return shape, getattr(torch, info.dtype)


def _run_counted(runner: Runner, count: Counting, linears: Linears) -> Counted:
    """Bytes are marked before a run, after its forward and after its backward; in another run after
    the input part of its backward. Gradients are there already, so both runs add to them."""
    with linears():
        runner.forward()
        runner.backward()
        start = count.mark()
        runner.forward()
        out = sum(y.numel() * y.element_size() for y in runner.outputs if isinstance(y, Tensor))
        ran = count.mark()
        runner.backward()
        end = count.mark()
    with linears("input"):
        runner.forward()  # a first run may keep more
        runner.backward("input")
        runner.weights()
        runner.forward()
        again = count.mark()
        runner.backward("input")
        back = count.mark()
    runner.weights()
    given = sum(g.numel() * g.element_size() for g in runner.grads)
    runner.clear()
    return Counted((start, ran, end, again, back), out, given)


def _bytes(run: Counted, count: Counting) -> dict[str, float]:
    """What a block keeps and needs, beyond what was there before."""
    start, ran, end, again, back = run.marks
    before = count.at(start)
    kept = count.at(ran) - before
    return {
        "out_bytes": float(run.out),
        "kept_bytes": float(kept),
        "forward_bytes": float(count.peak(start, ran) - before),
        "backward_bytes": float(count.peak(ran, end) - before - kept + run.given),
        "stash_bytes": float(count.at(back) - before + run.given),
        "input_bytes": float(count.peak(again, back) - before - kept + run.given),
    }
