"""Data parallelism on the untouched module, for a model that cannot be exported.

Every rank runs the module on its rows; the losses are weighed by what their mean is over, and the
gradients summed in flat buckets. It is not torch's DistributedDataParallel: that fails at two
forwards before one backward unless its graph is static, and then branches may not change; it has
no ranks without rows; and gradients are made here when forward is called, but belong into `.grad`
only at `backward()`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import PlanError, RunError, TraceError
from ..plan import Plan
from ..progress import warn
from ..shard.collectives import arrive
from ..trace.burnt import user_hooks
from ..trace.call import Call
from ..trace.form import Form, outputs_of
from . import left_behind, questions
from .grads_of_grads import OnceMore
from .handover import Upstream, check_alike, hand_over, promise
from .model import ParallelModel
from .nonfinite import Rows
from .randomness import dropout_apart
from .returned import returned
from .shared_out import MEAN, Place, Shares, grads_of, piece_of, tried
from .world import World

log = logging.getLogger("autopar_torch")
Grads = list[tuple[Tensor, Tensor | None]]  # of what


class _Given(NamedTuple):
    """What was given and requires a gradient, what of it this rank computes with, and whether that
    is its rows."""

    whole: Tensor
    own: Tensor
    has_rows: bool

    def widened(self, grad: Tensor | None, span: Rows) -> Tensor | None:
        """This rank's part of the gradient, in the size of the whole."""
        if grad is None or not self.has_rows:
            return grad
        full = torch.zeros_like(self.whole)
        full[slice(*span)] = grad
        return full


def adopt(parallel: ParallelModel, plan: Plan, error: TraceError,
          source: Callable[[str], Tensor | None], call: Call, tensors: list[Tensor]) -> None:
    """Train the module as it is, every rank on its rows; say why, on every rank."""
    reason = f"{error.what} ({error.where})"
    if parallel.world.size > 1:
        parallel.world.jointly(lambda: _refuse_whole_batch(parallel.module, reason))
    if any(t.is_meta for t in parallel.module.parameters()):
        raise PlanError("a model on meta cannot be trained untraced", where=reason,
                        fix="build it on a real device, or make forward traceable")
    for name, tensor in [*parallel.module.named_parameters(), *parallel.module.named_buffers()]:
        tensor.data = cast(Tensor, source(name))
    step = _Step(parallel, reason)
    step.shares(call, tensors)
    warn(log, "the model cannot be traced, so it trains with data parallelism on the untouched "
              "module. Reason: %s", reason)
    parallel.adopt_untraced(_plain(plan, parallel.outputs), reason, step)


def _refuse_whole_batch(model: nn.Module, reason: str) -> None:
    """Refuse what looks at the whole batch: on several ranks it would see only its rank's rows."""
    for name, module in model.named_modules():
        seen = [f"the hook {getattr(hook, '__qualname__', hook)}" for _, hook in user_hooks(module)]
        if isinstance(module, _BatchNorm) and module.training:
            seen.append(type(module).__name__)
        if seen:
            raise PlanError(
                f"{seen[0]} of {name or 'the model'} would see the rows of one rank only, as the "
                "model cannot be traced", where=reason,
                fix="take it out (a hook: return what it records as an output), make forward "
                "traceable, or train in one process",
            )


def _plain(plan: Plan, outputs: tuple[str, ...]) -> Plan:
    """The part of a plan that is done: replicas, each on its rows. What is dropped is logged."""
    alike = len({replica.num_micro_batches for replica in plan.replicas}) == 1
    replicas = tuple(
        replace(replica, num_micro_batches=1 if alike else replica.num_micro_batches,
                stages=tuple(replace(stage, recompute=False) for stage in replica.stages))
        for replica in plan.replicas
    )
    kept = replace(plan, replicas=replicas, zero=0, grad_dtype="float32")
    asked = {"zero": plan.zero, "grad_dtype": plan.grad_dtype != "float32", "outputs": outputs,
             "num_micro_batches, recompute": replicas != plan.replicas}
    if dropped := [name for name, wanted in asked.items() if wanted]:
        warn(log, "not honoured, as the model cannot be traced: %s", ", ".join(dropped))
    return kept


