"""One stage on one rank: its blocks as programs, run forward and backward per micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from ..model import Block, TensorInfo
from ..plan import Plan, Recompute, Stage, peers
from ..shard.again import run_again
from ..shard.collectives import Axis
from ..shard.compiled import compiled
from ..shard.holdings import value_shape
from ..shard.linear import WeightQueue, delivered, wants_delivery
from ..shard.lower import lower
from ..shard.together import Replicas
from ..trace import Traced
from .params import Held, ParamStore

Values = dict[str, Tensor]


class PlacedBlock(NamedTuple):
    """A block ready to run: where its arguments come from and what its results are called."""

    block: Block
    args: tuple[tuple[str, str], ...]  # ("value" | "context" | "param", name) per placeholder
    results: tuple[str, ...]
    recompute: Recompute
    gathered: tuple[Held, ...]  # parameters to gather before and free after (ZeRO 3)


class StageRunner:
    """The blocks of one stage; programs are made per number of rows, when first needed."""

    def __init__(self, traced: Traced, plan: Plan, stage: Stage, store: ParamStore,
                 is_end: bool) -> None:
        self.traced, self.plan, self.stage, self.store = traced, plan, stage, store
        self.axes, self.device = store.world.tensor_axes(stage), store.device
        self.first, self.last = stage.blocks or (0, 0)
        graph = traced.graph
        self.arriving = graph.crossing(self.first)
        self.leaving = {} if is_end else graph.crossing(self.last)
        self.outputs = graph.outputs if is_end else {}
        self.placed = [self._placed(i) for i in range(self.first, self.last)]
        self.programs: dict[tuple[str, int, int, Any, bool], fx.GraphModule] = {}
        self.splits: set[int] = set()  # micro-batches whose backward is done in two parts
        self.kept: dict[int, tuple[Values, Values]] = {}  # micro-batch -> arrived, left
        self.queues: dict[int, WeightQueue] = {}
        self.loss_scale = 1.0
        self.live: set[str] = set()  # values that lead to what backward begins at
        self.keeps = False  # what a backward needs, for another one

    @property
    def params(self) -> list[str]:
        return self.traced.graph.params_of(self.first, self.last)

    def context_names(self) -> list[str]:
        """Prologue values that the blocks (or the outputs) of this stage read."""
        names = [n for placed in self.placed for n in placed.block.context.values()]
        made = {v for block in self.traced.graph.blocks for v in block.outputs.values()}
        return names + [v for v in self.outputs.values() if v not in made]

    def _placed(self, index: int) -> PlacedBlock:
        graph = self.traced.graph
        block = graph.blocks[index]
        places = self.traced.programs[block.kind].find_nodes(op="placeholder")
        kind = graph.kinds[block.kind]
        held = [self.store.held[name] for name in block.params.values()]
        gathered = tuple(h for h in held if self.store.gathers_per_use(h))
        return PlacedBlock(block, tuple(_origin(block, p.name) for p in places),
                    tuple(block.outputs.values()), not kind.runs_once and self.stage.recompute,
                    gathered)

    def _program(self, index: int, rows: int, train: bool) -> fx.GraphModule:
        number = self.stage.sharding(self.first + index)
        block = self.traced.graph.blocks[self.first + index]
        world, graph = self.store.world, self.traced.graph
        ranks, alike = peers(self.plan, graph, self.first + index, world.rank)
        fused = train and block.kind in self.plan.compiled
        key = (block.kind, number, rows, ranks, fused)
        if key not in self.programs:
            sharding = self.plan.sharding(self.stage, self.first + index)
            made = lower(
                self.traced.programs[block.kind], sharding, self.axes, rows=rows,
                device=self.device,
                replicas=self._replicas(ranks, alike) if ranks else None,
            )
            self.programs[key] = compiled(made, block.kind) if fused else made
        return self.programs[key]

    def _replicas(self, ranks: tuple[int, ...], alike: bool) -> Replicas:
        """The ranks that join what a block says of all rows, and which are of which replica."""
        axis = cast(Axis, self.store.world.axis(ranks))
        owner = {device: r for r, replica in enumerate(self.plan.replicas)
                 for stage in replica.stages for device in stage.devices}
        firsts = {owner[rank]: place for place, rank in reversed(list(enumerate(ranks)))}
        places = tuple(firsts[r] for r in sorted(firsts))
        return Replicas(axis, alike, places, owner[ranks[axis.index]])

    def code(self, index: int) -> str:
        """What a block runs on this rank, as Python."""
        index += self.first
        wanted = (self.traced.graph.blocks[index].kind, self.stage.sharding(index))
        made = [p.code for (kind, number, *_), p in self.programs.items()
                if (kind, number) == wanted]
        return str(made[0]) if made else "(has not run yet)"

    def shape(self, value: str, info: TensorInfo, rows: int) -> list[int]:
        return value_shape(self.plan, self.traced.graph, self.stage, value, info, rows)

    def forward(self, micro_batch: int, rows: int, arrived: Values, context: dict[str, Any],
                train: bool) -> Values:
        """Run all blocks; keeps what backward needs. Returns what leaves, or the outputs."""
        if train:
            arrived = {n: v.detach().requires_grad_(self.arriving[n].grad)
                       for n, v in arrived.items()}
        values: dict[str, Any] = dict(arrived)
        with self._linears(micro_batch):
            for index, placed in enumerate(self.placed):
                results = self._run_block(index, placed, values, context, rows, train)
                values.update(zip(placed.results, results, strict=True))
        names = self.outputs or {name: name for name in self.leaving}
        left = {name: values[v] if v in values else context[v] for name, v in names.items()}
        if train:
            self.kept[micro_batch] = (arrived, left)
        return {n: v.detach() if isinstance(v, Tensor) else v for n, v in left.items()}

    def _linears(self, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        """How they run for a micro-batch, also where its backward runs them again."""
        return delivered(wants_delivery(self.device, micro_batch in self.splits))

    def _run_block(self, index: int, placed: PlacedBlock, values: dict[str, Any],
                   context: dict[str, Any], rows: int, train: bool) -> tuple[Tensor, ...]:
        run = self._program(index, rows, train)
        if placed.gathered:
            self.store.gather(placed.gathered)
        args = [self.store.held[name].read if kind == "param"
                else (values if kind == "value" else context)[name] for kind, name in placed.args]
        results = run_again(run, args, placed.recompute) if train else run(*args)
        if placed.gathered:
            freed = {held.leaf.untyped_storage().data_ptr() for held in placed.gathered}
            results = tuple(x.clone() if isinstance(x, Tensor) and (  # a view of a parameter
                x.untyped_storage().data_ptr() in freed) else x for x in results)
            self._free_until_backward(placed, results, train)
        return cast(tuple[Tensor, ...], results)

    def _free_until_backward(self, placed: PlacedBlock, results: Sequence[Tensor],
                             train: bool) -> None:
        """Backward first meets the results of a block; its parameters are gathered again then."""
        for held in placed.gathered:
            self.store.release(held)
        if train:
            for result in results:
                if result.requires_grad:
                    result.register_hook(lambda _: self._gather_again(placed))

    def _gather_again(self, placed: PlacedBlock) -> None:
        self.store.gather([h for h in placed.gathered if h.leaf.untyped_storage().size() == 0])

    def backward(self, micro_batch: int, grads: Values | None) -> Values:
        """Backward of a micro-batch; returns the gradients of what arrived. Without `grads` it
        begins at the loss."""
        arrived, left = self.kept[micro_batch] if self.keeps else self.kept.pop(micro_batch)
        if grads is None:
            grads = {"loss": torch.full_like(left["loss"], self.loss_scale)}
        pairs = [(v, grads[name]) for name, v in left.items()
                 if name in grads and self.outputs.get(name, name) in self.live
                 and isinstance(v, Tensor) and v.requires_grad]
        with self._linears(micro_batch):
            torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs],
                                    retain_graph=self.keeps)
        for held in (held for cell in self.placed for held in cell.gathered):
            if held.leaf.untyped_storage().size():
                self.store.release(held)
        found = {name: torch.zeros_like(value) if value.grad is None else value.grad
                 for name, value in arrived.items() if value.requires_grad}
        for value in arrived.values():
            value.grad = None
        return found

    def backward_input(self, micro_batch: int, grads: Values | None) -> Values:
        """The part of backward that the stage before waits for; weight gradients of linears wait.
        If the stage recomputes, it is all of it (see `Plan.whole`)."""
        queue = self.queues[micro_batch] = WeightQueue()
        with contextlib.nullcontext() if self.plan.whole(self.stage) else queue:
            return self.backward(micro_batch, grads)

    def backward_weight(self, micro_batch: int, arrived: Callable[[str], object]) -> None:
        """The rest of the gradients; `arrived` is called with each parameter that is complete."""
        queue = self.queues.pop(micro_batch)
        leaves = {name: self.store.held[name].leaf for name in self.params}
        names = {id(leaf): name for name, leaf in leaves.items() if leaf.requires_grad}
        late = {id(weight) for weight, _ in queue.waiting}
        for leaf, name in names.items():
            if leaf not in late:
                arrived(name)
        queue.flush(lambda weight: arrived(names[id(weight)]))


def _origin(block: Block, slot: str) -> tuple[str, str]:
    if slot in block.inputs:
        return "value", block.inputs[slot]
    if slot in block.context:
        return "context", block.context[slot]
    return "param", block.params[slot]
