"""The conversions of a lowered block: every move between layouts, and back for the gradient."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .atoms import common, within
from .layout import PARTIAL, WHOLE, Cut, Split, is_cut, layout_text
from .loss_sums import sum_cross_entropy
from .parts import Frame, join, padded, piece
from .price import Move
from .watch import heard

_LONG = 2**22  # elements
# Newer versions of torch have other names for them, and older ones not yet.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Axis:
    """A group of ranks along one axis, and this rank's place in it."""

    group: Any
    parts: int
    index: int
    ranks: tuple[int, ...]


def backend_of(group: Any = None) -> str:
    """What carries the tensors that are computed with: `nccl` of "cpu:gloo,cuda:nccl"."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    by_device = {kind: name for kind, _, name in pairs}
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return by_device.get(kind) or next(iter(by_device.values()))


@heard
def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    y = x.contiguous().clone()
    dist.all_reduce(y, group=axis.group)
    return y


@heard
def gather_pieces(x: Tensor, axis: Axis) -> list[Tensor]:
    """The pieces of all ranks."""
    pieces, works = start_gather(x, axis)
    arrive(works)
    return pieces


def start_gather(x: Tensor, axis: Axis) -> tuple[list[Tensor], list[Any]]:
    """The pieces of all ranks, under way. Gloo's own all-gather is slower than sending to each."""
    x = x.contiguous()
    if backend_of(axis.group) != "gloo":
        out = x.new_empty((axis.parts, *x.shape))
        work = _gather_single(out, x, group=axis.group, async_op=True)
        return list(out.unbind(0)), [work]
    return _start_pieces([x] * axis.parts, axis)


