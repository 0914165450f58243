"""Whether the rows of a batch may be shared out among replicas of a module that is not traced, and
how what they make of them is joined.

The module itself runs on few rows of a batch, together and apart: losses and gradients, weighed by
a count that is looked for, have to add up; outputs have to lie one behind the other. Labels are
left out in unequal numbers on the way, so that a mean over labels is not taken for one over rows.
Where it keeps little in memory, it runs so on the whole batch, too. All is left as it was.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..errors import PlanError
from ..progress import warn
from ..trace.call import Call
from ..trace.form import Form, LossFn, Named, outputs_of
from . import left_behind, questions
from .copies import apart
from .labels import Labels
from .nonfinite import Rows
from .randomness import untouched

log = logging.getLogger("autopar_torch")
MOST_ROWS = 4
MOST_BYTES = 1 << 28  # that a trial on the whole batch keeps for its backward
# Of differences, by the type that all is computed in; losses may make float32 of float64, and some
# models run as they are only.
LIMIT = {torch.float64: 1e-5, torch.float32: 1e-3, None: 0.05}
FARTHEST = 1e-2  # of the largest gradient: below it, a parameter's is noise
IGNORED = (-100, -1, 0)  # labels that are usually left out, or padding, or what a mask leaves out


class MeanOver(Struct, frozen=True):
    """What a loss is a mean over: the entries of a tensor of the batch but for those `ignored`, the
    weights in a tensor of fractions, or without a tensor the rows. If it is `summed`: nothing."""

    tensor: int | None = None
    ignored: int = 0
    shifted: bool = False  # each position predicts the next: the first label is not used
    summed: bool = False

    def share(self, tensors: Sequence[Tensor], span: Rows, num_rows: int) -> float:
        """What the loss of these rows counts in that of all."""
        if self.summed:
            return 1.0
        if self.tensor is not None:
            labels = tensors[self.tensor]
            kept = labels[..., 1:] if self.shifted else labels
            kept = kept.double() if kept.is_floating_point() else kept != self.ignored
            own, every = torch.stack([kept[slice(*span)].sum(), kept.sum()]).tolist()
            if every:
                return float(own / every)
        return (span[1] - span[0]) / num_rows


class Place(Struct, frozen=True):
    """Where an output has the rows: in a dim, behind all else that was flattened into it (as
    sequences are that come first), or before."""

    dim: int
    behind: bool

    def opened(self, value: Tensor, rows: int) -> tuple[Tensor, int]:
        """A view of an output of so many rows where they have a dim of their own, and which."""
        inner = value.shape[self.dim] // rows
        sizes = (inner, rows) if self.behind else (rows, inner)
        return value.unflatten(self.dim, sizes), self.dim + self.behind


class Shares(Struct, frozen=True):
    """How results of parts of the rows join, or `why_not`."""

    why_not: str = ""
    count: MeanOver = MeanOver()
    places: dict[str, Place | None] = {}  # output -> where it has the rows; None: it has none
    inside: bool = True  # the first scalar that is returned is the loss
    growing: tuple[int, ...] = ()  # leaves of the form that are numbers in proportion to the rows
    unknown: tuple[int, ...] = ()  # and those that depend on them in another way
    left: tuple[str, ...] = ()  # attributes in which forward leaves something of the rows
    asks: bool = False  # whether Python asks for what is not of one row

    def form(self, form: Form, own_rows: int, num_rows: int) -> Form:
        """That of all rows, from that of a part."""
        leaves = list(form.leaves)
        for i in self.growing:
            leaves[i] = leaves[i] // own_rows * num_rows
        for i in self.unknown:
            leaves[i] = Named(f"number {i}")
        return replace(form, leaves=tuple(leaves))


NOWHERE = Place(-1, False)
MEAN = Place(-2, False)  # it is a mean over rows


class _Tried(NamedTuple):
    ends: dict[str, Tensor]
    state: dict[str, Tensor]  # parameters and buffers, as the run left them
    leaves: tuple[Any, ...]
    params: dict[str, nn.Parameter]
    left: dict[str, str]  # attributes, and what the run left there
    num_asked: int  # values that Python asked for


def tried(model: nn.Module, call: Call, tensors: list[Tensor], loss_fn: LossFn | None,
          device: torch.device) -> Shares:
    """What a trial on few rows finds. One row cannot be shared out, so all outputs are whole."""
    count = min(call.num_rows, MOST_ROWS)
    with untouched(device), torch.random.fork_rng(devices=[]):
        for dtype, limit in LIMIT.items():
            rows = _as_type(call.slice(tensors, 0, count), dtype)
            own = apart(model)
            trial = _RowsTrial(own.to(dtype) if dtype else own, call, loss_fn, device, limit)
            labels, kept = Labels(), list[int]()
            try:
                whole = _ran(trial, rows, labels, kept)
                if any(tensor._backward_hooks for tensor in whole.state.values()):
                    return Shares("forward registers hooks on parameters")
            except PlanError:
                raise
            except Exception as error:  # of the model, whatever it is
                if count < call.num_rows and trial.runs(_as_type(tensors, dtype)):
                    return Shares(f"{count} of {call.num_rows} rows alone do not run "
                                  f"({_said(error)})")
                log.debug("the model does not run on %d rows in %s: %s", count, dtype, error)
                continue
            if count == 1:
                return Shares(places=dict.fromkeys(whole.ends), inside="loss" in whole.ends)
            if all(end.isfinite().all() for end in whole.ends.values()):
                more = count < call.num_rows and sum(kept) * call.num_rows <= MOST_BYTES * count
                return trial.judged(rows, tensors, labels,
                                    [_as_type(tensors, dtype)] if more else [])
    if count > 1:
        warn(log, "whether rows depend on each other could not be tried on %d rows", count)
    return Shares()


def _ran(trial: _RowsTrial, rows: list[Tensor], labels: Labels, kept: list[int]) -> _Tried:
    """A run, and the bytes of each tensor that it keeps for its backward; torch.func has them not
    counted."""
    def keep(value: Tensor) -> Tensor:
        kept.append(value.nbytes if value.layout == torch.strided else 0)
        return value

    try:
        with labels, saved_tensors_hooks(keep, lambda value: value):
            return trial.run(rows)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        with labels:
            return trial.run(rows)


class _RowsTrial:
    """Runs of a copy of the model. Where it returns a loss, only this and its gradients count."""

    def __init__(self, model: nn.Module, call: Call, loss_fn: LossFn | None, device: torch.device,
                 limit: float) -> None:
        self.model, self.call, self.loss_fn, self.device = model, call, loss_fn, device
        self.limit = limit
        self.inside: bool | None = None  # as in the first run
        self.places: dict[str, Place | None] = {}
        self.growing, self.unknown, self.left = set[int](), set[int](), set[str]()
        self.asks = False

    def judged(self, rows: list[Tensor], tensors: list[Tensor], labels: Labels,
               more: list[list[Tensor]]) -> Shares:
        ends = self.run(rows).ends
        inside, numbers = "loss" in ends, any(not end.dim() for end in ends.values())
        ignored = sorted({*IGNORED, *labels.ignored})
        counts = list(_counts(self.call, rows, ignored)) if inside else [MeanOver(summed=True)]
        changed = [rows, [_far(t, r) for t, r in zip(rows, self.call.rows, strict=True)]]
        changed += _left_out(self.call, rows, tensors, ignored, labels) if numbers else []
        for given in (*changed, *more):
            why, counts = self._apart(given, counts)
            if why:
                return Shares(why)
        return Shares("", counts[0], self.places, inside, tuple(self.growing - self.unknown),
                      tuple(self.unknown), tuple(sorted(self.left)), self.asks)

    def runs(self, tensors: list[Tensor]) -> bool:
        try:
            self.run(tensors)
        except Exception as error:  # of the model, whatever it is
            log.debug("the model does not run: %s", error)
            return False
        return True

    def run(self, tensors: list[Tensor]) -> _Tried:
        """Every run begins alike: with the same buffers, attributes and numbers drawn."""
        model = apart(self.model)
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        before = left_behind.held(model)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        with (torch.enable_grad(), self.call.surroundings(self.device),
              questions.answered() as answers):
            form, named = outputs_of(model, self.loss_fn, *self.call.rebuild(tensors),
                                     self.inside)
        self.inside = "loss" in named
        return _Tried({"loss": named["loss"]} if "loss" in named else named,
                      {name: x for named in (model.named_buffers(), model.named_parameters())
                       for name, x in named if x.layout == torch.strided},
                      form.leaves,
                      {n: p for n, p in model.named_parameters() if p.requires_grad},
                      left_behind.left(before, model), len(answers))

    def _apart(self, tensors: list[Tensor], counts: list[MeanOver]) -> tuple[str, list[MeanOver]]:
        """The counts by which these rows join, or why there is none. They may have been changed to
        what the model does not know."""
        num_rows = next(len(t) for t, r in zip(tensors, self.call.rows, strict=True) if r)
        try:
            whole = self.run(tensors)
        except Exception as error:  # of the model, whatever it is
            log.debug("the model does not run on changed rows: %s", error)
            return "", counts
        if not all(end.isfinite().all() for end in whole.ends.values()):
            return "", counts
        for first in sorted({1, num_rows // 2}):
            spans = (0, first), (first, num_rows)
            try:
                parts = [self.run(self.call.slice(tensors, *span)) for span in spans]
            except Exception as error:  # of the model, whatever it is
                return f"{first} of {num_rows} rows alone do not run ({_said(error)})", []
            for n, kept in whole.state.items():
                if not all(torch.allclose(kept, p.state[n], self.limit, self.limit, True)
                           for p in parts):
                    kind = "parameter" if isinstance(kept, nn.Parameter) else "buffer"
                    return f"the {kind} {n} would record the rows of one rank only", []
            self.asks |= questions.of_all_rows(whole.num_asked, [p.num_asked for p in parts])
            self.left |= left_behind.of_rows([run.left for run in (whole, *parts)])
            if why := self._joined_numbers([whole, *parts], spans):
                return why, []
            why, counts = (self._joined_loss(whole, parts, tensors, spans, counts)
                           if "loss" in whole.ends else
                           (self._joined_outputs(whole, parts, spans), counts))
            if why:
                return why, []
        return "", counts

    def _joined_numbers(self, runs: list[_Tried], spans: tuple[Rows, Rows]) -> str:
        """Numbers that are returned as such: equal, growing with the rows, or not known of all."""
        if len({len(run.leaves) for run in runs}) > 1:
            return "the model returns something else for other rows"
        sizes = [spans[1][1], *(end - start for start, end in spans)]
        for i, values in enumerate(zip(*(run.leaves for run in runs), strict=True)):
            if all(value == values[0] for value in values):
                continue
            grows = all(type(value) is int and value * sizes[0] == values[0] * size
                        for value, size in zip(values, sizes, strict=True))
            (self.growing if grows else self.unknown).add(i)
        return ""

    def _joined_loss(self, whole: _Tried, parts: list[_Tried],
                     tensors: list[Tensor], spans: tuple[Rows, Rows],
                     counts: list[MeanOver]) -> tuple[str, list[MeanOver]]:
        by_shares: dict[tuple[float, ...], list[MeanOver]] = {}
        for count in counts:
            shares = tuple(count.share(tensors, span, spans[1][1]) for span in spans)
            by_shares.setdefault(shares, []).append(count)
        want = {"the loss": whole.ends["loss"].detach()} | _grads(whole)
        own = [{"the loss": part.ends["loss"].detach()} | _grads(part) for part in parts]
        whys = {shares: _differs(want, own, shares, self.limit) for shares in by_shares}
        kept = [count for count in counts for shares, why in whys.items()
                if not why and count in by_shares[shares]]
        return ("" if kept else next(iter(whys.values()))), kept

    def _joined_outputs(self, whole: _Tried, parts: list[_Tried],
                        spans: tuple[Rows, Rows]) -> str:
        """Outputs and the gradients of a number made of all of them."""
        upstream, own = dict[str, Tensor](), [dict[str, Tensor](), dict[str, Tensor]()]
        for name, end in whole.ends.items():
            place = _place(end, [part.ends[name] for part in parts], spans, self.limit)
            if place == NOWHERE or self.places.setdefault(name, place) != place:
                return f"the output {name} of rows together is not that of the rows apart"
            if not end.requires_grad:
                continue
            upstream[name] = torch.randn_like(end)
            for part, values, span in zip(own, parts, spans, strict=True):
                piece = piece_of(upstream[name], place, span, spans[1][1])
                part[name] = (torch.zeros_like(end) if piece is None
                              else piece.reshape(values.ends[name].shape))
        grads = [_grads(part, given) for part, given in zip(parts, own, strict=True)]
        return _differs(_grads(whole, upstream), grads, (1.0, 1.0), self.limit)


def _as_type(tensors: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    return [t.to(dtype) if dtype and t.is_floating_point() else t for t in tensors]


def _grads(run: _Tried, upstream: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    live = [name for name, end in run.ends.items() if end.requires_grad]
    found = grads_of([run.ends[name] for name in live], list(run.params.values()),
                     [upstream[name] for name in live] if upstream else None, keep=True)
    return {f"the gradient of {n}": torch.zeros_like(p) if g is None else g.to_dense()
            for (n, p), g in zip(run.params.items(), found, strict=True)}


def grads_of(ends: list[Tensor], params: Sequence[Tensor], upstream: list[Tensor] | None,
             keep: bool = False, given: Sequence[Tensor] = ()) -> list[Tensor | None]:
    """Gradients of parameters, also those that a backward inside of a backward (of a reversible
    block) adds to one by itself; and of what was given."""
    if not (params or given) or not any(end.requires_grad for end in ends):
        return [None] * (len(params) + len(given))
    before = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        found = torch.autograd.grad(ends, [*params, *given], upstream, retain_graph=keep,
                                    allow_unused=True)
        sums = (g if p.grad is None else p.grad if g is None else g + p.grad
                for p, g in zip(params, found, strict=False))
        return [*sums, *found[len(params):]]
    finally:
        for p, grad in zip(params, before, strict=True):
            p.grad = grad


def _far(value: Tensor, has_rows: bool) -> Tensor:
    """Rows that differ in size: what looks at the largest of all shows."""
    if not has_rows or not value.is_floating_point():
        return value
    size = torch.arange(1, len(value) + 1, dtype=value.dtype, device=value.device)
    return value * size.view(-1, *[1] * (value.dim() - 1))


def _counts(call: Call, rows: list[Tensor], ignored: Iterable[int]) -> Iterator[MeanOver]:
    """What a mean may be over, the likeliest first."""
    yield MeanOver()
    yield MeanOver(summed=True)
    for i, (values, has_rows) in enumerate(zip(rows, call.rows, strict=True)):
        for value in ([0] if values.is_floating_point() else ignored) if has_rows else ():
            yield MeanOver(i, value)
            if values.dim() > 1:
                yield MeanOver(i, value, shifted=True)


def _left_out(call: Call, rows: list[Tensor], tensors: list[Tensor], ignored: list[int],
              labels: Labels) -> Iterator[list[Tensor]]:
    """The same rows, where half of the labels of one are left out. It is done with the labels of a
    cross-entropy, with values that the batch has anyway, and with zeros: others may be looked up
    in a table, which on a GPU ends the process."""
    for i, (values, has_rows) in enumerate(zip(rows, call.rows, strict=True)):
        mask = bool(((values == 0) | (values == 1)).all())
        if not has_rows or (values.is_floating_point() and not mask):
            continue
        target = (not any(torch.equal(values, x) for x in labels.indices)
                  and any(_alike(values, x, ignored) for x in labels.targets))
        for value in ignored:
            known = value == 0 or (target and value in labels.ignored)
            if known or bool((tensors[i] == value).any()):
                changed = values.clone(memory_format=torch.contiguous_format)
                flat = changed.view(len(changed), -1)
                flat[1, flat.shape[1] // 2:] = value
                yield [*rows[:i], changed, *rows[i + 1:]]


def _alike(values: Tensor, target: Tensor, ignored: list[int]) -> bool:
    """Whether a cross-entropy had these labels, in whatever order."""
    left_out = torch.tensor(ignored, device=target.device)
    kept = [x[~torch.isin(x, left_out)].flatten().sort().values
            for x in (target.long(), values.long(), values[..., 1:].long())]
    return torch.equal(kept[0], kept[1]) or torch.equal(kept[0], kept[2])


def piece_of(whole: Tensor, place: Place | None, span: Rows, num_rows: int) -> Tensor | None:
    """What these rows make of an output, a view where they are a part of it; what has no rows is
    made of the first."""
    if span[0] == span[1]:
        return None
    if place is None:
        return whole if span[0] == 0 else None
    if place == MEAN:
        return whole * ((span[1] - span[0]) / num_rows)
    opened, dim = place.opened(whole, num_rows)
    return opened.narrow(dim, span[0], span[1] - span[0])


def _place(whole: Tensor, parts: list[Tensor], spans: tuple[Rows, Rows],
           limit: float) -> Place | None:
    def near(a: Tensor, b: Tensor) -> bool:
        size = float(whole.detach().double().abs().max()) if whole.numel() else 0.0
        return torch.allclose(a.double(), b.double(), limit, limit * size)

    num_rows = spans[1][1]
    if not whole.dim() and whole.is_floating_point():
        first, last = (part * ((b - a) / num_rows)
                       for part, (a, b) in zip(parts, spans, strict=True))
        return MEAN if near(first + last, whole) else NOWHERE
    if all(part.shape == whole.shape and near(part, whole) for part in parts):
        return None
    for dim, size in enumerate(whole.shape):
        shapes = [(*whole.shape[:dim], size // num_rows * (b - a), *whole.shape[dim + 1:])
                  for a, b in spans]
        if size % num_rows or shapes != [tuple(part.shape) for part in parts]:
            continue
        for place in (Place(dim, False), Place(dim, True)):
            pieces = [piece_of(whole, place, span, num_rows) for span in spans]
            if all(piece is not None and near(piece.reshape(part.shape), part)
                   for piece, part in zip(pieces, parts, strict=True)):
                return place
    return NOWHERE


def _said(error: Exception) -> str:
    return str(error)[:80] or type(error).__name__


def _differs(want: dict[str, Tensor], parts: list[dict[str, Tensor]], shares: tuple[float, ...],
             limit: float) -> str:
    """Which of these numbers the weighed parts do not add up to."""
    largest = max((float(g.abs().max()) for g in want.values() if g.dim() and g.numel()),
                  default=0.0)
    for name, value in want.items():
        if not value.numel():
            continue
        total = sum(share * part[name] for share, part in zip(shares, parts, strict=True) if share)
        size = max(float(value.abs().max()),
                   0.0 if name == "the loss" else FARTHEST * largest)
        if not float((total - value).abs().max()) <= limit * size:  # also where it is no number
            return f"{name} of rows together is not that of the rows apart"
    return ""
