"""One traced call under a plan: what this rank runs for it, and its part of what it returns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import RunError
from ..model import TensorInfo
from ..plan import Plan, Replica
from ..progress import warn
from ..proof import check
from ..schedule import Schedule, build
from ..shard.rules import is_random
from ..trace import Traced
from ..trace.burnt import Burnt, ReadAttributes
from ..trace.call import Call
from ..trace.decisions import above
from ..trace.opaque import calls_modules
from ..trace.row_branches import holds
from .params import ParamStore
from .prologue import Prologue
from .stage import StageRunner

# A trace, its call, and what it had read of the module; None: what is there now.
First = tuple[Traced, Call, ReadAttributes | None]
MOST, MANY = 16, 6  # traces of one form of call: that are kept; of which it is said
log = logging.getLogger("autopar_torch")


class Program:
    """This rank's stages of a traced call, and its prologue."""

    def __init__(self, traced: Traced, plan: Plan, replica: Replica, store: ParamStore,
                 burnt: Burnt) -> None:
        world = store.world
        self.traced = traced
        self.stages = {
            s: StageRunner(traced, plan, stage, store, s == len(replica.stages) - 1)
            for s, stage in enumerate(replica.stages) if world.rank in stage.devices
        }
        burnt.learn(traced.reads)
        self.state, self.number = burnt.described(traced.reads), burnt.number
        names = [n for runner in self.stages.values() for n in runner.context_names()]
        self.prologue = Prologue(traced, names, store.buffers, store.device)
        self.params = {*traced.graph.params_of(0, len(traced.graph.blocks))}  # of all stages
        self.draws = world.size > 1 and any(is_random(node) for graph in (
            *traced.programs.values(), traced.prologue) for node in graph.nodes)
        self.varies = calls_modules(traced.programs.values())
        self._schedules: dict[tuple[int, bool, str], Schedule] = {}
        self._name, self._positions = plan.schedule, replica.position_of
        # Parameters that get gradients, by the outputs that these come from, once it has run.
        self.reached: dict[tuple[str, ...], list[str]] = {}

    def serves(self, burnt: Burnt, num_rows: int) -> bool:
        """Whether everything that decided what was traced is still as it was."""
        if not holds(self.traced.answers, num_rows):
            return False
        if self.number != burnt.number and self.state == burnt.described(self.traced.reads):
            self.number = burnt.number
        return self.number == burnt.number

    def schedule(self, num_micro_batches: int, train: bool, name: str = "") -> Schedule:
        """The action lists of this replica, proven free of deadlock; those of the plan unless
        another schedule is named."""
        key = (num_micro_batches, train, name)
        if key not in self._schedules:
            made = build(name or self._name, self._positions, num_micro_batches, train)
            check(made, num_micro_batches)
            self._schedules[key] = made
        return self._schedules[key]

    def explained(self, name: str) -> Iterator[str]:
        """The code of the blocks whose name contains `name`."""
        for runner in self.stages.values():
            for index, placed in enumerate(runner.placed):
                if name in placed.block.name:
                    yield f"# {placed.block.name}\n{runner.code(index)}"

    @cached_property
    def inner(self) -> dict[str, str]:
        """Outputs that another one is made of, and which that is."""
        values = self.traced.graph.outputs
        return {name: other for other in self.traced.outputs
                for made_of in [self._made_of(values[other])]
                for name in self.traced.outputs if values[name] in made_of}

    def _made_of(self, value: str) -> set[str]:
        """The values of the chain that one is made of."""
        found = {value}
        for block in reversed(self.traced.graph.blocks):
            ends: Any = self.traced.programs[block.kind].output_node().args[0]
            made = dict(zip(block.outputs.values(), ends, strict=True))
            nodes = {node for own, end in made.items() if own in found for node in above(end)}
            found |= {own for own, end in made.items() if end in nodes}
            found |= {block.inputs[node.name] for node in nodes if node.name in block.inputs}
        return found - {value}

    # --- what it returns ------------------------------------------------------------------------

    def sums(self, name: str) -> bool:
        """Whether an output is a sum over the rows: what knows none is the same of each part."""
        return name in self.traced.graph.summed

    def addends(self, parts: Mapping[int, Mapping[str, Tensor]], rows: Sequence[tuple[int, int]],
                in_one: bool, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        """A tensor for each output, with the size of the whole batch: added up over all ranks they
        are the output. `parts`: outputs of micro-batches that only this rank has; `in_one`: there
        is one micro-batch, of one replica."""
        found = {}
        for name in self.traced.outputs:
            own = {rows[mb]: values[name] for mb, values in parts.items()}
            found[name] = self._addend(name, own, in_one, num_rows, device)
        return found

    def _addend(self, name: str, parts: Mapping[tuple[int, int], Tensor], in_one: bool,
                num_rows: int, device: torch.device) -> Tensor:
        info, summed, dims = self.info(name), self.sums(name), self._dims(name)
        kind = getattr(torch, info.dtype)
        if kind.is_floating_point and summed:
            kind = torch.promote_types(kind, torch.float32)  # parts of a loss may be many
        full = torch.zeros(info.at(num_rows), dtype=kind, device=device)
        if len(dims) > 1 and not in_one and any(x.shape != full.shape for x in parts.values()):
            raise RunError(
                "an output has the batch in more than one dim", where=name,
                fix="do not return it, or use one replica and num_micro_batches=1",
            )
        for (start, end), value in parts.items():
            if len(dims) == 1:
                own = self._of_rows(name, full, start, end)
                own.copy_(value.reshape(own.shape))
            elif summed:
                full += value
            elif start == 0:
                full.copy_(value)
        return full

    def portion(self, name: str, grad: Tensor, rows: tuple[int, int], num_rows: int) -> Tensor:
        """The part of an output's gradient that belongs to some rows, as they were added."""
        dims, (start, end) = self._dims(name), rows
        grad = grad.to(getattr(torch, self.info(name).dtype))
        if len(dims) == 1:
            dim = dims[0][0]
            return self._of_rows(name, grad, start, end).flatten(dim, dim + 1).contiguous()
        return grad if self.sums(name) or start == 0 else torch.zeros_like(grad)

    def _of_rows(self, name: str, full: Tensor, start: int, end: int) -> Tensor:
        """A view of some rows, which may be spread (batch_dim): their dim is two, outer and own."""
        (dim, entries), = self._dims(name)
        outer = self.traced.outers.get(name, 1)
        own, each = full.unflatten(dim, (outer, -1)), entries // outer
        return own.narrow(dim + 1, start * each, (end - start) * each)

    def _dims(self, name: str) -> list[tuple[int, int]]:
        """(dim, entries for each row) of an output."""
        info = self.info(name)
        sizes = zip(info.at(1), info.at(2), strict=True)
        return [(d, two - one) for d, (one, two) in enumerate(sizes) if two > one]

    def info(self, name: str) -> TensorInfo:
        """Shape and type of what the model returns under a name."""
        graph = self.traced.graph
        value = graph.outputs[name]
        for block in graph.blocks:
            for slot, made in block.outputs.items():
                if made == value:
                    return graph.kinds[block.kind].outputs[slot]
        return next(n.meta["info"] for n in self.traced.prologue.nodes if n.name == value)


def serving(known: list[Program], burnt: Burnt, call: Call,
            tensors: Sequence[Tensor]) -> tuple[Program | None, Call]:
    """The trace that is for this call; if there is none, the call with what one of them found of
    its values."""
    for program in known:
        if program.serves(burnt, call.num_rows):
            call = replace(call, decided=program.prologue.decided(call, tensors))
            if call.decided == tuple(answer for _, answer in program.traced.decided):
                return program, call
    return None, call


def remember(known: list[Program], made: Program) -> Program:
    """One more trace of a form of call, as what forward reads has changed."""
    known.append(made)
    if len(known) == MANY:
        before = known[-2].state.items()
        changed = sorted(f"{where}.{key}".lstrip(".") for (where, key), _ in
                         made.state.items() - before)
        warn(log, "forward was traced %d times, as this changes: %s; a tensor, in a buffer or an "
                  "argument, may change without that", MANY, ", ".join(changed) or "the batch")
    del known[:-MOST]
    return made