@heard
def exchange(pieces: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Piece j goes to rank j; what comes back is from rank j at place j. All of one shape."""
    if backend_of(axis.group) != "gloo":
        sent = torch.stack(list(pieces))
        out = torch.empty_like(sent)
        dist.all_to_all_single(out, sent, group=axis.group)
        return list(out.unbind(0))
    got, works = _start_pieces(pieces, axis)
    arrive(works)
    return got


def _start_pieces(pieces: Sequence[Tensor], axis: Axis) -> tuple[list[Tensor], list[Any]]:
    got = [p if j == axis.index else torch.empty_like(p, memory_format=torch.contiguous_format)
           for j, p in enumerate(pieces)]
    return got, start_exchange(pieces, got, axis)


@heard
def arrive(works: Iterable[Any]) -> None:
    """Wait for what is under way."""
    for work in works:
        work.wait()


def start_exchange(pieces: Sequence[Tensor], got: Sequence[Tensor], axis: Axis) -> list[Any]:
    """Messages of an exchange under way; this rank's own piece is not moved."""
    others = [j for j in range(axis.parts) if j != axis.index]
    return start_messages([(pieces[j], j) for j in others], [(got[j], j) for j in others], axis)


def start_scatter(rows: Tensor, axis: Axis) -> tuple[Tensor, list[Any]]:
    """A row to every rank, to be added up there: under way, and what this rank has to add up (with
    Gloo the rows of all, else their sum).

    On one machine, Gloo's own all-to-all is quicker for a rank that has waited for long; on a link
    of 200 Mbit/s it took a third longer, for no reason that was found.
    """
    if backend_of(axis.group) != "gloo":
        total = rows.new_empty((1, *rows.shape[1:]))
        return total, [_scatter_single(total, rows, group=axis.group, async_op=True)]
    got = torch.empty_like(rows)
    got[axis.index] = rows[axis.index]
    return got, start_exchange(rows.unbind(), got.unbind(), axis)


def start_messages(out: Sequence[tuple[Tensor, int]], into: Sequence[tuple[Tensor, int]],
                   axis: Axis, tagged: bool = False) -> list[Any]:
    """Messages to and from places of an axis, under way.

    `tagged`: message k of the sender is message k of the receiver, so a pair may have several.
    """
    sent = [(x.contiguous(), axis.ranks[j]) for x, j in out]
    if backend_of(axis.group) != "gloo":
        ops = [dist.P2POp(dist.irecv, x, axis.ranks[j], axis.group) for x, j in into]
        ops += [dist.P2POp(dist.isend, x, rank, axis.group) for x, rank in sent]
        return list(dist.batch_isend_irecv(ops)) if ops else []
    works: list[Any] = [dist.irecv(x, axis.ranks[j], axis.group, tag=k * tagged)
                        for k, (x, j) in enumerate(into, 1)]
    return works + [dist.isend(x, rank, axis.group, tag=k * tagged)
                    for k, (x, rank) in enumerate(sent, 1)]


def start_sum(x: Tensor, axis: Axis) -> list[Any]:
    """An all-reduce under way. Gloo has two threads: a long one is quicker as two halves."""
    halves = backend_of(axis.group) == "gloo" and x.numel() >= _LONG
    return [dist.all_reduce(piece, group=axis.group, async_op=True)
            for piece in x.view(-1).chunk(1 + halves)]


def reduce_scatter(x: Tensor, target: Cut, axis: Axis) -> Tensor:
    pieces = [piece(x, target, axis.parts, j) for j in range(axis.parts)]
    if backend_of(axis.group) != "gloo":
        out = torch.empty_like(pieces[0])
        _scatter_single(out, torch.stack(pieces), group=axis.group)
        return out
    return added(exchange(pieces, axis))


def added(got: Sequence[Tensor]) -> Tensor:
    """The sum of what came from all ranks; `stack` and `sum` take twice as long."""
    total = got[0] + got[1] if len(got) > 1 else got[0]
    for other in got[2:]:
        total += other
    return total


def all_to_all(x: Tensor, source: Split, target: Split, axis: Axis) -> Tensor:
    pieces = [piece(x, target, axis.parts, j) for j in range(axis.parts)]
    return join(exchange(pieces, axis), source)


def reblock(x: Tensor, source: Cut, target: Cut, axis: Axis) -> Tensor:
    """From one cut to another, in messages between ranks whose pieces overlap."""
    me, frame = axis.index, Frame(x, source, axis.parts, target)
    x, have, want = frame.open(x), frame.box(source, me), frame.box(target, me)
    result = x.new_empty(want[1])
    out, into = {}, {}
    for j in range(axis.parts):
        if theirs := common(have, frame.box(target, j)):
            out[j] = x[within(theirs, have)]
        if mine := common(frame.box(source, j), want):
            into[j] = result[within(mine, want)]
    _deliver(out, into, axis)
    return frame.close(result)


@heard
def _deliver(out: dict[int, Tensor], into: dict[int, Tensor], axis: Axis) -> None:
    """Send and receive views by place; a rank copies what it has for itself."""
    own, target = out.pop(axis.index, None), into.pop(axis.index, None)
    got = {j: torch.empty_like(view, memory_format=torch.contiguous_format)
           for j, view in into.items()}
    works = start_messages([(x, j) for j, x in out.items()], [(x, j) for j, x in got.items()], axis)
    if own is not None and target is not None:
        target.copy_(own)
    arrive(works)
    for j, view in into.items():
        view.copy_(got[j])


def move(x: Tensor, step: Move, axis: Axis) -> Tensor:
    """One conversion on one axis."""
    source, target = step.source, step.target
    if is_cut(source):
        return _from_cut(x, source, step, axis)
    if is_cut(target):
        if source == PARTIAL:
            return reduce_scatter(x, target, axis)
        return piece(x, target, axis.parts, axis.index)
    return all_reduce(x, axis) if source == PARTIAL else x / axis.parts


def _from_cut(x: Tensor, source: Cut, step: Move, axis: Axis) -> Tensor:
    target = step.target
    if target == WHOLE:
        return join(gather_pieces(x, axis), source)
    if not is_cut(target):
        return padded(x, source, axis.parts, axis.index)
    if isinstance(source, Split) and isinstance(target, Split):
        return all_to_all(x, source, target, axis)
    return reblock(x, source, target, axis)


def run_moves(x: Tensor, steps: Sequence[Move], axes: Sequence[Axis]) -> Tensor:
    for step in steps:
        x = move(x, step, axes[step.axis])
    return x


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, convert: Convert) -> Tensor:
        ctx.convert = convert
        return run_moves(x, convert.ahead, convert.axes) if convert.ahead else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return run_moves(grads[0], ctx.convert.back, ctx.convert.axes), None


class Convert(nn.Module):
    """Moves of a value forward, to one of that shape, and of its gradient backward."""

    def __init__(self, ahead: list[Move], back: list[Move], axes: Sequence[Axis],
                 shape: Sequence[int]) -> None:
        super().__init__()
        self.ahead, self.back, self.axes = tuple(ahead), tuple(back), tuple(axes)
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return cast(Tensor, _Convert.apply(x, self))
        return run_moves(x, self.ahead, self.axes)

    def extra_repr(self) -> str:
        return f"forward {_text(self.ahead)}, backward {_text(self.back)}"


def _text(steps: Sequence[Move]) -> str:
    shown = [f"{layout_text(s.source)}->{layout_text(s.target)}@{s.axis}" for s in steps]
    return ", ".join(shown) or "nothing"


