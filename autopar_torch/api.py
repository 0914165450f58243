"""The story: parallelize a model, from call to training."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from . import files
from .cluster import Cluster
from .errors import PlanError, SearchError, TraceError
from .find import changing, choose, compiling, following, honoured, measuring, offline, session
from .find.confirm import confirmed
from .guards import Guards
from .history import History
from .limits import Count, Index, Seconds
from .plan import Plan, Precision, as_plan, check
from .profile import QUICK_S
from .report import page, story
from .run import agree, doors, fallback, first_step, shardings, tracing, verify, world
from .run.materialize import FullValues, full_values
from .run.model import ParallelModel
from .run.randomness import untouched
from .run.training_log import TrainingLog as TrainingLog
from .search.best import KEPT, Result
from .search.explain import summary
from .search.reasons import Case
from .search.space import Constraints
from .simulate import simulate as simulated
from .timeline import Timeline
from .trace import Traced
from .trace.call import Batch, Call, as_call, take_apart
from .trace.form import LossFn

log = logging.getLogger("autopar_torch")
MUCH = 0.05  # of the operations: worth a warning
Given = Constraints | Mapping[str, Any] | None
Changes = History | str | os.PathLike[str]
GivenPlan = Plan | str | os.PathLike[str] | None


def parallelize(
    model: nn.Module,
    example_inputs: Batch | None = None,
    *,
    plan: GivenPlan = None,
    constraints: Given = None,
    confirm: int = 0,
    loss_fn: LossFn | None = None,
    outputs: Sequence[str] = (),
    init_seed: int = 0,
    weights: str | os.PathLike[str] | None = None,
    guards: Guards | Mapping[str, Any] | None = None,
    batch_dim: int = 0,
    changes: following.OnChange = "tell",
    compile: bool | None = None,
) -> ParallelModel:
    """The one new line: the model, trained on everything that torchrun started.

    Tracing and planning happen at the first batch, or at once with `example_inputs` (a global
    batch, as the model will be called with). `plan` is a Plan or the file of one. Without it the
    machines are measured (once: profiles are kept) and the fastest plan that fits is searched for,
    within `constraints` (like `{"tp": 2}`, see Constraints); `confirm=k` tries the best k for a few
    real steps first. The loss may be computed outside of the model, of whole outputs; with
    `loss_fn(output, target)` and `target=` in the batch it becomes a part of the model, which needs
    less memory. `outputs` names what else to return besides the loss.
    A model built on `meta` is filled part by part, from `weights` (a safetensors file or folder, or
    a checkpoint folder) or from its own initialisation with `init_seed`. `guards` says what is
    watched while training (see Guards). `batch_dim=1` serves models whose inputs have the
    sequence first and the rows of the batch in dim 1. `changes` says what happens when ranks or
    links between nodes become slower: "tell" names them, "follow" also moves to the plan that is
    the fastest then, when that pays; "off" does not look (on GPUs nobody looks yet). Where
    `compile` is true, or not given on GPUs, kinds of blocks that are measured to be quicker so run
    compiled.
    """
    files.checked(batch_dim, Index, "batch_dim")
    files.checked(changes, following.OnChange, "changes")  # type: ignore[arg-type]
    rank, size = world.start()
    device = world.device()
    watched = files.checked({} if guards is None else guards, Guards, "guards")
    place = world.World(rank, size, watched.timeout_s)
    compiles = device.type != "cpu" if compile is None else compile
    plan = plan or os.environ.get("AUTOPAR_PLAN")  # `autopar run --plan`
    agree.check_start(place, model, device, plan, constraints=constraints, confirm=confirm,
                      loss_fn=loss_fn, outputs=outputs, init_seed=init_seed, guards=guards,
                      batch_dim=batch_dim, changes=changes, compile=compile,
                      weights=weights is not None,
                      example_inputs=example_inputs is not None)
    if confirm < 0:
        raise PlanError(f"{confirm} plans cannot be tried", where="parallelize: confirm",
                        fix="0 tries none, confirm=8 the best eight")
    doors.refuse_split(model)
    limits = _limits(constraints)
    given = None if plan is None and size > 1 else _read_plan(plan, place, limits)
    if plan is not None:
        honoured.tell_unused(place, limits, confirm, Constraints(), "a plan is given")
    elif given is not None:
        honoured.tell_unused(place, limits, confirm, honoured.done_alone(limits),
                             "there is one process")

    in_order = size == 1 and given is not None and given.num_micro_batches == 1

    def prepare(parallel: ParallelModel, call: Call, tensors: list[Tensor]) -> None:
        with untouched(device):
            def values_of(module: nn.Module) -> FullValues:
                return full_values(module, place, device, init_seed, weights)

            _take_up(parallel, call, tensors, given, _Request(
                limits, confirm, values_of(parallel.module), weights is None, changes, compiles))
            parallel.adopt_copies(values_of)

    def tracer_of(module: nn.Module) -> tracing.Tracer:
        own = tracing.tracer(module, device, loss_fn, (given or limits).precision,
                             limits.batch_statistics == "local", in_order=in_order)
        return tracing.once(own, place, module)

    parallel = ParallelModel(model, place, device, prepare, tracer_of(model), tracer_of, loss_fn,
                             outputs, watched, batch_dim, changes != "off")
    if size > 1:
        doors.expect_call(parallel)
    else:
        log.info("one process: training runs unsplit; start with torchrun to use more devices")
    if example_inputs is not None:
        args, kwargs = as_call(example_inputs)
        call, tensors, settle = parallel.same_batch.take(args, kwargs, model.training)
        settle()
        parallel.start(call, tensors)
    return parallel


def plan(
    model: nn.Module,
    example_inputs: Batch,
    cluster: offline.Where,
    *,
    global_batch_size: int | None = None,
    precision: Precision | None = None,
    constraints: Given = None,
    loss_fn: LossFn | None = None,
    batch_dim: int = 0,
) -> Result:
    """The fastest plan for machines that need not be here: `.plan`, and how it was found.

    Nothing is run and nothing started: the model may be on `meta`, `example_inputs` may be a batch
    of one row. `cluster` names machines ("16x8xH100"), describes them (a Cluster or the JSON file
    of one), or holds what was measured on them (from `measure`, or its file). `global_batch_size`
    is the number of rows of a step, by default those of `example_inputs`.
    """
    return _best(_cased(model, example_inputs, cluster, global_batch_size, precision, constraints,
                        loss_fn, batch_dim)[1])


def case(model: nn.Module, example_inputs: Batch, cluster: offline.Where, *,
         global_batch_size: int | None = None, precision: Precision | None = None,
         constraints: Given = None, loss_fn: LossFn | None = None, batch_dim: int = 0) -> Case:
    """The search that `plan` makes, kept so that `why` can repeat it with something changed."""
    return _cased(model, example_inputs, cluster, global_batch_size, precision, constraints,
                  loss_fn, batch_dim)[1]


def report(
    path: str | os.PathLike[str] | None,
    plan: Result | Plan | str | os.PathLike[str],
    model: nn.Module,
    example_inputs: Batch,
    cluster: offline.Where,
    *,
    measured: Timeline | None = None,
    global_batch_size: int | None = None,
    constraints: Given = None,
    loss_fn: LossFn | None = None,
    batch_dim: int = 0,
) -> story.Story:
    """A page about a plan on machines that need not be here (as in `plan`): its step, its memory,
    and what else was considered. `plan`: what `ap.plan` gave, or any plan. Without a `path` only
    what the page would tell is returned."""
    given = plan.plan if isinstance(plan, Result) else as_plan(plan)
    traced, asked = _cased(model, example_inputs, cluster, global_batch_size, given.precision,
                           constraints, loss_fn, batch_dim)
    found = plan if isinstance(plan, Result) else _beside(asked)
    whole, profile = given, asked.profile
    if found is None or given != found.plan:
        whole, profile = offline.profile_for(given, traced, asked.num_rows, cluster)
    told = story.told(whole, traced.graph, asked.num_rows, asked, found, measured, profile)
    if path is not None:
        page.write(told, path)
    return told


@overload
def simulate(plan: GivenPlan, model: nn.Module, example_inputs: Batch, cluster: offline.Where, *,
             changes: None = None, global_batch_size: int | None = None,
             loss_fn: LossFn | None = None, batch_dim: int = 0) -> Timeline: ...
@overload
def simulate(plan: None, model: nn.Module, example_inputs: Batch, cluster: offline.Where, *,
             changes: Changes, moving: changing.Moving | None = None,
             global_batch_size: int | None = None, precision: Precision | None = None,
             constraints: Given = None, loss_fn: LossFn | None = None,
             batch_dim: int = 0) -> changing.Replay: ...
def simulate(
    plan: GivenPlan,
    model: nn.Module,
    example_inputs: Batch,
    cluster: offline.Where,
    *,
    changes: Changes | None = None,
    moving: changing.Moving | None = None,
    global_batch_size: int | None = None,
    precision: Precision | None = None,
    constraints: Given = None,
    loss_fn: LossFn | None = None,
    batch_dim: int = 0,
) -> Timeline | changing.Replay:
    """One step under a plan, on machines that need not be here (as in `plan`).

    With `changes` (a History, or the file of one) and without a plan: a whole run on nodes that
    become slow, are lost, and return, under every policy of moving to another plan; `moving` says
    what a move costs.
    """
    if changes is not None:
        if plan is not None:
            raise PlanError("with changes, a run begins with the fastest plan", where="plan",
                            fix="leave out the plan, or the changes")
        limits, place = _limits(constraints, precision), offline.place_of(cluster)
        if not isinstance(place, Cluster):
            raise PlanError("changes are replayed by datasheets, and this was measured",
                            where="cluster", fix="describe the machines, or name them")
        history = files.checked(changes, History, "changes") if isinstance(
            changes, History) else files.load(changes, History)
        traced, num_rows = _traced(model, example_inputs, loss_fn, limits, global_batch_size,
                                   batch_dim)
        limits = honoured.possible(limits, traced, tell=True)
        price = files.checked(moving or changing.Moving(), changing.Moving, "moving")
        return changing.replay(traced, num_rows, place, limits, history, price)
    if moving or precision or constraints:
        raise PlanError("a plan says all of that itself", where="moving, precision, constraints",
                        fix="give them with changes only")
    given = as_plan(plan)
    traced, num_rows = _traced(model, example_inputs, loss_fn,
                               Constraints(precision=given.precision), global_batch_size,
                               batch_dim)
    whole, profile = offline.profile_for(given, traced, num_rows, cluster)
    return simulated(whole, traced.graph, profile, num_rows)


def measure(
    model: nn.Module,
    example_inputs: Batch,
    *,
    precision: Precision | None = None,
    constraints: Given = None,
    seconds: float = QUICK_S,
    loss_fn: LossFn | None = None,
    batch_dim: int = 0,
) -> measuring.Known:
    """Measure what planning for this model needs to know of the machines that torchrun started.
    With more `seconds` than usual, recomputing is measured even if no close plan does it."""
    limits, seconds = _limits(constraints, precision), files.checked(seconds, Seconds, "seconds")
    rank, size = world.start()
    place = world.World(rank, size)
    call, tensors = take_apart(*as_call(example_inputs), batch_dim)
    own = tracing.tracer(model, world.device(), loss_fn, limits.precision,
                         limits.batch_statistics == "local")
    call, tensors, traced = tracing.in_rows_or_one(tracing.once(own, place, model), model, call,
                                                   tensors, True, ("loss",))
    with untouched(world.device()):
        cluster = session.cluster_of(place, traced.graph)
        return measuring.measure(traced, call, tensors, dict(model.named_buffers()), place,
                                 world.device(), cluster, limits, seconds)


# --- what was given -------------------------------------------------------------------------------


def _traced(model: nn.Module, example: Batch, loss_fn: LossFn | None, limits: Constraints,
            num_rows: int | None, batch_dim: int) -> tuple[Traced, int]:
    """The model, and the rows of a step: as asked for, else those of the example."""
    if num_rows is not None:
        files.checked(num_rows, Count, "global_batch_size")
    call, tensors = take_apart(*as_call(example), batch_dim)
    if not isinstance(model, nn.Module):
        raise PlanError(f"{type(model).__name__} is no nn.Module", where="model")
    own = tracing.tracer(model, torch.device("cpu"), loss_fn, limits.precision,
                         limits.batch_statistics == "local")
    taken, _, traced = tracing.in_rows_or_one(own, model, call, tensors, True, ("loss",))
    return traced, 1 if taken.in_one_row else num_rows or call.num_rows


def _cased(model: nn.Module, example: Batch, cluster: offline.Where, num_rows: int | None,
           precision: Precision | None, constraints: Given, loss_fn: LossFn | None,
           batch_dim: int) -> tuple[Traced, Case]:
    """The model and the search that was asked for."""
    limits = _limits(constraints, precision)
    traced, rows = _traced(model, example, loss_fn, limits, num_rows, batch_dim)
    limits = honoured.possible(limits, traced, tell=True)
    known = offline.known_of(traced, rows, cluster, limits)
    return traced, Case(traced.graph, known.options, known.profile, rows, limits)


def _best(asked: Case) -> Result:
    known = measuring.Known(tuple(asked.options), asked.profile)
    return choose.best(asked.graph, known, asked.num_rows, asked.limits)


def _beside(asked: Case) -> Result | None:
    """What the search finds beside a plan that is given: it may be nothing."""
    try:
        return _best(asked)
    except SearchError as error:
        log.info("no other plan beside this one: %s", error)
        return None


def _read_plan(plan: GivenPlan, place: world.World, limits: Constraints) -> Plan:
    """A plan that fits the world, on every rank, or an error on every rank."""
    def read() -> Plan:
        chosen = honoured.unsplit(limits) if plan is None else as_plan(plan)
        check(chosen, place.size)
        return chosen

    return place.jointly(read)


def _limits(given: Given, precision: Precision | None = None) -> Constraints:
    """What is pinned, in its range; a precision that is asked for beside is pinned too."""
    limits = files.checked({} if given is None else given, Constraints, "constraints")
    if precision in (None, limits.precision):
        return limits
    if isinstance(given, Mapping) and "precision" in given:
        raise PlanError(f"{limits.precision} is pinned, and {precision!r} asked for",
                        where="constraints: precision", fix="say one of them")
    return files.checked(replace(limits, precision=precision), Constraints, "precision")


# --- from a plan to training ----------------------------------------------------------------------


class _Request(NamedTuple):
    """What `parallelize` was asked for, beside a plan."""

    limits: Constraints
    confirm: int
    source: FullValues  # of parameters
    own: bool  # they are those of the module
    changes: following.OnChange
    compile: bool


def _take_up(parallel: ParallelModel, call: Call, tensors: list[Tensor], given: Plan | None,
             asked: _Request) -> None:
    """Trace, plan, hand out the parameters, try the programs if shardings came with the plan."""
    try:
        buffers = dict(parallel.module.named_buffers())
        traced = tracing.for_batch(parallel.retrace, buffers, call, tensors, True,
                                   ("loss", *parallel.outputs))
    except TraceError as error:
        try:
            _untraced(parallel, given, asked, error, call, tensors)
            following.begin(parallel, asked.changes)
            return
        except (TraceError, PlanError) as refused:
            call, tensors, traced = tracing.in_one_row(
                parallel.retrace, parallel.module, call, tensors, True,
                ("loss", *parallel.outputs), error=refused)
            parallel.same_batch.one_row = True
    plan = _find(parallel, call, tensors, traced, asked) if given is None else shardings.agreed(
        parallel.world, given, traced, call.num_rows)
    if asked.compile or plan.compiled:
        plan = compiling.settled(parallel, plan, traced, call, tensors)
    if asked.own:
        parallel.first = first_step.of(parallel, traced, plan, call, tensors)
    parallel.adopt(plan, (traced, call, None), asked.source)
    if given is None or given.shardings:
        verify.probe(parallel, call, tensors)
    following.begin(parallel, asked.changes)
    if parallel.world.rank == 0:
        _tell(plan, traced, parallel)


def _untraced(parallel: ParallelModel, given: Plan | None, asked: _Request, error: TraceError,
              call: Call, tensors: list[Tensor]) -> None:
    """Replicas of the module as it is, or the reason why not."""
    if given is not None and any(len(r.stages) + len(r.stages[0].devices) > 2
                                 for r in given.replicas):
        others = "data parallelism (tp=1, pp=1) may take it"
        raise TraceError(error.what, where=error.where, fix=error.fix if others in error.fix
                         else "; or ".join(filter(None, (error.fix, others)))) from error
    place = parallel.world
    if given is None:
        done = replace(honoured.done_alone(asked.limits), dp=place.size, num_micro_batches=1,
                       recompute=False, grad_dtype="float32")
        honoured.tell_unused(place, asked.limits, asked.confirm, done, "the model cannot be traced")
    plan = given or replace(Plan.uniform(dp=place.size, precision=asked.limits.precision),
                            reason="it cannot be traced")
    fallback.adopt(parallel, plan, error, asked.source, call, tensors)


def _find(parallel: ParallelModel, call: Call, tensors: list[Tensor], traced: Traced,
          asked: _Request) -> Plan:
    """Measure and search; the best plans are tried if asked for."""
    place = parallel.world
    limits = honoured.possible(asked.limits, traced, tell=place.rank == 0)
    buffers = dict(parallel.module.named_buffers())
    found, known = choose.choose(traced, call, tensors, buffers, place, parallel.device, limits,
                                 max(KEPT, asked.confirm))
    for plan in (choice.plan for choice in found.choices):
        shardings.check(plan, traced)  # a plan from the cache is checked like any other file
    if asked.confirm > 0:
        found = confirmed(parallel, found, asked.confirm, traced, call, tensors)
    parallel.found = found
    parallel.case = Case(traced.graph, known.options, known.profile, call.num_rows, limits)
    if place.rank == 0:
        log.info("%s", summary(found))
    return found.plan


def _tell(plan: Plan, traced: Traced, parallel: ParallelModel) -> None:
    """Log what will run, and what cannot be split."""
    size = parallel.world.size
    log.log(logging.WARNING if plan.idle(size) else logging.INFO, "training with: %s",
            plan.describe(size))
    honoured.tell_precision(plan.precision, parallel.device)
    if len(plan.replicas) > 1 or plan.num_micro_batches > len(plan.replicas):
        if tested := traced.graph.tested:
            log.info("the batch is shared out, as few rows gave the same together and apart "
                     "(tested; no rule proves it for %s)", ", ".join(tested))
        if joined := traced.graph.coupled:
            log.info("replicas do together, for the rows of all: %s", ", ".join(joined))
        if local := traced.graph.local:
            log.warning("as batch_statistics is \"local\", %s sees the rows of one replica and "
                        "micro-batch only, so losses and gradients depend on the plan",
                        ", ".join(local))
    if plan.shardings and (ops := traced.graph.replicated_ops):
        log.info("whole on all ranks of a tensor group, as no rule splits them: %s", ", ".join(ops))
    whole = {own.kind for own in plan.shardings
             if not any("S" in text for text in own.ops.values())}
    if part := traced.graph.part_of(whole):
        log.log(logging.WARNING if part > MUCH else logging.INFO, "each rank of a tensor group "
                "computes all of %s (%.0f %% of the operations), as they have no dim to share or "
                "this is quicker", traced.graph.named(whole), 100 * part)
