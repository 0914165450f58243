"""The story: parallelize a model, from call to training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn

from . import files
from .errors import AutoparError, PlanError, TraceError
from .guards import Guards
from .limits import Count, Seconds
from .plan import Plan, Precision, check, fit, load_plan
from .profile import QUICK_S
from .run import (
    agree,
    choose,
    doors,
    fallback,
    observe,
    offline,
    shardings,
    survey,
    tracing,
    verify,
    world,
)
from .run.confirm import confirmed
from .run.materialize import full_values
from .run.model import ParallelModel
from .run.randomness import untouched
from .search.best import KEPT, Outcome
from .search.explain import summary
from .search.space import Constraints
from .search.why import Case
from .simulate import simulate as simulated
from .timeline import Timeline
from .trace import Traced
from .trace.call import Call, take_apart
from .trace.form import LossFn

log = logging.getLogger("autopar_torch")
FIELDS = Constraints.__struct_fields__
GivenPlan = Plan | str | os.PathLike[str] | None
Source = Callable[[], Callable[[str], Tensor | None]]


def parallelize(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    plan: GivenPlan = None,
    constraints: Constraints | Mapping[str, Any] | None = None,
    confirm: int = 0,
    loss_fn: LossFn | None = None,
    outputs: Sequence[str] = (),
    init_seed: int = 0,
    weights: str | os.PathLike[str] | None = None,
    guards: Guards | Mapping[str, Any] | None = None,
) -> ParallelModel:
    """The one new line: the model, trained on everything that torchrun started.

    Tracing and planning happen at the first batch, or at once with `example_inputs` (a global
    batch, as the model will be called with). `plan` is a Plan or the file of one. Without it the
    machines are measured (once: profiles are kept) and the fastest plan that fits is searched for,
    within `constraints` (like `{"tp": 2}`, see Constraints); `confirm=k` tries the best k for a few
    real steps first. `loss_fn(output, target)` serves models that return no loss: pass `target=`
    with the batch. `outputs` names what else to return besides the loss.
    A model built on `meta` is filled part by part, from `weights` (a safetensors file or folder, or
    a checkpoint folder) or from its own initialisation with `init_seed`. `guards` says what is
    watched while training (see Guards).
    """
    rank, size = world.start()
    device = world.device()
    watched = files.checked({} if guards is None else guards, Guards, "guards")
    place = world.World(rank, size, watched.timeout_s)
    plan = plan or os.environ.get("AUTOPAR_PLAN")  # `autopar run --plan`
    agree.check_start(place, model, device, plan, constraints=constraints, confirm=confirm,
                      loss_fn=loss_fn, outputs=outputs, init_seed=init_seed, guards=guards,
                      weights=weights is not None,
                      example_inputs=example_inputs is not None)  # fmt: skip
    if confirm < 0:
        raise PlanError(f"{confirm} plans cannot be tried", where="parallelize: confirm",
                        fix="0 tries none, confirm=8 the best eight")  # fmt: skip
    doors.refuse_split(model)
    limits = _limits(constraints)
    given = None if plan is None and size > 1 else _read_plan(plan, size, place, limits)
    if given is not None and rank == 0:
        alone = plan is None
        _tell_unused(limits, confirm, _done_alone(limits) if alone else Constraints(),
                     "there is one process" if alone else "a plan is given")  # fmt: skip

    def prepare(parallel: ParallelModel, call: Call, tensors: list[Tensor]) -> None:
        source = lambda: full_values(model, place, device, init_seed, weights)  # noqa: E731
        with untouched(device):
            if given is None:
                _find(parallel, call, tensors, limits, confirm, loss_fn, source)
            else:
                _adopt(parallel, call, tensors, given, loss_fn, source)

    parallel = ParallelModel(model, place, device, prepare, outputs, watched)
    own = tracing.tracer(model, device, loss_fn, (given or limits).precision)
    parallel.retrace = tracing.once(own, place)
    if size == 1:
        log.info("one process: training runs unsplit; start with torchrun to use more devices")
    if example_inputs is not None:
        args, kwargs = _as_call(example_inputs)
        call, tensors, settle = parallel.same_batch.take(args, kwargs, model.training)
        settle()
        parallel.start(call, tensors)
    return parallel


def plan(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    cluster: offline.Where,
    *,
    global_batch_size: int | None = None,
    precision: Precision | None = None,
    constraints: Constraints | Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
) -> Outcome:
    """The fastest plan for machines that need not be here: `.plan`, and how it was found.

    Nothing is run and nothing started: the model may be on `meta`, `example_inputs` may be a batch
    of one row. `cluster` names machines ("16x8xH100"), describes them (a Cluster or the JSON file
    of one), or holds what was measured on them (from `measure`, or its file). `global_batch_size`
    is the number of rows of a step, by default those of `example_inputs`.
    """
    asked = case(model, example_inputs, cluster, global_batch_size=global_batch_size,
                 precision=precision, constraints=constraints, loss_fn=loss_fn)  # fmt: skip
    known = survey.Known(tuple(asked.options), asked.profile)
    return choose.best(asked.graph, known, asked.num_rows, asked.limits)


def case(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    cluster: offline.Where,
    *,
    global_batch_size: int | None = None,
    precision: Precision | None = None,
    constraints: Constraints | Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
) -> Case:
    """What `plan` searches, so that it can be asked why, and what if."""
    limits = _limits(constraints, precision)
    asked_rows = _asked_rows(global_batch_size)
    traced, call = _traced(model, example_inputs, loss_fn, limits.precision)
    limits = _uncoupled(limits, traced, tell=True)
    num_rows = asked_rows or call.num_rows
    known = offline.known_of(traced, num_rows, cluster, limits)
    return Case(traced.graph, known.options, known.profile, num_rows, limits)


def simulate(
    plan: GivenPlan,
    model: nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    cluster: offline.Where,
    *,
    global_batch_size: int | None = None,
    loss_fn: LossFn | None = None,
) -> Timeline:
    """One step under a plan, on machines that need not be here (as in `plan`)."""
    given, asked_rows = _given(plan), _asked_rows(global_batch_size)
    traced, call = _traced(model, example_inputs, loss_fn, given.precision)
    num_rows = asked_rows or call.num_rows
    whole, profile = offline.profile_for(given, traced, num_rows, cluster)
    return simulated(whole, traced.graph, profile, num_rows)


def measure(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    *,
    constraints: Constraints | Mapping[str, Any] | None = None,
    seconds: float = QUICK_S,
    loss_fn: LossFn | None = None,
) -> survey.Known:
    """What planning for this model needs to know of the machines torchrun started. With more
    `seconds` than usual, of recomputing too where no plan that may be the fastest does it."""
    limits, seconds = _limits(constraints), files.checked(seconds, Seconds,
                                                          "seconds")  # fmt: skip
    rank, size = world.start()
    place = world.World(rank, size)
    call, tensors = take_apart(*_as_call(example_inputs))
    own = tracing.tracer(model, world.device(), loss_fn, limits.precision)
    traced = tracing.once(own, place)(call, True, ("loss",))
    with untouched(world.device()):
        return survey.measure(traced, call, tensors, dict(model.named_buffers()), place,
                              world.device(), observe.cluster_of(place), limits,
                              seconds)  # fmt: skip


def _traced(model: nn.Module, example: Mapping[str, Any] | Sequence[Any], loss_fn: LossFn | None,
            precision: Precision) -> tuple[Traced, Call]:  # fmt: skip
    call, _ = take_apart(*_as_call(example))
    if not isinstance(model, nn.Module):
        raise PlanError(f"{type(model).__name__} is no nn.Module", where="model")
    own = tracing.tracer(model, torch.device("cpu"), loss_fn, precision)
    return own(call, True, ("loss",)), call


def _as_call(example: Mapping[str, Any] | Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping) and all(isinstance(name, str) for name in example):
        return (), dict(example)
    if not isinstance(example, (Tensor, Sequence)) or isinstance(example, (str, bytes)):
        raise PlanError(f"{type(example).__name__} is no batch", where="example_inputs",
                        fix="give a tensor, a tuple of them, or a dict by name")  # fmt: skip
    return ((example,) if isinstance(example, Tensor) else tuple(example)), {}


def _read_plan(plan: GivenPlan, size: int, place: world.World, limits: Constraints) -> Plan:
    """A plan that fits the world, on every rank, or an error on every rank."""
    error: Exception | None = None
    chosen = None
    try:
        chosen = _unsplit(limits) if plan is None else _given(plan)
        check(chosen, size)
    except AutoparError as found:
        error = found
    place.together(error)
    return cast(Plan, chosen)


def _given(plan: GivenPlan) -> Plan:
    """A plan, or that of a file, let in by one door."""
    if isinstance(plan, Plan):
        return files.checked(plan, Plan, "plan")
    if not isinstance(plan, (str, os.PathLike)):
        raise PlanError(f"{type(plan).__name__} is no plan", where="plan",
                        fix="give a Plan or the path of the file of one")  # fmt: skip
    return load_plan(plan)


def _asked_rows(asked: int | None) -> int | None:
    """A global batch size within its range; None: that of the example."""
    if asked is None:
        return None
    return files.checked(asked, Count, "global_batch_size")


def _unsplit(limits: Constraints) -> Plan:
    """What one process does of what was asked for."""
    plan = Plan.uniform(num_micro_batches=limits.num_micro_batches or 1,
                        recompute=bool(limits.recompute), precision=limits.precision,
                        grad_dtype=limits.grad_dtype)  # fmt: skip
    return msgspec.structs.replace(plan, reason="one process")


def _done_alone(limits: Constraints) -> Constraints:
    """What `_unsplit` does of what was asked."""
    return msgspec.structs.replace(limits, tp=1, pp=1, dp=1, zero=0, memory_bytes=None,
                                   rings="never")  # fmt: skip


def _tell_unused(limits: Constraints, confirm: int, done: Constraints, why: str) -> None:
    """Say what was asked of a search that does not take place, and is not done all the same."""
    usual = Constraints()
    names = [n for n in FIELDS if getattr(limits, n) not in (getattr(usual, n), getattr(done, n))]
    names += ["confirm"] if confirm else []
    if names:
        log.warning("not honoured, as %s: %s", why, ", ".join(names))


def _limits(given: Constraints | Mapping[str, Any] | None,
            precision: Precision | None = None) -> Constraints:  # fmt: skip
    """What is pinned, in its range; a precision that is asked for beside is the one pinned."""
    if isinstance(given, Mapping):
        given = dict(given)
        if precision is not None and given.setdefault("precision", precision) != precision:
            raise PlanError(f"{given['precision']!r} is pinned, and {precision!r} asked for",
                            where="constraints: precision", fix="say one of them")  # fmt: skip
    limits = Constraints() if given is None else files.checked(given, Constraints, "constraints")
    if precision is None:
        return limits
    return files.checked(msgspec.structs.replace(limits, precision=precision), Constraints,
                         "precision")  # fmt: skip


def _find(parallel: ParallelModel, call: Call, tensors: list[Tensor], limits: Constraints,
          confirm: int, loss_fn: LossFn | None, source: Source) -> None:  # fmt: skip
    """Trace, measure, search, and take up what was found."""
    place = parallel.world
    try:
        traced = cast(Any, parallel.retrace)(call, True, ("loss", *parallel.outputs))
    except TraceError as reason:
        equal = msgspec.structs.replace(Plan.uniform(dp=place.size), reason="it cannot be traced")
        if place.rank == 0:
            done = msgspec.structs.replace(
                _done_alone(limits), dp=place.size, num_micro_batches=1, recompute=False,
                precision="float32")  # fmt: skip
            _tell_unused(limits, confirm, done, "the model cannot be traced")
        fallback.adopt(parallel, equal, reason, loss_fn, source())
        return
    limits = _uncoupled(limits, traced, tell=place.rank == 0)
    buffers = dict(parallel.module.named_buffers())
    kept = max(KEPT, confirm)
    found = choose.choose(traced, call, tensors, buffers, place, parallel.device, limits, kept)
    for plan in (found.plan, *(c.plan for c in found.others)) if found.recalled else ():
        verify.check(plan, traced)
    if confirm > 0:
        found = confirmed(parallel, found, confirm, traced, call, tensors)
    parallel.found = found
    parallel.adopt(found.plan, traced, call, source())
    if found.recalled:
        verify.probe(parallel, call, tensors)
    if place.rank == 0:
        log.info("%s", summary(found))
        _tell(found.plan, traced)


def _adopt(parallel: ParallelModel, call: Call, tensors: list[Tensor], given: Plan,
           loss_fn: LossFn | None, source: Source) -> None:  # fmt: skip
    """Trace, fit the plan, agree on it, and hand out the parameters."""
    place, traced = parallel.world, None
    error: AutoparError | None = None
    plan = given
    try:
        traced = cast(Any, parallel.retrace)(call, True, ("loss", *parallel.outputs))
        plan = fit(given, traced.graph)
        _check_rows(plan, traced)
        rows = max(1, call.num_rows // plan.num_micro_batches)
        plan = shardings.complete(plan, traced, rows)
        verify.check(plan, traced)
    except TraceError as found:
        if _is_pure_data(given):
            fallback.adopt(parallel, given, found, loss_fn, source())
            return
        found.fix += "; or use a plan of data parallelism only (tp=1, pp=1)"
        error = found
    except AutoparError as found:
        error = found
    place.together(error)
    plan = files.decode(place.agree(files.encode(plan)), Plan)
    parallel.adopt(plan, cast(Traced, traced), call, source())
    if given.shardings:
        verify.probe(parallel, call, tensors)
    if place.rank == 0:
        _tell(plan, cast(Traced, traced))


def _tell(plan: Plan, traced: Traced) -> None:
    """Say what will run, and what of it was asked for in vain."""
    log.info("plan: %s", plan.describe())
    if plan.shardings and traced.graph.replicated_ops:
        log.info("whole on every rank of a tensor group, as no rule splits them: %s",
                 ", ".join(traced.graph.replicated_ops))  # fmt: skip
    for sharding in plan.shardings:
        if not any("S" in text for text in sharding.ops.values()):
            log.warning("%s has no dim that %s devices can share, so each computes all of it",
                        sharding.kind, "x".join(map(str, sharding.mesh)))  # fmt: skip


def _check_rows(plan: Plan, traced: Traced) -> None:
    """Ops that look at several rows at once allow replicas only where we can join them."""
    coupled = set(traced.graph.coupled)
    split = plan.num_micro_batches > 1
    if split and coupled - {"batch_norm"}:
        raise PlanError(
            f"{', '.join(sorted(coupled))} looks at several rows of the batch at once, so the "
            "batch cannot be shared out",
            where="Plan.replicas", fix="use one replica (dp=1) and num_micro_batches=1",
        )  # fmt: skip


def _uncoupled(limits: Constraints, traced: Traced, *, tell: bool) -> Constraints:
    """One replica where ops look at several rows at once, whatever was asked for."""
    coupled = sorted(set(traced.graph.coupled) - {"batch_norm"})
    if not coupled:
        return limits
    if tell and limits.dp not in (None, 1):
        log.warning("not honoured: dp=%d, as %s looks at several rows of the batch at once",
                    limits.dp, ", ".join(coupled))  # fmt: skip
    return msgspec.structs.replace(limits, dp=1)


def _is_pure_data(plan: Plan) -> bool:
    return all(len(r.stages) == 1 and len(r.stages[0].devices) == 1 for r in plan.replicas)
