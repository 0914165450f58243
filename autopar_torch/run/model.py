"""ParallelModel: the module a user trains with, whatever the plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import files, schedule as schedules
from ..errors import RunError
from ..guards import Guards
from ..plan import Plan
from ..search.best import Outcome
from ..shard.collectives import arrive
from ..shard.holdings import axis_ranks
from ..timeline import Timeline
from ..trace import Traced
from ..trace.call import Call, take_apart
from . import checkpoint, shardings, state
from .context import Prologue
from .executor import Executor, Mail, neighbours
from .handover import hand_over
from .params import ParamStore, Reducer
from .record import SILENT, Recorder, Silent, joined
from .returned import returned
from .stage import StageRunner
from .world import World

Prepare = Callable[["ParallelModel", Call, list[Tensor]], None]


class Program:
    """One traced call under the plan: this rank's stages and its prologue."""

    def __init__(self, traced: Traced, plan: Plan, model: ParallelModel) -> None:
        world, store = model.world, model.store
        self.traced = traced
        self.stages: dict[int, StageRunner] = {}
        replica = plan.replicas[model.replica]
        for s, stage in enumerate(replica.stages):
            if world.rank in stage.devices:
                peers = model.replica_axis(s)
                self.stages[s] = StageRunner(traced, plan, stage, store, world.tensor_axes(stage),
                                             peers, model.device)  # fmt: skip
        names = [n for runner in self.stages.values() for n in runner.context_names()]
        self.prologue = Prologue(traced, names, model.buffers_by_name, model.device)
        self._schedules: dict[tuple[int, bool], schedules.Schedule] = {}
        self._name, self._positions = plan.schedule, replica.position_of

    def schedule(self, num_micro_batches: int, train: bool) -> schedules.Schedule:
        """The action lists of this replica, proven free of deadlock."""
        key = (num_micro_batches, train)
        if key not in self._schedules:
            made = schedules.build(self._name, self._positions, num_micro_batches, train)
            schedules.check(made, num_micro_batches)
            self._schedules[key] = made
        return self._schedules[key]


