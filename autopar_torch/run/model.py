"""ParallelModel: the module a user trains with, whatever the plan."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RunError
from ..guards import Guards
from ..model import ModelGraph
from ..plan import IDLE, Plan, Replica
from ..report import page, story
from ..search.best import Result
from ..search.reasons import Case
from ..shard.holdings import axis_groups
from ..timeline import Timeline
from ..trace import Traced
from ..trace.burnt import Burnt, frozen_of, replaced, tensors_of
from ..trace.call import Call
from ..trace.form import LossFn
from . import checkpoint, doors, full_state, move, optimizers, shardings, steps, tracing
from .around import Around
from .background import Writing
from .batches import SameBatch, Settle
from .copies import copied, whole_values
from .drift import Drift, held_copies
from .executor import neighbours
from .first_step import FirstStep
from .handover import LossScale, grads_kept
from .materialize import FullValues
from .move import Moved
from .nonfinite import NonFinite
from .pace import Stopwatch
from .params import ParamStore, Reducer
from .program import First, Program, remember, serving
from .randomness import OwnNumbers, another_seed, share_python_numbers
from .record import SILENT, Recorder, Silent, joined
from .returned import ends_of, returned
from .step import RankStep
from .totals import clip_grad_norm
from .world import World

log = logging.getLogger("autopar_torch")
TracerOf = Callable[[nn.Module], tracing.Tracer]
Prepare = Callable[["ParallelModel", Call, list[Tensor]], None]


class ParallelModel(Around):
    """Takes the global batch on every rank and returns the loss of the global batch on every rank.

    In training mode `forward` runs the whole schedule, backward included, and keeps the gradients
    aside; the returned loss hands them to the parameters when `backward()` is called on it.
    """

    graph: ModelGraph
    replica: int | None
    reducer: Reducer
    numbers: OwnNumbers

    def __init__(self, module: nn.Module, world: World, device: torch.device, prepare: Prepare,
                 retrace: tracing.Tracer, tracer_of: TracerOf, loss_fn: LossFn | None = None,
                 outputs: Sequence[str] = (), guards: Guards | None = None, batch_dim: int = 0,
                 watch: bool = True) -> None:
        super().__init__()
        self.module, self.guards = module, guards or Guards()
        self.world, self.device, self._prepare = world, device, prepare
        self.outputs, self.loss_fn = tuple(outputs), loss_fn
        self.retrace, self.tracer_of = retrace, tracer_of
        self._first: First
        self._plan: Plan | None = None
        self._store: ParamStore | None = None
        self._programs: dict[Any, list[Program]] = {}
        self.burnt, self._seen_changes = Burnt(module, loss_fn), 0
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.loss_scale = LossScale()
        self.fallback: Callable[[Call, list[Tensor]], Any] | None = None
        self.fallback_reason, self.num_steps = "", 0  # steps of training that have begun
        self.pace = Stopwatch(world) if watch and world.size > 1 and device.type == "cpu" else None
        self.recorder: Recorder | Stopwatch | Silent = self.pace or SILENT
        self.between: Callable[[Settle], object] = lambda _: None  # before each step
        self.found: Result | None = None  # the search behind the plan, if there was one
        self.case: Case | None = None  # and all that it depended on
        self._to_load: list[tuple[str | os.PathLike[str], torch.optim.Optimizer | None]] = []
        self._writing: Writing | None = None
        self.first: FirstStep | None = None
        self.same_batch = SameBatch(world, self.guards.batches, batch_dim)
        self.non_finite = NonFinite(world, self.guards.nan)
        self.drift, self.turns = Drift(world, self.guards.drift_every), doors.Turns(world)
        self._copies: list[ParallelModel] = []  # made before there was a plan
        self._ready()

    # --- what the plan made of this rank ----------------------------------------------------

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise RunError("there is no plan before the first batch", where="model.plan",
                           fix="pass example_inputs= to parallelize")
        return self._plan

    @property
    def store(self) -> ParamStore:
        """This rank's parts of the parameters."""
        if self.fallback_reason:
            raise RunError("the module was not traced, so it is whole on every rank",
                           where=self.fallback_reason,
                           fix="save and load its state_dict() with torch")
        if self._store is None:
            raise RunError("there are no parts of the parameters before the first batch",
                           fix="pass example_inputs= to parallelize")
        return self._store

    def adopt(self, plan: Plan, first: First, source: FullValues) -> None:
        """Take up a plan: parameters become this rank's parts, filled from `source`."""
        self._tensors, self.graph = tensors_of(self.module), first[0].graph
        self._see_frozen()
        self._store = ParamStore(self.module, plan, self.graph, self.world, self.device)
        with grads_kept(self.module.parameters()):
            self.store.place(source)
        if self.world.size > 1:
            full_state.watch(self.module)
            optimizers.attend()
        doors.take(self.module)
        self._first = first
        self._begin(plan)

    def _begin(self, plan: Plan) -> None:
        """The store has this rank's parts: make the programs."""
        self._take_place(plan)
        self.world.enter_channels(pair for replica in plan.replicas for pair in neighbours(replica))
        self.reducer = self._reducer()
        self._seen_changes = self.burnt.compare()
        traced, call, state = self._first
        made = self._made(traced, plan)
        self._programs = {(call.key, True, True): [made] * (state in (None, made.state))}
        self._first = traced, call, state or made.state
        rank = self.world.rank
        self.draw_as(min(next((g for g in self.own(plan).positions if rank in g), (rank,))))

    def adopt_untraced(self, plan: Plan, reason: str,
                       step: Callable[[Call, list[Tensor]], Any]) -> None:
        """Take up a plan of replicas of the module as it is, which is whole on every rank."""
        self._take_place(plan)
        self.fallback, self.fallback_reason = step, reason
        self.draw_as(0)

    def _take_place(self, plan: Plan) -> None:
        self._plan, self.replica = plan, plan.replica_of(self.world.rank)

    def own(self, plan: Plan) -> Replica:
        """The replica that this rank is in; one of no stages if it idles."""
        return IDLE if self.replica is None else plan.replicas[self.replica]

    def _reducer(self) -> Reducer:
        mine = [s for s in self.own(self.plan).stages if self.world.rank in s.devices]
        names = [n for stage in mine for n in self.graph.params_of(*(stage.blocks or (0, 0)))]
        return Reducer(self.store, [*names, *self.store.unread])

    def draw_as(self, place: int) -> None:
        """Ranks of a tensor group draw the same, other stages, replicas and models others."""
        if "numbers" not in vars(self):
            self.numbers = OwnNumbers(self.world.told(another_seed(), int), place, self.device)
        self.numbers.place = place

    # --- a step -----------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # by `torch.compile(model)`
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the global batch, or an object with it and the outputs asked for."""
        doors.refuse_wrapped(self)
        full_state.write_back()
        optimizers.restore()  # after a step that raised
        train = self.training and torch.is_grad_enabled()
        with self.turns.doing("forward" if train else "evaluation"):
            call, tensors, settle = self.same_batch.take(args, kwargs, self.training,
                                                         self.fingerprint_hash())
            with torch.autocast(self.device.type, enabled=False):  # it is a part of the program
                return self._called(call, [t.to(self.device) for t in tensors], train, settle)

    def _called(self, call: Call, tensors: list[Tensor], train: bool, settle: Settle) -> Any:
        if self._plan is None:
            settle()
            self.start(call, tensors)
            call, tensors = self.same_batch.as_shared(call, tensors)
        if self.fallback is not None:
            settle()
            return self.fallback(call, tensors)
        if train and self.training:
            self.between(settle)
        program = self._program(call, tensors, train, settle)
        step = RankStep(self, program, call, tensors, settle)
        with self.numbers.drawing() if program.draws else contextlib.nullcontext():
            if train and "loss" in program.traced.outputs:
                half = dict(call.autocast).get(self.device.type) == torch.float16
                results = step.trained(self.loss_scale.value if half else 1.0)
                return returned(results, program.traced.form, call.num_rows, train)
            results = step.promised() if torch.is_grad_enabled() else step.evaluated()
        return returned(results, program.traced.form, call.num_rows, train=False)

    def start(self, call: Call, tensors: list[Tensor]) -> None:
        doors.refuse_taken(self.module)
        with (tracing.modes_kept(self.module, True), torch.inference_mode(False),
              torch.enable_grad()):
            self._prepare(self, call, [t.clone() if t.is_inference() else t for t in tensors])
        if self.fallback_reason:
            share_python_numbers(self.world)
        while self._to_load:
            checkpoint.load(self.store, self.numbers, *self._to_load.pop(0))

    def fingerprint_hash(self) -> int:
        """Equal on all ranks whose modules would be traced alike."""
        self.burnt.compare()
        return self.burnt.digest

    def _program(self, call: Call, tensors: list[Tensor], train: bool, settle: Settle) -> Program:
        if self.burnt.compare() != self._seen_changes:
            settle()
            self._follow()
        known = self._programs.setdefault((call.key, train, torch.is_grad_enabled()), [])
        program, call = serving(known, self.burnt, call, tensors)
        if program is not None:
            return program
        settle()
        traced = tracing.for_batch(self.retrace, self.store.buffers, call, tensors, self.training,
                                   ("loss", *self.outputs) if train else None)
        rows = max(1, call.num_rows // self.plan.num_micro_batches)
        plan = shardings.again(self.plan, self.graph, traced, rows, self.store.unread)
        return remember(known, self._made(traced, plan))

    def _made(self, traced: Traced, plan: Plan) -> Program:
        """An error while it is made on one rank is one on all, as the others would wait for it."""
        self.world.make_groups(axis_groups(plan, traced.graph))
        return self.world.jointly(lambda: Program(
            traced, plan, self.own(plan), self.store, self.burnt))

    def _follow(self) -> None:
        """Something in the module has changed: refuse what the plan cannot follow."""
        doors.refuse_replaced(replaced(self.module, self._tensors))
        if frozen_of(self.module) != self._frozen:
            if not torch.is_grad_enabled():
                return  # it is asked only, as a teacher or a reference
            self._see_frozen()
            self.store.follow(self.graph)
            self.reducer.retire()
            self.reducer = self._reducer()
        self._seen_changes = self.burnt.number

    def _see_frozen(self) -> None:
        self._frozen = frozen_of(self.module)
        self.graph = self.graph.training_all_but(self._frozen)

    def begin_step(self) -> None:
        """One more step of training; the parameters are as the last one left them."""
        self.num_steps += 1
        self.drift.check(self.num_steps, lambda: held_copies(
            self.module, None if self.fallback_reason else self.store))
        if self.pace is not None:
            self.pace.step()

    def measure(self, *args: Any, steps: int = 3, **kwargs: Any) -> Timeline:
        """When everything happens in a real step on this batch (the quickest of `steps`).

        Gradients are computed and dropped; the optimizer is the caller's. All ranks must call it.
        """
        runs = []
        for _ in range(max(1, steps)):
            self.recorder = recorder = Recorder(self.world.rank)
            ends = ends_of(self(*args, **kwargs))
            params = [p for p in self.parameters() if p.requires_grad]
            torch.autograd.grad(ends, params, [*map(torch.ones_like, ends)], allow_unused=True)
            runs.append(joined(self.world.gather(recorder.result())))
        self.recorder = self.pace or SILENT
        return min(runs, key=lambda timeline: timeline.step_s)

    def report(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """A page about the plan; with a batch, beside a real step on it. All ranks must call it."""
        if self.fallback_reason:
            raise RunError("the module was not traced, so there is nothing to report",
                           where=self.fallback_reason)
        measured = self.measure(*args, **kwargs) if args or kwargs else None
        self.world.jointly(lambda: self.world.rank or page.write(story.told(
            self.plan, self.graph, self._first[1].num_rows, self.case, self.found, measured,
            changed=getattr(self.between, "told", ())), path))

    def local_slice(self, num_rows: int) -> slice:
        """Rows of the global batch that this rank's replica computes with."""
        place, rows = self.replica, self.plan.micro_batches(num_rows)
        spans = [] if place is None else rows[place]
        return slice(spans[0][0], spans[-1][1]) if spans else slice(0, 0)

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for its replica: what that returns is taken from here."""
        return any(s.devices[0] == self.world.rank for s in self.own(self.plan).stages[-1:])

    @property
    def _is_whole(self) -> bool:
        """Whether this rank has everything."""
        return self._plan is None or bool(self.fallback_reason)

    def _jointly(self, way: Callable[[str], contextlib.AbstractContextManager[None]],
                 name: str) -> contextlib.AbstractContextManager[None]:
        """A call of all ranks, unless each has everything."""
        full_state.write_back()
        return contextlib.nullcontext() if self._is_whole else way(name)

    # --- what training scripts use ----------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModel:
        """`.to()`, `.half()`, `.cuda()`: parameters lie where the plan has put them."""
        if self._plan is None:
            return super()._apply(fn, recurse)
        doors.refuse_moved(fn, [*self.module.parameters(), *self.module.buffers()])
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise doors.no_copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModel:
        """Another model under the same plan, with parts of its own, as averages of weights need it.
        All ranks must make it. Before there is a plan, both wait for it."""
        with self._jointly(self.world.meeting, "deepcopy"):
            module = (copy.deepcopy if self._is_whole else copied)(self.module, memo)
            made = ParallelModel(module, self.world, self.device, self._prepare,
                                 self.tracer_of(module), self.tracer_of, self.loss_fn,
                                 self.outputs, self.guards, watch=False)
            vars(made.same_batch).update(vars(self.same_batch))
            if not self._is_whole:
                made.adopt(self.plan, self._first, whole_values(self.module))
            elif self._plan is None:
                self._copies.append(made)
        return made

    def adopt_copies(self, values_of: Callable[[nn.Module], FullValues]) -> None:
        """Copies that were made before there was a plan take it up."""
        while self._copies and not self.fallback_reason:
            made = self._copies.pop(0)
            made.same_batch.one_row = self.same_batch.one_row
            if made._plan is None:
                made.adopt(self.plan, self._first, values_of(made.module))
            made.adopt_copies(values_of)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """DDP asks for it first of all."""
        raise doors.asked_for()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The user's Parameter objects; where a plan cuts them they mean whole tensors."""
        return self.module.parameters(*(() if recurse else (False,)))  # some have their own

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Under their original names."""
        return self.module.named_parameters(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0,
                        error_if_nonfinite: bool = False,
                        foreach: bool | None = None) -> Tensor:
        """torch's, over all ranks, in one message: the norm of all gradients, now at most this."""
        with self._jointly(self.world.doing, "clip_grad_norm_"):
            return clip_grad_norm(self.module, max_norm, norm_type, error_if_nonfinite, foreach)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Full tensors under the original names, on every rank (all ranks must call it)."""
        with self._jointly(self.world.meeting, "state_dict"):
            return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True,
                        assign: bool = False) -> Any:
        """Take full tensors; every rank keeps its part."""
        with self._jointly(self.world.meeting, "load_state_dict"):
            return full_state.load_full(self.module, state_dict, strict)

    def save(self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None,
             *, step: int | None = None, keep: int | None = None,
             background: bool = False) -> None:
        """Write a checkpoint that any plan can load; what was there before is replaced at once,
        when all is on the disk. With `step` into FOLDER/step-N, of which the newest `keep` stay.
        In the `background` a copy is written beside training; the next call that saves or loads
        waits for it, and tells what went wrong.
        """
        with self._jointly(self.world.meeting, "save"):
            self._finish_writing()
            self._writing = checkpoint.save(self.store, self.numbers, folder, optimizer, step,
                                            keep, background)

    def _finish_writing(self) -> None:
        """All ranks together, so that all hear of an error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish(self.world)

    def load(self, folder: str | os.PathLike[str],
             optimizer: torch.optim.Optimizer | None = None) -> int | None:
        """Read a checkpoint written under any plan, of a folder with steps the newest; its step.
        Nothing is changed unless everything fits. Before the first batch it is looked through, and
        read when that batch has made a plan."""
        with self.world.meeting("load"):
            self._finish_writing()
            if self._plan is None:
                found = checkpoint.known(self.world, folder)
                self._to_load.append((folder, optimizer))
                return found
            return checkpoint.load(self.store, self.numbers, folder, optimizer)

    def move(self, plan: Plan | str | os.PathLike[str], *own: torch.optim.Optimizer) -> Moved:
        """Train under another plan from the next step on; nothing is lost. All ranks must call it,
        between two steps. Optimizers that have stepped or were loaded are known; others that have
        state must be given."""
        before, (traced, call, _) = self.store, self._first
        full_state.write_back()
        with self.world.meeting("move"):
            given = shardings.another(self.world, self.plan, plan)
            given = shardings.agreed(self.world, given, traced, call.num_rows)
            for optimizer in own:
                optimizers.learn(optimizer)
            self._see_frozen()
            after = ParamStore(self.module, given, self.graph, self.world, self.device)
            numbers = self.numbers.state()
            moved = move.move(before, after, optimizers.living(self.module), self._programs.clear)
            self._store = after
            self._begin(given)
            self.numbers.load(numbers)
            self.drift.shared = None
        if self.world.rank == 0:
            log.info("moved in %.2f s to: %s", moved.seconds, given.describe(self.world.size))
        return moved

    def resume(self, folder: str | os.PathLike[str],
               optimizer: torch.optim.Optimizer | None = None) -> int | None:
        """`load`, where there is something to load: the newest step that was saved, else None. For
        the begin of a script that may have been started again, on as many ranks as there are now.
        """
        self._finish_writing()
        there = self.world.by_first(bool, lambda: steps.newest(Path(folder)) is not None)
        return self.load(folder, optimizer) if there else None

    def explain(self, name: str) -> str:
        """How the blocks whose name contains `name` are run on this rank, as code."""
        found = [code for known in self._programs.values() for program in known
                 for code in program.explained(name)]
        return "\n".join(found) or f"no block of this rank is called {name!r}"
