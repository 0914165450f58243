"""One call of a traced model under the plan: this rank's rows through its stages.

A model that returns its loss runs the whole schedule at once. Where the loss is made outside, all
forwards run first, and the backwards when the gradients of the outputs are known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import PlanError, RunError
from ..model import ModelGraph
from ..plan import Plan, Replica
from ..progress import warn
from ..schedule import Schedule, rest
from ..shard.collectives import arrive
from ..trace.call import Call
from .batches import Settle
from .executor import Executor, Mail
from .first_step import FirstStep
from .grads_of_grads import Asked, OnceMore
from .handover import LossScale, Upstream, between, check_alike, hand_over, promise
from .nonfinite import NonFinite
from .pace import Stopwatch
from .params import ParamStore, Reducer
from .program import Program
from .randomness import OwnNumbers
from .record import SILENT, Recorder, Silent
from .returned import leave
from .sharded import local
from .stage import Values

log = logging.getLogger("autopar_torch")
COSTS = ("the loss is made outside of the model: all micro-batches of a step are kept until its "
         "backward (as under GPipe), and whole outputs go to every rank. A model that returns its "
         "loss, or parallelize(..., loss_fn=) with target=, needs less")


class Planned(Asked, Protocol):
    """What a step needs of the model that it is a step of."""

    graph: ModelGraph
    replica: int | None
    training: bool
    anchor: Tensor
    reducer: Reducer
    recorder: Recorder | Stopwatch | Silent
    non_finite: NonFinite
    loss_scale: LossScale
    num_steps: int
    numbers: OwnNumbers
    first: FirstStep | None

    @property
    def store(self) -> ParamStore: ...
    @property
    def speaks(self) -> bool: ...
    def own(self, plan: Plan) -> Replica: ...
    def begin_step(self) -> None: ...


class RankStep:
    """Made when a call begins; it ends with the backward, where there is one."""

    def __init__(self, parallel: Planned, program: Program, call: Call,
                 tensors: list[Tensor], settle: Settle) -> None:
        self.parallel, self.program, self.call = parallel, program, call
        self.asked_with, self.tensors = tensors, [t.detach() for t in tensors]
        self.given = {name: (tensor, has_rows) for name, tensor, has_rows in zip(
            program.prologue.inputs, tensors, call.rows, strict=True)
            if name in program.traced.graph.given}
        self.world, self.recorder, self.store = parallel.world, parallel.recorder, parallel.store
        self.first, parallel.first = parallel.first, None
        self.reducer = parallel.reducer
        plan, replica = parallel.plan, parallel.replica
        spans = plan.micro_batches(call.num_rows)
        self._refuse_rowless(spans)
        self.num_parts = sum(map(len, spans))  # of the rows
        self.rowless = replica is not None and not spans[replica]
        # A replica without rows runs one that does not count: to exchange, or to move its buffers.
        if plan.zero == 3 or call.in_one_row:
            spans = [span or [(0, 1)] for span in spans]
        self.rows = [] if replica is None else spans[replica]
        self.in_step = len({len(span) for span in spans}) == 1
        self.speaks = parallel.speaks and not self.rowless
        try:
            drawing = parallel.numbers.drawing_alike() if program.draws else nullcontext()
            with self.recorder.computing("batch"), drawing:
                self.whole = program.prologue.for_batch(call, self.tensors)
        finally:
            settle()  # before this step's first message

    def _refuse_rowless(self, spans: list[list[tuple[int, int]]]) -> None:
        """Batch statistics are joined over replicas, of which none may have nothing to add."""
        joined = any(kind.couples_rows for kind in self.program.traced.graph.kinds.values())
        if joined and not all(spans):
            raise PlanError(
                f"{self.call.num_rows} row(s) for {len(spans)} replicas, which join the statistics "
                f"of batches, are none for replica {spans.index([])}", where="the batch",
                fix="give at least a row for each, or use fewer replicas",
            )

    def _refuse_moved(self) -> None:
        """Gradients are cut as the plan says."""
        if self.parallel.store is not self.store:
            raise RunError("the plan was changed between forward and backward", where="backward",
                           fix="call model.move() after the backward() of all that was computed "
                           "before")

    # --- the ways to run ------------------------------------------------------------------------

    def evaluated(self) -> Values:
        """Forwards only; nothing is kept."""
        self.recorder = SILENT
        return self._left(self._outputs())

    def trained(self, scale: float) -> Values:
        """The whole schedule. The loss hands over gradients that have been made."""
        parallel = self.parallel
        parallel.begin_step()
        share = 1.0 if self.program.sums("loss") else 1 / self.num_parts
        for runner in self.program.stages.values():
            runner.loss_scale = 0.0 if self.rowless else scale * share
            runner.live = self.program.traced.graph.leading_to(("loss",))
        values = self._compared(self._outputs(back=True))
        once_more = self._once_more({"loss": values["loss"]})
        results = self.executor.results if self.speaks else {}
        parts = {self.rows[mb]: value["loss"] for mb, value in results.items()}
        parallel.non_finite.check(parallel.num_steps, parallel.replica, values["loss"], parts)
        tensors = parallel.store.tensors
        grads = [(tensors[name], grad) for name, grad in self._finish_grads().items()]
        grads += self._grads_of_batch()
        loss = hand_over(parallel.anchor, values.pop("loss"), grads, once_more.grads, scale,
                         parallel.loss_scale, self._refuse_moved)
        return self._left({"loss": loss, **_not_for_losses(parallel.anchor, values, self.program)})

    def promised(self) -> Values:
        """Forwards; the backwards run when gradients of the outputs come."""
        parallel = self.parallel
        if parallel.training:
            parallel.begin_step()
            if self.world.rank == 0:
                _tell_costs()
        values = self._compared(self._outputs(keep=True))
        self.versions = self.store.versions(self.program.traced.graph.rewritten)
        params = {name: t for name, t in parallel.store.tensors.items() if t.requires_grad}
        ends = {name: x for name, x in values.items() if self.program.info(name).grad}

        def finish(upstream: Upstream, more: bool) -> list[Tensor | None]:
            with (parallel.turns.doing("backward"), torch.enable_grad(),
                  torch.autocast(parallel.device.type, enabled=False)):
                grads = self._backwards(upstream, more)
                return [*map(grads.get, params), *(grad for _, grad in self._grads_of_batch())]

        learning = [*params.values(), *(tensor for tensor, _ in self.given.values())]
        made = promise(parallel.anchor, ends, learning, finish, self._once_more(ends).grads)
        made |= {name: between(made[name], name, other)
                 for name, other in self.program.inner.items() if {name, other} <= ends.keys()}
        return self._left({**values, **made})

    # --- what they share ------------------------------------------------------------------------

    def _once_more(self, ends: Values) -> OnceMore:
        return OnceMore(self.parallel, self.call, self.asked_with, ends)

    @cached_property
    def executor(self) -> Executor:
        replica = self.parallel.own(self.parallel.plan)
        mail = Mail(self.world, replica, self.parallel.device)
        return Executor(self.program.stages, replica, mail, self.reducer, self.recorder)

    def _context(self, mb: int) -> dict[str, Any]:
        return self.program.prologue.for_rows(self.call, self.tensors, self.whole, *self.rows[mb])

    def _run(self, actions: Schedule, train: bool,
             share: Callable[[dict[int, Values]], None]) -> None:
        position = actions.position_of[min(self.program.stages)]
        self.executor.run(actions, position, self.rows, self._context, train, share)

    def _outputs(self, *, back: bool = False, keep: bool = False) -> Values:
        """What the model returns, on all ranks, from forwards; `back`: and the backwards are done,
        `keep`: what these need is kept."""
        parallel, program = self.parallel, self.program
        with self.recorder.computing("refresh"):
            parallel.store.refresh(program.params)
        if back:
            self.reducer.begin(self.in_step, program.varies, program.params)
        values: Values = {}
        sums: list[Any] = []
        pace = self.recorder if isinstance(self.recorder, Stopwatch) else None
        own: dict[str, Tensor | None] = {}

        def share(parts: dict[int, Values]) -> None:
            mine = parts if self.speaks else {}
            values.update(program.addends(mine, self.rows, self.num_parts == 1, self.call.num_rows,
                                          parallel.device))
            if pace is not None:
                own["loss"] = values.get("loss")
                pace.write(values, parallel.device)
            sums.extend(work for x in values.values() for work in self.world.start_sum(x))

        if program.stages:
            self._run(program.schedule(len(self.rows), back), back or keep, share)
        else:  # this rank idles
            share({})
        if back:
            with self.recorder.computing("pack"):
                self.reducer.launch_rest()
        with self.recorder.exchanging("outputs"):
            arrive(sums)
        if pace is not None:
            pace.read(values, own["loss"])
        return values

    def _left(self, values: Values) -> Values:
        """What the call returns; what forward leaves in attributes is put there."""
        if (form := self.program.traced.form).left:
            values = leave(self.parallel.module, values, form)
            self.parallel.burnt.accept()
        return values

    def _compared(self, values: Values) -> Values:
        """The same, if they are what the module gives. A batch for planning was another one."""
        first = self.first
        if first is not None and first.call is self.call and self.parallel.training:
            self.world.jointly(lambda: first.compare(values))
        return values

    def _backwards(self, upstream: Upstream, more: bool) -> dict[str, Tensor]:
        """Gradients of this rank's parameters, from those of the whole outputs; `more`: others may
        come, which need what these need."""
        parallel, program = self.parallel, self.program
        check_alike(self.world, upstream)
        self._refuse_moved()
        if self.store.versions(program.traced.graph.rewritten) != self.versions:
            raise RunError("a parameter was changed between forward and backward",
                           where="backward", fix="call optimizer.step() after the backward() of "
                           "all that was computed before")
        last = len(parallel.own(parallel.plan).stages) - 1
        if last in program.stages:
            for mb, rows in enumerate(self.rows):
                self.executor.values[last, "B", mb] = {
                    name: program.portion(name, grad * (not self.rowless), rows, self.call.num_rows)
                    for name, grad in upstream.items()}
        for runner in program.stages.values():
            runner.live, runner.keeps = self.program.traced.graph.leading_to(upstream), more
        self.reducer.begin(self.in_step, program.varies, program.params)
        if program.stages:
            schedule = program.schedule(len(self.rows), True, "gpipe")
            self._run(rest(schedule), True, lambda _: None)
        self.reducer.launch_rest()
        return self._finish_grads(tuple(upstream))

    def _finish_grads(self, given: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """Gradients by parameter, on all ranks of the same parameters: all that got any; `given`:
        the outputs from which they come."""
        parallel, known = self.parallel, self.program.reached
        with self.recorder.exchanging("reduce"):
            sums = self.reducer.finish()
        tensors = parallel.store.tensors
        if given not in known or self.program.varies:
            everyone = self.world.gather(self.reducer.reached)
            known[given] = [name for name in tensors if any(name in names for names in everyone)]
        return {name: sums[name] if name in sums else torch.zeros_like(local(tensors[name]))
                for name in known[given]}

    def _grads_of_batch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What was given and requires a gradient, and this, on all ranks."""
        parallel = self.parallel
        stages = parallel.own(parallel.plan).stages
        speaks = bool(stages) and stages[0].devices[0] == self.world.rank and not self.rowless
        for name, (tensor, has_rows) in self.given.items():
            grad = torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
            for mb, (start, end) in enumerate(self.rows) if speaks else ():
                part = grad[start:end] if has_rows else grad
                part += self.executor.values[-1, "B", mb][name]
            yield tensor, self.world.sum(grad).to(tensor.dtype)


def _not_for_losses(anchor: Tensor, values: Values, program: Program) -> Values:
    """Outputs beside a loss, whose backwards have run: nothing more can be made of them."""

    def refuse(*_: Any) -> list[Tensor | None]:
        raise RunError("backward() of an output of a model that returns its loss",
                       where="outputs=, in training", fix="add what you make of it to the loss "
                       "in the model or in loss_fn=, which gets all outputs; or call the model so "
                       "that it returns no loss and compute all of it outside; or detach() it")

    ends = {name: x for name, x in values.items() if program.info(name).grad}
    return {**values, **promise(anchor, ends, (), refuse, refuse)} if ends else values


@cache
def _tell_costs() -> None:
    warn(log, COSTS)