class _Step:
    """Forward and backward of this rank's rows."""

    def __init__(self, parallel: ParallelModel, reason: str) -> None:
        self.parallel, self.reason = parallel, reason
        self.known: dict[Any, Shares] = {}

    def shares(self, call: Call, tensors: list[Tensor]) -> Shares:
        """How results are joined: rank 0 tries it once for each kind of call, and all follow."""
        parallel = self.parallel
        if parallel.world.size == 1:
            return Shares()
        negative = [bool((t < 0).any()) for t in tensors if not t.is_floating_point()]
        key = str(call.spec), call.dtypes, call.rows_dims, tuple(negative), call.num_rows == 1
        if key not in self.known:
            found = parallel.world.by_first(Shares, lambda: tried(
                parallel.module, call, [t.detach() for t in tensors], parallel.loss_fn,
                parallel.device))
            if found.why_not:
                raise PlanError(
                    f"the batch cannot be shared out among replicas: {found.why_not}; the model "
                    "cannot be traced", where=self.reason,
                    fix="make forward traceable, let rows not depend on each other and the loss "
                    "be one mean (or sum) over rows or labels, say batch_dim= if rows do not come "
                    "first, or train in one process",
                ) from None
            self.known[key] = found
        return self.known[key]

    def __call__(self, call: Call, tensors: list[Tensor]) -> Any:
        parallel = self.parallel
        if not (parallel.training and torch.is_grad_enabled()):  # each rank runs the whole batch
            form, named = self._forward(call, tensors)
            return returned(named, form, call.num_rows, train=False)
        shares = self.shares(call, tensors)
        parallel.begin_step()
        if parallel.world.size == 1:
            return self._step(call, tensors, shares)
        with parallel.numbers.drawing(), dropout_apart(parallel.replica or 0):
            return self._step(call, tensors, shares)

    def _forward(self, call: Call, tensors: list[Tensor],
                 inside: bool = True) -> tuple[Form, dict[str, Tensor]]:
        device = self.parallel.device.type
        half = self.parallel.plan.precision == "bfloat16"
        with (torch.autocast(device, torch.bfloat16, enabled=half),
              call.surroundings(self.parallel.device)):
            return outputs_of(self.parallel.module, self.parallel.loss_fn, *call.rebuild(tensors),
                              inside)

    def _step(self, call: Call, tensors: list[Tensor], shares: Shares) -> Any:
        """A rank without rows runs one that does not count."""
        parallel = self.parallel
        rows = parallel.local_slice(call.num_rows)
        span = rows.start, rows.stop
        run = span if span[0] < span[1] else (0, 1)
        own = call.slice(tensors, *run)
        if parallel.world.size > 1:
            own = [t.detach().requires_grad_(t.requires_grad) for t in own]
        given = [_Given(t.view_as(t), part, has_rows) for t, part, has_rows in zip(
            tensors, own, call.rows, strict=True) if part.requires_grad]
        with questions.answered() as answers:
            form, named = self._forward(call, own, shares.inside)
        if shares.asks:
            questions.check_alike(parallel.world, answers if run == span else None, self.reason)
        left_behind.withhold(parallel.module, shares.left)
        form = shares.form(form, run[1] - run[0], call.num_rows)
        parallel.fingerprint_hash()  # as forward may have changed something
        wholes = iter(given)
        asked_with = [next(wholes).whole if part.requires_grad else whole
                      for whole, part in zip(tensors, own, strict=True)]
        if "loss" not in named:
            whole = self._outside(named, span, call, shares.places, given, asked_with)
            return returned(whole, form, call.num_rows, train=False)
        share = shares.count.share(tensors, span, call.num_rows) if run == span else 0.0
        loss = named["loss"] * share if share else torch.zeros_like(named["loss"])
        total, grads = self._summed(loss, self._grads([loss], None, given, span))
        parallel.non_finite.check(parallel.num_steps, parallel.replica, total,
                                  {span: loss} if share else {})
        again = OnceMore(parallel, call, asked_with, {"loss": total}).grads
        return returned({"loss": hand_over(parallel.anchor, total, grads, again)}, form,
                        call.num_rows, train=True)

    # --- a loss outside of the model ----------------------------------------------------------

    def _outside(self, named: dict[str, Tensor], span: Rows, call: Call,
                 places: dict[str, Place | None], given: list[_Given],
                 asked_with: list[Tensor]) -> dict[str, Tensor]:
        """Whole outputs. Their backward runs on the rows of each rank."""
        parallel, world, num_rows = self.parallel, self.parallel.world, call.num_rows
        if world.size == 1:
            return named
        self._check_joined(named, span, places)
        learning = [*self._params(), *(one.whole for one in given)]

        def finish(upstream: Upstream, more: bool) -> list[Tensor | None]:
            own = {n: piece_of(grad, places[n], span, num_rows) for n, grad in upstream.items()}
            with (parallel.turns.doing("backward"), torch.enable_grad(),
                  dropout_apart(parallel.replica or 0)):
                check_alike(world, upstream)
                mine = {n: grad.reshape(named[n].shape) for n, grad in own.items()
                        if grad is not None}
                found = self._grads([named[n] for n in mine], list(mine.values()), given, span,
                                    more)
                _, sums = self._summed(torch.zeros((), device=parallel.device), found)
            grads = {id(tensor): grad for tensor, grad in sums}
            return [grads.get(id(tensor)) for tensor in learning]

        whole = {name: _whole(world, x, places[name], span, num_rows) for name, x in named.items()}
        ends = {name: x for name, x in whole.items() if named[name].requires_grad}
        again = OnceMore(parallel, call, asked_with, ends).grads
        return {**whole, **promise(parallel.anchor, ends, learning, finish,
                                   again)} if ends else whole

    def _check_joined(self, named: dict[str, Tensor], span: Rows,
                      places: dict[str, Place | None]) -> None:
        """Whether the ranks return the same outputs, and it is known how to join them."""
        rows = max(1, span[1] - span[0])
        facts = sorted([n, str(_shape(x, places.get(n), rows, 1)), str(x.dtype),
                        str(x.requires_grad)] for n, x in named.items())
        if any(other != facts for other in self.parallel.world.everyones(facts, list[list[str]])):
            raise RunError("the replicas return outputs of other shapes or types", where="forward, "
                           "which cannot be traced", fix="let shapes of outputs not depend on the "
                           "values of the batch, or return a loss")
        if absent := [name for name in named if name not in places]:
            raise PlanError(f"the model returns no loss, and it could not be tried how the rows of "
                            f"its output {absent[0]} join", where=self.reason,
                            fix="return a scalar loss, or pass loss_fn=")

    # --- gradients ----------------------------------------------------------------------------

    def _params(self) -> list[Tensor]:
        return [p for p in self.parallel.module.parameters() if p.requires_grad]

    def _grads(self, ends: list[Tensor], upstream: list[Tensor] | None, given: list[_Given],
               span: Rows, keep: bool = False) -> Grads:
        """Those that this rank's rows make, of all that learns."""
        params = self._params()
        found = grads_of(ends, params, upstream, keep, [one.own for one in given])
        return [*zip(params, found, strict=False),
                *((one.whole, one.widened(grad, span))
                  for one, grad in zip(given, found[len(params):], strict=True))]

    def _summed(self, loss: Tensor, found: Grads) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The loss and the gradients of all ranks. A parameter that no rank used has none."""
        world = self.parallel.world
        used = torch.tensor([float(g is not None) for _, g in found], device=loss.device)
        kind = torch.promote_types(loss.dtype, torch.float32)
        sums = world.sum(torch.cat([loss.detach().reshape(1).to(kind), used.to(kind)]))
        pairs = [(p, torch.zeros_like(p) if g is None else g.to_dense())
                 for (p, g), seen in zip(found, sums[1:].tolist(), strict=True) if seen]
        return sums[0].clone(), pairs if world.size == 1 else self._sent(pairs)

    def _sent(self, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """One bucket is packed while those before it travel."""
        world, under_way = self.parallel.world, []
        for bucket in _buckets(pairs, self.parallel.plan.bucket_bytes):
            flat = torch.cat([grad.reshape(-1) for _, grad in bucket])
            under_way.append((bucket, flat, world.start_sum(flat, world.aside)))
        result = []
        for bucket, flat, works in under_way:
            arrive(works)
            pieces = flat.split([p.numel() for p, _ in bucket])
            result += [(p, piece.view(p.shape))
                       for (p, _), piece in zip(bucket, pieces, strict=True)]
        return result


def _buckets(pairs: list[tuple[Tensor, Tensor]],
             size: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Neighbours of one type; the last parameters come first."""
    bucket: list[tuple[Tensor, Tensor]] = []
    for param, grad in reversed(pairs):
        if bucket and (grad.dtype != bucket[0][1].dtype
                       or sum(g.nbytes for _, g in bucket) + grad.nbytes > size):
            yield bucket
            bucket = []
        bucket.append((param, grad))
    if bucket:
        yield bucket


def _shape(part: Tensor, place: Place | None, rows: int, num_rows: int) -> list[int]:
    """Of an output of `num_rows` rows, of which the part has `rows`."""
    shape = list(part.shape)
    if place not in (None, MEAN):
        shape[place.dim] = shape[place.dim] // rows * num_rows
    return shape


def _whole(world: World, part: Tensor, place: Place | None, span: Rows, num_rows: int) -> Tensor:
    """An output of all rows, on every rank."""
    if place == MEAN:
        own = piece_of(part.detach(), place, span, num_rows)
        return world.sum(torch.zeros_like(part) if own is None else own)
    kind = torch.uint8 if part.dtype == torch.bool else part.dtype
    shape = _shape(part, place, max(1, span[1] - span[0]), num_rows)
    whole = torch.zeros(shape, dtype=kind, device=part.device)
    if (own := piece_of(whole, place, span, num_rows)) is not None:
        own.copy_(part.detach().reshape(own.shape))
    return world.sum(whole).to(part.dtype)