class ParallelModel(nn.Module):
    """Takes the global batch on every rank and returns the loss of the global batch on every rank.

    In training mode `forward` runs the whole schedule, backward included, and keeps the gradients
    aside; the returned loss hands them to the parameters when `backward()` is called on it.
    """

    def __init__(self, module: nn.Module, world: World, device: torch.device, prepare: Prepare,
                 outputs: Sequence[str] = (), guards: Guards | None = None) -> None:  # fmt: skip
        super().__init__()
        self.module = module
        self.guards = guards or Guards()
        self.training = module.training
        self.world, self.device, self._prepare = world, device, prepare
        self.outputs = tuple(outputs)
        self.retrace: Callable[[Call, bool, tuple[str, ...] | None], Traced] | None = None
        self._plan: Plan | None = None
        self._store: ParamStore | None = None
        self._programs: dict[Any, Program] = {}
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self.fallback_reason = ""
        self.recorder: Recorder | Silent = SILENT
        self.found: Outcome | None = None  # the search behind the plan, if there was one

    # --- what the plan made of this rank ----------------------------------------------------

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise RunError("there is no plan before the first batch", where="model.plan",
                           fix="pass example_inputs= to parallelize")  # fmt: skip
        return self._plan

    @property
    def store(self) -> ParamStore:
        """This rank's parts of the parameters."""
        if self.fallback_reason:
            raise RunError("the module was not traced, so it is whole on every rank",
                           where=self.fallback_reason,
                           fix="save and load its state_dict() with torch")  # fmt: skip
        if self._store is None:
            raise RunError("there are no parts of the parameters before the first batch",
                           fix="pass example_inputs= to parallelize")  # fmt: skip
        return self._store

    def adopt(self, plan: Plan, traced: Traced, call: Call,
              source: Callable[[str], Tensor | None]) -> None:  # fmt: skip
        """Take up a plan: parameters become this rank's parts, filled from `source`."""
        graph = traced.graph
        self._plan, self.graph = plan, graph
        self.replica = next(r for r, rep in enumerate(plan.replicas)
                            if any(self.world.rank in s.devices for s in rep.stages))  # fmt: skip
        stages = [s for replica in plan.replicas for s in replica.stages]
        self.world.make_groups(_axis_groups(plan))
        self.world.enter_lanes(pair for replica in plan.replicas for pair in neighbours(replica))
        self._store = ParamStore(self.module, plan, graph, self.world, self.device)
        self.store.place(source)
        mine = [s for s in stages if self.world.rank in s.devices]
        blocks = {b: list(graph.blocks[b].params.values())
                  for s in mine for b in range(*(s.blocks or (0, 0)))}  # fmt: skip
        self.reducer = Reducer(self.store, blocks)
        self.buffers_by_name = dict(self.module.named_buffers())
        self._programs[(call.key, True)] = Program(traced, plan, self)
        self._share_random_numbers()

    def _share_random_numbers(self) -> None:
        """Ranks of a tensor group draw the same numbers, other stages and replicas others."""
        if self.world.size > 1:
            seed = files.decode(self.world.agree(files.encode(torch.initial_seed())), int)
            stages = self.plan.replicas[self.replica].stages
            group = next(s.devices for s in stages if self.world.rank in s.devices)
            torch.manual_seed((seed + min(group)) % 2**63)

    def replica_axis(self, stage: int) -> Any:
        """The ranks that have this rank's place in the other replicas."""
        ranks = _peers(self.plan, self.replica, stage, self.world.rank)
        return self.world.axis(ranks) if ranks else None

    # --- a step -----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the global batch, or an object with it and the outputs asked for."""
        call, tensors = take_apart(args, kwargs)
        tensors = [t.to(self.device) for t in tensors]
        if self._plan is None:
            self._prepare(self, call, tensors)
        if self.fallback_reason:
            return cast(Any, self.fallback)(call, tensors)
        train = self.training and torch.is_grad_enabled()
        program = self._program(call)
        results = self._run(program, call, tensors, train)
        return returned(results, program.traced.outputs)

    def _program(self, call: Call) -> Program:
        key = (call.key, self.training)
        if key not in self._programs:
            wanted = ("loss", *self.outputs) if self.training else None
            traced = cast(Any, self.retrace)(call, self.training, wanted)
            rows = max(1, call.num_rows // self.plan.num_micro_batches)
            plan = shardings.again(self.plan, self.graph, traced, rows)
            self._programs[key] = Program(traced, plan, self)
        return self._programs[key]

    def _run(self, program: Program, call: Call, tensors: list[Tensor],
             train: bool) -> dict[str, Tensor]:  # fmt: skip
        spans = self.micro_batches(call.num_rows)
        rows, in_step = spans[self.replica], len({len(span) for span in spans}) == 1
        replica = self.plan.replicas[self.replica]
        with self.recorder.computing("refresh"):
            self.store.refresh()
        if train:
            self.reducer.begin(in_step)
        with self.recorder.computing("batch"):
            whole = program.prologue.for_batch(call, tensors)
        cache: dict[int, dict[str, Any]] = {}

        def context(_: int, mb: int) -> dict[str, Any]:
            if mb not in cache:
                cache[mb] = program.prologue.for_rows(call, tensors, whole, *rows[mb])
            return cache[mb]

        actions = program.schedule(len(rows), train)
        position = actions.position_of[min(program.stages)]
        mail = Mail(self.world, replica, self.device)
        executor = Executor(program.stages, replica, mail, self.reducer if train else None,
                            self.recorder)  # fmt: skip
        values: dict[str, Tensor] = {}
        sums: list[Any] = []

        def share(parts: dict[int, dict[str, Tensor]]) -> None:
            values.update(self._outputs(program, parts, rows, call.num_rows))
            sums.extend(work for x in values.values() for work in self.world.start_sum(x))

        executor.run(actions, position, rows, context, train, share)
        if train:
            with self.recorder.computing("pack"):
                self.reducer.launch_rest()
        with self.recorder.exchanging("outputs"):
            arrive(sums)
        if train:
            grads = self._finish_grads()
            values["loss"] = hand_over(self._anchor, values["loss"], grads)
        return values

    def measure(self, *args: Any, steps: int = 3, **kwargs: Any) -> Timeline:
        """When everything happens in a real step on this batch (the quickest of `steps`).

        Gradients are computed and dropped; the optimizer is the caller's. All ranks must call it.
        """
        runs = []
        for _ in range(max(1, steps)):
            self.recorder = Recorder(self.world.rank)
            self(*args, **kwargs)
            runs.append(joined(self.world.gather(self.recorder.result())))
        self.recorder = SILENT
        return min(runs, key=lambda timeline: timeline.step_s)

    def micro_batches(self, num_rows: int) -> list[list[tuple[int, int]]]:
        """Rows of every micro-batch of every replica; sizes differ by one row at most."""
        return self.plan.micro_batches(num_rows)

    def local_slice(self, num_rows: int) -> slice:
        """Rows of the global batch that this rank's replica computes with."""
        spans = self.micro_batches(num_rows)[self.replica]
        return slice(spans[0][0], spans[-1][1]) if spans else slice(0, 0)

    def _finish_grads(self) -> list[tuple[Tensor, Tensor]]:
        with self.recorder.exchanging("reduce"):
            sums = self.reducer.finish()
        return [(self.store.held[name].tensor, grad) for name, grad in sums.items()]

    def _outputs(self, program: Program, parts: dict[int, dict[str, Tensor]],
                 rows: Sequence[tuple[int, int]], num_rows: int) -> dict[str, Tensor]:  # fmt: skip
        """This rank's addends of the outputs of the whole batch: what only it has."""
        stage = self.plan.replicas[self.replica].stages[-1]
        speaks = stage.devices[0] == self.world.rank
        return {
            name: self._addend(program, name, parts if speaks else {}, rows, num_rows)
            for name in program.traced.outputs
        }

    def _addend(self, program: Program, name: str, parts: dict[int, dict[str, Tensor]],
                rows: Sequence[tuple[int, int]], num_rows: int) -> Tensor:  # fmt: skip
        info = state.output_info(program.traced, name)
        full = torch.zeros(info.at(num_rows), dtype=getattr(torch, info.dtype), device=self.device)
        per_row = info.at(2)[0] - info.at(1)[0] if info.shape else 0
        for mb, values in parts.items():
            start, end = rows[mb]
            value = values[name]
            if per_row:
                full[start * per_row : end * per_row] = value
            elif state.is_summed(program.traced, name):
                full += value
            elif start == 0:
                full.copy_(value)
        return full

    # --- what training scripts use ----------------------------------------------------------

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The user's Parameter objects (this rank's parts)."""
        return self.module.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Under their original names."""
        return self.module.named_parameters(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`."""
        return state.clip_grad_norm(self, max_norm)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Full tensors under the original names, on every rank (all ranks must call it)."""
        return state.full_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True,
                        assign: bool = False) -> Any:  # fmt: skip
        """Take full tensors; every rank keeps its part."""
        return state.load_full(self, state_dict, strict)

    def save(self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None,
             *, step: int | None = None, keep: int | None = None) -> None:  # fmt: skip
        """Write a checkpoint that any plan can load; what was there before is replaced at once,
        when all is on the disk. With `step` into FOLDER/step-N, of which the newest `keep` stay.
        """
        checkpoint.save(self, folder, optimizer, step, keep)

    def load(self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None,
             *, strict: bool = True, verify: bool = True) -> int | None:  # fmt: skip
        """Read a checkpoint written under any plan, of a folder with steps the newest; its step.

        Nothing is changed unless everything fits. `strict=False` takes what the model and the
        checkpoint both have; `verify=False` leaves out the hashes.
        """
        return checkpoint.load(self, folder, optimizer, strict, verify)

    def explain(self, name: str) -> str:
        """How the blocks whose name contains `name` are run on this rank, as code."""
        programs = [p for prog in self._programs.values() for p in prog.stages.values()]
        found = []
        for runner in programs:
            for index, cell in enumerate(runner.cells):
                if name in cell.block.name:
                    found.append(f"# {cell.block.name}\n{runner.code(index)}")
        return "\n".join(found) or f"no block of this rank is called {name!r}"


def _peers(plan: Plan, replica: int, stage: int, rank: int) -> tuple[int, ...]:
    """Ranks at the same place of the same stage of every replica; empty if they differ."""
    stages = [r.stages[stage] for r in plan.replicas if len(r.stages) > stage]
    own = plan.replicas[replica].stages[stage]
    if len(stages) < len(plan.replicas) or len(stages) == 1:
        return ()
    if any((s.axes, s.blocks) != (own.axes, own.blocks) for s in stages):
        return ()
    return tuple(s.devices[own.devices.index(rank)] for s in stages)


def _axis_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Every group of the tensor axes, and of equal places in all replicas."""
    groups = []
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            for rank in stage.devices:
                groups += [axis_ranks(stage, rank, a) for a in range(len(stage.axes))]
                groups.append(_peers(plan, r, s, rank))
    return [tuple(sorted(g)) for g in groups if g]


__all__ = ["ParallelModel"]
