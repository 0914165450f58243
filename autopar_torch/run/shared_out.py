"""Whether the rows of a batch may be shared out among replicas of a module that is not traced, and
how what they make of them is joined.

The module itself runs on few rows of a batch, together and apart: losses and gradients, weighed by
a count that is looked for, have to add up; outputs have to lie one behind the other. Labels are
left out in unequal numbers on the way, so that a mean over labels is not taken for one over rows.
Parameters, buffers and random numbers are left as they were.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..trace.call import Call
from ..trace.form import LossFn, outputs_of
from .randomness import untouched

log = logging.getLogger("autopar_torch")
MOST_ROWS = 4
LIMIT = {torch.float64: 1e-6, torch.float32: 1e-3}
FARTHEST = 1e-2  # of the largest gradient: below it, a parameter's is noise
IGNORED = (-100, -1, 0)  # labels that are usually left out, or padding, or what a mask leaves out
Span = tuple[int, int]


class Count(Struct, frozen=True):
    """What a loss is a mean over: the entries of a tensor of the batch but for those `ignored`, or
    without a tensor the rows. If it is `summed`, over nothing."""

    tensor: int | None = None
    ignored: int = 0
    shifted: bool = False  # each position predicts the next: the first label is not used
    summed: bool = False

    def share(self, tensors: Sequence[Tensor], span: Span, num_rows: int) -> float:
        """What the loss of these rows counts in that of all."""
        if self.summed:
            return 1.0
        if self.tensor is not None:
            labels = tensors[self.tensor]
            kept = (labels[..., 1:] if self.shifted else labels) != self.ignored
            own, every = torch.stack([kept[slice(*span)].sum(), kept.sum()]).tolist()
            if every:
                return float(own / every)
        return (span[1] - span[0]) / num_rows


class Shares(Struct, frozen=True):
    """How results of parts of the rows join, or `why_not`."""

    why_not: str = ""
    count: Count = Count()
    dims: dict[str, int | None] = {}  # output -> where it has the rows; None: it has none


class _Tried(NamedTuple):
    ends: dict[str, Tensor]
    buffers: dict[str, Tensor]  # as the run left them


class _Labels(TorchDispatchMode):
    """Sees the labels of cross-entropies, and what is looked up in tables."""

    def __init__(self) -> None:
        super().__init__()
        self.targets, self.indices, self.ignored = list[Tensor](), list[Tensor](), set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("nll_loss_forward", "nll_loss2d_forward"):
            self.targets.append(args[1].detach().clone())
            self.ignored.add(int(args[4]))
        elif name == "embedding":
            self.indices.append(args[1].detach().clone())
        return func(*args, **(kwargs or {}))


def tried(model: nn.Module, call: Call, tensors: list[Tensor], loss_fn: LossFn | None,
          device: torch.device) -> Shares:
    """What a trial on few rows finds. One row cannot be shared out, so all outputs are whole."""
    count = min(call.num_rows, MOST_ROWS)
    with untouched(device), torch.random.fork_rng(devices=[]):
        for dtype, limit in LIMIT.items():
            rows = [t.to(dtype) if t.is_floating_point() else t
                    for t in call.slice(tensors, 0, count)]
            try:
                trial = _Trial(copy.deepcopy(model).to(dtype), call, loss_fn, device, limit)
                labels = _Labels()
                with labels:
                    whole = trial.run(rows)
            except Exception as error:  # of the model, whatever it is
                log.debug("the model does not run on %d rows in %s: %s", count, dtype, error)
                continue
            if count == 1:
                return Shares(dims=dict.fromkeys(whole.ends))
            if all(end.isfinite().all() for end in whole.ends.values()):
                return trial.judged(rows, tensors, labels)
    if count > 1:
        log.warning("whether rows depend on each other could not be tried on %d rows", count)
    return Shares()


class _Trial:
    """Runs of a copy of the model. Where it returns a loss, only this and its gradients count."""

    def __init__(self, model: nn.Module, call: Call, loss_fn: LossFn | None, device: torch.device,
                 limit: float) -> None:
        self.model, self.call, self.loss_fn, self.device = model, call, loss_fn, device
        self.limit = limit
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.dims: dict[str, int | None] = {}

    def judged(self, rows: list[Tensor], tensors: list[Tensor], labels: _Labels) -> Shares:
        inside = "loss" in self.run(rows).ends
        ignored = sorted({*IGNORED, *labels.ignored})
        counts = list(_counts(self.call, rows, ignored)) if inside else [Count(summed=True)]
        changed = [rows, [_far(t, r) for t, r in zip(rows, self.call.rows, strict=True)]]
        changed += _left_out(self.call, rows, tensors, ignored, labels) if inside else []
        for number, given in enumerate(changed):
            why, counts = self._apart(given, counts, must=number < 2)
            if why:
                return Shares(why)
        return Shares(count=counts[0], dims=self.dims)

    def run(self, tensors: list[Tensor]) -> _Tried:
        model = self.model
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        drops = {m: m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)}
        for module in drops:
            module.p = 0.0
        torch.manual_seed(0)
        try:
            with torch.enable_grad(), self.call.surroundings(self.device):
                _, named = outputs_of(model, self.loss_fn, *self.call.rebuild(tensors))
            left = {name: value.clone() for name, value in model.named_buffers()}
        finally:
            for module, chance in drops.items():
                module.p = chance
            with torch.no_grad():
                for name, value in model.named_buffers():
                    value.copy_(buffers[name])
        return _Tried({"loss": named["loss"]} if "loss" in named else named, left)

    def _apart(self, tensors: list[Tensor], counts: list[Count],
               must: bool) -> tuple[str, list[Count]]:
        """The counts by which these rows join, or why there is none. `must`: rows as they are have
        to run; changed labels may be none that the model knows."""
        num_rows = next(len(t) for t, r in zip(tensors, self.call.rows, strict=True) if r)
        try:
            whole = self.run(tensors)
        except Exception as error:  # of the model, whatever it is
            return (str(error)[:80] if must else ""), counts
        if not all(end.isfinite().all() for end in whole.ends.values()):
            return "", counts
        for first in sorted({1, num_rows // 2}):
            spans = (0, first), (first, num_rows)
            try:
                parts = [self.run(self.call.slice(tensors, *span)) for span in spans]
            except Exception as error:  # of the model, whatever it is
                return f"{first} of {num_rows} rows alone do not run ({str(error)[:80]})", []
            for n, kept in whole.buffers.items():
                if not all(torch.allclose(kept, p.buffers[n], self.limit, self.limit, True)
                           for p in parts):
                    return f"the buffer {n} would record the rows of one rank only", []
            found = [part.ends for part in parts]
            why, counts = (self._joined_loss(whole.ends, found, tensors, spans, counts)
                           if "loss" in whole.ends else
                           (self._joined_outputs(whole.ends, found, spans), counts))
            if why:
                return why, []
        return "", counts

    def _joined_loss(self, whole: dict[str, Tensor], parts: list[dict[str, Tensor]],
                     tensors: list[Tensor], spans: tuple[Span, Span],
                     counts: list[Count]) -> tuple[str, list[Count]]:
        by_shares: dict[tuple[float, ...], list[Count]] = {}
        for count in counts:
            shares = tuple(count.share(tensors, span, spans[1][1]) for span in spans)
            by_shares.setdefault(shares, []).append(count)
        want = {"the loss": whole["loss"].detach()} | self._grads(whole)
        own = [{"the loss": part["loss"].detach()} | self._grads(part) for part in parts]
        whys = {shares: _differs(want, own, shares, self.limit) for shares in by_shares}
        kept = [count for count in counts for shares, why in whys.items()
                if not why and count in by_shares[shares]]
        return ("" if kept else next(iter(whys.values()))), kept

    def _joined_outputs(self, whole: dict[str, Tensor], parts: list[dict[str, Tensor]],
                        spans: tuple[Span, Span]) -> str:
        """Outputs and the gradients of a number made of all of them."""
        upstream, own = dict[str, Tensor](), [dict[str, Tensor](), dict[str, Tensor]()]
        for name, end in whole.items():
            dim = _rows_dim(end, [part[name] for part in parts], spans, self.limit)
            if dim == -1 or self.dims.setdefault(name, dim) != dim:
                return f"the output {name} of few rows together is not that of the rows apart"
            if not end.requires_grad:
                continue
            upstream[name] = torch.randn_like(end)
            pieces = ((upstream[name], torch.zeros_like(end)) if dim is None else
                      upstream[name].split([part[name].shape[dim] for part in parts], dim))
            for part, piece in zip(own, pieces, strict=True):
                part[name] = piece
        grads = [self._grads(part, given) for part, given in zip(parts, own, strict=True)]
        return _differs(self._grads(whole, upstream), grads, (1.0, 1.0), self.limit)

    def _grads(self, ends: dict[str, Tensor],
               upstream: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        live = [name for name, end in ends.items() if end.requires_grad]
        found = torch.autograd.grad(
            [ends[name] for name in live], list(self.params.values()),
            [upstream[name] for name in live] if upstream else None, allow_unused=True,
        ) if live else [None] * len(self.params)
        return {f"the gradient of {n}": torch.zeros_like(p) if g is None else g
                for (n, p), g in zip(self.params.items(), found, strict=True)}


def _far(value: Tensor, has_rows: bool) -> Tensor:
    """Rows that differ in size: what looks at the largest of all shows."""
    if not has_rows or not value.is_floating_point():
        return value
    size = torch.arange(1, len(value) + 1, dtype=value.dtype, device=value.device)
    return value * size.view(-1, *[1] * (value.dim() - 1))


def _labels_of(call: Call, rows: list[Tensor]) -> list[int]:
    """The tensors that may say what counts: whole numbers, and masks."""
    return [i for i, (t, r) in enumerate(zip(rows, call.rows, strict=True))
            if r and (not t.is_floating_point() or bool(((t == 0) | (t == 1)).all()))]


def _counts(call: Call, rows: list[Tensor], ignored: Iterable[int]) -> Iterator[Count]:
    """What a mean may be over, the likeliest first."""
    yield Count()
    yield Count(summed=True)
    for i in _labels_of(call, rows):
        for value in ignored:
            yield Count(i, value)
            if rows[i].dim() > 1:
                yield Count(i, value, shifted=True)


def _left_out(call: Call, rows: list[Tensor], tensors: list[Tensor], ignored: list[int],
              labels: _Labels) -> Iterator[list[Tensor]]:
    """The same rows, where half of the labels of one are left out. It is done with the labels of a
    cross-entropy, with values that the batch has anyway, and with zeros: others may be looked up
    in a table, which on a GPU ends the process."""
    for i in _labels_of(call, rows):
        read = any(torch.equal(rows[i], x) for x in labels.indices)
        target = not read and any(_alike(rows[i], x, ignored) for x in labels.targets)
        for value in ignored:
            if target or value == 0 or bool((tensors[i] == value).any()):
                changed = rows[i].clone(memory_format=torch.contiguous_format)
                flat = changed.view(len(changed), -1)
                flat[1, flat.shape[1] // 2:] = value
                yield [*rows[:i], changed, *rows[i + 1:]]


def _alike(values: Tensor, target: Tensor, ignored: list[int]) -> bool:
    """Whether a cross-entropy had these labels, in whatever order."""
    left_out = torch.tensor(ignored, device=target.device)
    kept = [x[~torch.isin(x, left_out)].flatten().sort().values.long()
            for x in (target, values, values[..., 1:])]
    return torch.equal(kept[0], kept[1]) or torch.equal(kept[0], kept[2])


def _rows_dim(whole: Tensor, parts: list[Tensor], spans: tuple[Span, Span],
              limit: float) -> int | None:
    """Where an output has the rows; None: it has none, -1: it cannot be joined."""
    def near(a: Tensor) -> bool:
        size = float(whole.detach().double().abs().max()) if whole.numel() else 0.0
        return torch.allclose(a.double(), whole.double(), limit, limit * size)

    if all(part.shape == whole.shape and near(part) for part in parts):
        return None
    for dim in range(whole.dim()):
        sizes = [[s for d, s in enumerate(x.shape) if d != dim] for x in (whole, *parts)]
        fits = all(p.shape[dim] * spans[1][1] == whole.shape[dim] * (end - start)
                   for p, (start, end) in zip(parts, spans, strict=True))
        if sizes[0] == sizes[1] == sizes[2] and fits and near(torch.cat(parts, dim)):
            return dim
    return -1


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
            return f"{name} of few rows together is not that of the rows apart"
    return ""