@dataclass(frozen=True)
class VocabPart:
    """The rows of a vocabulary that this rank has."""

    axes: tuple[Axis, ...]

    @property
    def parts(self) -> int:
        return math.prod(axis.parts for axis in self.axes)

    def start(self, size: int) -> int:
        index = 0
        for axis in self.axes:
            index = index * axis.parts + axis.index
        return index * size

    @heard
    def add_up(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        for axis in self.axes:
            dist.all_reduce(x, op, group=axis.group)
        return x


class VocabEmbedding(nn.Module):
    """Embedding of the ids this rank has rows for; zeros for the others: partial sums."""

    def __init__(self, owner: VocabPart, padding_idx: int) -> None:
        super().__init__()
        self.owner, self.padding_idx = owner, padding_idx

    def forward(self, weight: Tensor, ids: Tensor, *_: Any) -> Tensor:
        local = ids - self.owner.start(weight.shape[0])
        foreign = (local < 0) | (local >= weight.shape[0])
        found = nn.functional.embedding(torch.where(foreign, 0, local), weight)
        if self.padding_idx >= 0:
            found = torch.where((ids == self.padding_idx)[..., None], found.detach(), found)
        return found.masked_fill(foreign[..., None], 0.0)


class VocabCrossEntropy(nn.Module):
    """Cross-entropy of logits whose classes are spread over ranks; three small reductions."""

    def __init__(self, owner: VocabPart, ignore_index: int) -> None:
        super().__init__()
        self.owner, self.ignore_index = owner, ignore_index

    def forward(self, logits: Tensor, target: Tensor, denominator: Tensor | None,
                overwrite: bool = False) -> Tensor:
        start = self.owner.start(logits.shape[1])
        total = sum_cross_entropy(logits, target, self.ignore_index, start, self.owner.add_up,
                                  overwrite)
        return total if denominator is None else total / denominator


@dataclass(frozen=True)
class Peers:
    """The ranks that join the statistics of a batch, which this rank has for some of so many
    channels, as so many ranks of its stage have. `own` is None where every rank has the same
    channels, and no other of its stage has them."""

    axis: Axis
    own: Tensor | None = None
    num_channels: int = 0
    copies: int = 1

    def sum(self, x: Tensor) -> Tensor:
        """Over all replicas, of values by channel in the last dim."""
        every, own = x, self.own
        if own is not None:
            every = x.new_zeros((*x.shape[:-1], self.num_channels))
            every[..., own] = x / self.copies
        dist.all_reduce(every, group=self.axis.group)
        return every if own is None else every[..., own]


class _SyncNorm(torch.autograd.Function):
    """Batch normalisation whose statistics are those of all replicas together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float,
                peers: Peers) -> tuple[Tensor, ...]:
        dims = [d for d in range(x.dim()) if d != 1]
        own = x.sum(dims)
        sums, total = peers.sum(torch.stack([own, torch.full_like(own, x.numel() / len(own))]))
        mean = sums / total
        centred = x - _channel(mean, x)
        var = peers.sum(centred.square().sum(dims)) / total
        scale = (var + eps).rsqrt()
        normal = centred.mul_(_channel(scale, x))
        ctx.save_for_backward(normal, weight, scale, total)
        ctx.peers, ctx.dims = peers, dims
        return normal * _channel(weight, x) + _channel(bias, x), mean, var, total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        normal, weight, scale, total = ctx.saved_tensors
        dy, dims = grads[0], ctx.dims
        own = torch.stack([dy.sum(dims), (dy * normal).sum(dims)])
        both = ctx.peers.sum(own.clone())
        inner = dy - _channel(both[0] / total, dy) - normal * _channel(both[1] / total, dy)
        return inner * _channel(weight * scale, dy), own[1], own[0], None, None


def _channel(v: Tensor, like: Tensor) -> Tensor:
    return v.view(1, -1, *[1] * (like.dim() - 2))


class SyncBatchNorm(nn.Module):
    """Training-mode batch_norm over all replicas; running statistics as torch keeps them."""

    def __init__(self, peers: Peers, momentum: float, eps: float) -> None:
        super().__init__()
        self.peers, self.momentum, self.eps = peers, momentum, eps

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None,
                running_mean: Tensor | None, running_var: Tensor | None) -> Tensor:
        weight = x.new_ones(x.shape[1]) if weight is None else weight
        bias = x.new_zeros(x.shape[1]) if bias is None else bias
        wide = torch.promote_types(x.dtype, torch.float32)  # squares of bfloat16 are too coarse
        args = (value.to(wide) for value in (x, weight, bias))
        y, mean, var, total = cast(Any, _SyncNorm.apply(*args, self.eps, self.peers))
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                mean, var = (value.detach().to(running_mean.dtype) for value in (mean, var))
                # As torch's op does it: a backward may have them, and reads them not.
                running_mean.data.lerp_(mean, self.momentum)
                running_var.data.lerp_(var * total / (total - 1), self.momentum)
        return cast(Tensor, y.to(x.dtype))


def generator(device: torch.device) -> torch.Generator:
    """The generator from which ops on a device draw."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]


@contextlib.contextmanager
def apart(place: int, device: torch.device) -> Iterator[None]:
    """Draw other numbers on each place.

    The seed comes from the stream that all places share. That stream goes on alike everywhere, for
    values that are whole on each place.
    """
    seed, own = int(torch.randint(2**62, ())) + place, generator(device)
    before = own.get_state()
    own.manual_seed(seed)
    try:
        yield
    finally:
        own.set_state(before)


class OwnRandom(nn.Module):
    """A random op on one part of a value: every part draws numbers of its own."""

    def __init__(self, op: Any, place: int) -> None:
        super().__init__()
        self.op, self.place = op, place

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with apart(self.place, args[0].device):
            return cast(Tensor, self.op(*args, **kwargs))
