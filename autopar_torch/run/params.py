"""Parameters of one rank: what it keeps, what it computes with, and how gradients come together.

The user's Parameter objects keep their identity and hold this rank's part. Blocks compute with
*leaves*: the part itself, or a copy that is gathered (ZeRO) or cast (bfloat16) from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from ..model import ModelGraph
from ..plan import Plan
from ..shard.collectives import Axis, added, arrive, gather_pieces, start_scatter, start_sum
from ..shard.holdings import Box, all_holdings, unread_holdings
from ..shard.parts import copy_rows, fill, flat_piece, part
from ..shard.reduction import Share, boxes_of, buckets_of, own_of, shares_of
from ..shard.watch import heard
from . import doors
from .sharded import Sharded, adopt, local, plainly
from .spread import Spread, paste
from .world import World

# Of ranks that hold the same parameters: names of their own, by which a timeline knows them.
team_gather, team_sum = heard(gather_pieces, "team_gather"), heard(arrive, "team_sum")


@dataclass
class Held:
    """One parameter (or buffer) of which this rank has a part."""

    share: Share
    tensor: Tensor  # the user's object
    axis: Axis | None
    shape: tuple[int, ...]  # full
    leaf: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    dtype: torch.dtype = torch.float32
    frozen: bool = False  # though its leaf, which ZeRO has cut, may get gradients of steps before

    @property
    def name(self) -> str:
        return self.share.name

    @property
    def read(self) -> Tensor:
        """What blocks compute with."""
        return self.leaf.detach() if self.frozen else self.leaf

    @property
    def part(self) -> Tensor:
        """The plain part behind the user's object."""
        return local(self.tensor)

    def boxes(self) -> list[Box]:
        """Rectangles of the full tensor, in the order in which they lie in `tensor`."""
        return self.share.boxes(self.shape)


class ParamStore:
    """All parameters that this rank has a part of."""

    def __init__(self, model: nn.Module, plan: Plan, graph: ModelGraph, world: World,
                 device: torch.device) -> None:
        self.world, self.plan, self.graph, self.device = world, plan, graph, device
        self.module = model
        self.dtype = torch.bfloat16 if plan.precision == "bfloat16" else None
        self.unread = unread_holdings(plan, graph, world.size)
        self.holdings = all_holdings(plan, graph) | self.unread
        self.tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        distinct = {id(held): held for held in self.holdings.values()}.values()
        world.make_groups(team.ranks for held in distinct for team in held.teams)
        shares = shares_of(plan, graph, world.rank, self.holdings)
        self.held = {
            name: Held(
                share, self.tensors[name], world.axis(share.team.ranks), graph.params[name].shape
            )
            for name, share in shares.items()
        }

    def cut(self, held: Held, full: Tensor) -> Tensor:
        """This rank's part of a full tensor, a copy."""
        value = full
        for cut in held.share.holding.cuts:
            value = part(value, cut)
        if held.share.zero:
            start, end = held.share.own_rows()
            value = value[start:end]
        return value.detach().clone()

    def spoken(self, held: Held, value: Tensor) -> list[tuple[Box, Tensor]]:
        """(box of the full tensor, view) of what this rank saves of a parameter, or of a tensor
        that is cut like it. Over all ranks, every element is saved once."""
        spread = self.spreads.get(held.name)
        if spread is not None:
            return spread.spoken(local(value))
        whole = ((0,) * len(held.shape), held.shape)
        return [(whole, local(value))] if self.world.rank == 0 else []

    def speaker(self, name: str) -> int:
        """The rank that saves what holders of a parameter have alike: one that has some of it."""
        spread = self.spreads.get(name)
        return self.holdings[name][0].rank if spread is None else spread.speaker

    def place(self, source: Callable[[str], Tensor | None]) -> None:
        """Fill every parameter with this rank's part of its full value."""
        for name, tensor in self.tensors.items():
            if name in self.held:
                put(tensor, self.cut(self.held[name], cast(Tensor, source(name))))
            elif name in self.holdings:
                if not tensor.is_meta:
                    source(name)  # rank 0's values go to all ranks together
                put(tensor, torch.empty(self.part_shape(name), dtype=tensor.dtype,
                                        device=self.device))
            else:
                put(tensor, cast(Tensor, source(name)))
        self.begin()

    def boxes_of(self, name: str) -> dict[int, list[Box]]:
        """Rank -> the boxes that it keeps of a parameter."""
        return boxes_of(self.plan, self.graph, name, self.holdings[name])

    def part_shape(self, name: str) -> torch.Size:
        """Of this rank's part of a parameter."""
        shape = self.graph.params[name].shape
        if name not in self.held:
            return torch.Size((0, *shape[1:]))
        return self.cut(self.held[name], torch.empty(shape, device="meta")).shape

    def begin(self) -> None:
        """Every parameter has its content: make what blocks compute with."""
        self._make_leaves(self.held.values())
        self.spreads = {name: self._spread(name, self.tensors[name])
                        for name in self.holdings if not self._is_everywhere(name)}
        for name, spread in self.spreads.items():
            adopt(self.tensors[name], spread)
        self.buffers = {name: buffer for name, buffer in self.module.named_buffers()
                        if not isinstance(buffer, Sharded)}  # those that are whole here

    def follow(self, graph: ModelGraph) -> None:
        """Train what this graph says from now on; steps that have begun keep their leaves."""
        new: list[Held] = []
        for name, held in self.held.items():
            trained = graph.params[name].trainable and not graph.params[name].buffer
            if held.share.zero:
                held.frozen = not trained
            elif held.share.trained != trained:
                share = held.share._replace(trained=trained)
                new.append(Held(share, held.tensor, held.axis, held.shape))
        self.held |= {held.name: held for held in new}
        self._make_leaves(new)
        if self.plan.zero:
            doors.tell_thawed(tuple(held.name for held in new if held.share.trained))
        else:
            self.graph = graph

    def _make_leaves(self, new: Iterable[Held]) -> None:
        with plainly():
            for held in new:
                self._make_leaf(held)
            whole = [held for held in self.held.values() if not held.share.zero]
            self.copied = [held for held in whole if held.leaf.dtype != held.dtype]
            self.same = [(h.leaf, h.tensor) for h in whole if h.leaf.dtype == h.dtype]
        self.gathered = [held for held in self.held.values()
                         if held.share.zero and not self.gathers_per_use(held)]

    def _is_everywhere(self, name: str) -> bool:
        """Whether every rank keeps all of a parameter."""
        holdings, info = self.holdings[name], self.graph.params[name]
        cut = self.plan.zero > 0 and info.trainable and not info.buffer
        return holdings.are_whole and not cut and len(holdings) == self.world.size

    def _spread(self, name: str, tensor: Tensor) -> Spread:
        held, size = self.held.get(name), tuple(tensor.shape)
        shape = self.graph.params[name].shape
        return Spread(
            name, shape, size, self.world,
            lambda full: self.cut(held, full) if held else full.new_empty(size),
            lambda: self.boxes_of(name),
            own_of(held.share if held else None, shape, self.holdings[name]),
        )

    def _make_leaf(self, held: Held) -> None:
        tensor, cast_to = held.tensor, self.dtype
        held.dtype = tensor.dtype
        if self.graph.params[held.name].buffer:
            held.leaf = tensor.detach()
            return
        if not tensor.is_floating_point() or cast_to is None:
            cast_to = tensor.dtype
        held.leaf = tensor.detach()
        if held.share.zero or cast_to != tensor.dtype:
            held.leaf = torch.empty(held.share.local, dtype=cast_to, device=tensor.device)
        held.leaf.requires_grad_(tensor.requires_grad or held.share.zero)
        if tensor.is_floating_point() and not self.plan.keeps_bfloat16:
            held.leaf.grad_dtype = tensor.dtype
        if self.gathers_per_use(held):
            held.leaf.untyped_storage().resize_(0)

    def refresh(self, read: Container[str]) -> None:
        """Bring the leaves that are read up to date with what the optimizer did to parameters."""
        with torch.no_grad(), plainly():
            for leaf, tensor in self.same:
                if leaf.data_ptr() != tensor.data_ptr():
                    leaf.data = tensor.data
            for held in self.copied:
                held.leaf.data.copy_(held.tensor)  # an earlier forward may still need its backward
        self.gather(held for held in self.gathered if held.name in read)

    def versions(self, but: Container[str]) -> list[int]:
        """Other numbers after any parameter or buffer, `but` these, has changed in place."""
        with plainly():
            return [held.tensor._version for name, held in self.held.items() if name not in but]

    def gathers_per_use(self, held: Held) -> bool:
        """ZeRO 3: whole only while a block runs, where the whole team runs it together."""
        return self.plan.zero == 3 and held.share.same_schedule

    def gather(self, helds: Iterable[Held]) -> None:
        """Fill leaves from the pieces of all ranks of their team."""
        teams: dict[tuple[int, ...], list[Held]] = {}
        for held in helds:
            teams.setdefault(held.share.team.ranks, []).append(held)
        for _, group in sorted(teams.items()):
            flat = torch.cat([flat_piece(h.part, h.leaf.dtype, h.share.piece) for h in group])
            pieces = team_gather(flat, cast(Axis, group[0].axis))
            offset = 0
            for held in group:
                self._fill(held, [p[offset : offset + held.share.piece] for p in pieces])
                offset += held.share.piece

    def _fill(self, held: Held, pieces: list[Tensor]) -> None:
        storage = held.leaf.untyped_storage()
        if storage.size() == 0:
            storage.resize_(held.leaf.numel() * held.leaf.element_size())
        fill(held.leaf, held.share.rows, pieces, held.share.sizes)

    def release(self, held: Held) -> None:
        """Free a gathered leaf; what autograd saved of it is filled again by `gather`."""
        held.leaf.untyped_storage().resize_(0)


def put(tensor: Tensor, value: Tensor) -> None:
    """Give the user's object a new content; it stays the same object, also off `meta`, in the same
    memory where that fits and no other process has it: a script may know it by other names, as
    from `state_dict()`."""
    if tensor.is_meta and not value.is_meta:
        fresh = nn.Parameter(value, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, fresh if isinstance(tensor, nn.Parameter) else value)
    elif _has_room(tensor, value):
        tensor.data.copy_(value)  # which is no change to a graph that has read it
    else:
        if tensor.requires_grad:  # torch forgets the old shape only with the old type; without, a
            other = torch.float32 if value.dtype == torch.float16 else torch.float16  # graph that
            tensor.data = value.new_empty(0, dtype=other)  # is kept (pruning, weight_norm) has it
        tensor.data = value


def _has_room(tensor: Tensor, value: Tensor) -> bool:
    own = tensor.is_cuda or not tensor.is_shared()  # on GPUs all is shared, torch says
    return own and tensor.is_contiguous() and not tensor.is_inference() and (
        (tensor.shape, tensor.dtype, tensor.device) == (value.shape, value.dtype, value.device))


class GradBucket:
    """Gradients that travel together: one team, one way of reducing."""

    def __init__(self, helds: list[Held]) -> None:
        self.helds, self.axis = helds, helds[0].axis
        self.zero, self.layouts_differ = helds[0].share.zero, helds[0].share.team.layouts_differ
        self.same_schedule = helds[0].share.same_schedule
        self.sizes = [self._size(h) for h in helds]
        self.names = frozenset(h.name for h in helds)
        self.waiting: set[str] = set()
        self.reached: set[str] = set()  # parameters whose leaves have got gradients
        self.flat: Tensor | None = None
        self.got: Tensor | None = None
        self.works: list[Any] = []

    def _size(self, held: Held) -> int:
        if self.layouts_differ:
            return math.prod(held.shape)
        return held.share.piece if self.zero else math.prod(held.share.local)

    def _message(self) -> Tensor:
        """What the leaves have gathered, as one tensor; the leaves start afresh."""
        like, size = self.helds[0], sum(self.sizes)
        shape = (cast(Axis, self.axis).parts, size) if self.zero else (size,)
        flat = torch.empty(shape, dtype=like.dtype, device=like.leaf.device)
        if not (self.zero or self.layouts_differ):  # the usual case, in one call
            return torch.cat([self._taken(held).reshape(-1) for held in self.helds], out=flat)
        for held, target in zip(self.helds, flat.split(self.sizes, -1), strict=True):
            grad, holding = self._taken(held), held.share.holding
            if self.layouts_differ:
                target.zero_()
                paste(target.view(held.shape), grad / holding.num_copies,
                      holding.boxes(held.shape))
            else:
                copy_rows(target, grad.reshape(-1), held.share.piece, held.share.sizes)
        return flat

    def _taken(self, held: Held) -> Tensor:
        """The gradient that a leaf has gathered, which starts afresh; zeros if none arrived."""
        grad, held.leaf.grad = held.leaf.grad, None
        if grad is None:
            return torch.zeros_like(held.leaf, dtype=held.leaf.grad_dtype)
        self.reached.add(held.name)
        return grad

    def launch(self) -> None:
        """Start summing; gradients that have not arrived are zeros."""
        if self.axis is None:
            return
        flat = self.flat = self._message()
        if self.zero:
            self.got, self.works = start_scatter(flat, self.axis)
        else:
            self.works = start_sum(flat, self.axis)

    def finish(self, into: dict[str, Tensor], store: ParamStore) -> None:
        """Wait, and add the sums to `into`, in the shape of the user's parameters."""
        self.waiting = set(self.names)
        if self.axis is None:
            for held in self.helds:
                if held.leaf.grad is not None:
                    _add(into, held.name, self._taken(held).to(held.dtype))
            return
        team_sum(self.works)
        flat = cast(Tensor, self.flat) if self.got is None else added(self.got.unbind())
        for held, summed in zip(self.helds, self._parts(flat, store), strict=True):
            _add(into, held.name, summed)
        self.flat = self.got = None
        self.works = []

    def _parts(self, flat: Tensor, store: ParamStore) -> Sequence[Tensor]:
        """The sum of every parameter, in its shape."""
        with plainly():
            if not (self.zero or self.layouts_differ):  # the usual case, in one call
                return _unflatten_dense_tensors(flat, [held.tensor for held in self.helds])
            pairs = zip(self.helds, flat.split(self.sizes), strict=True)
            if self.layouts_differ:
                return [store.cut(held, part.view(held.shape)) for held, part in pairs]
            return [part[: held.tensor.numel()].view(held.tensor.shape) for held, part in pairs]


def _add(into: dict[str, Tensor], name: str, grad: Tensor) -> None:
    into[name] = grad if name not in into else into[name].add_(grad)


class Reducer:
    """Sums gradients over teams, while the backward still runs where that is possible."""

    def __init__(self, store: ParamStore, names: Iterable[str]) -> None:
        self.store = store
        shares = {name: held.share for name, held in store.held.items()}
        groups = buckets_of(shares, store.graph, store.plan, names)
        self.all_buckets = [GradBucket([store.held[s.name] for s in group]) for group in groups]
        self.buckets = self.all_buckets  # those of the step
        self.bucket_of = {h.name: b for b in self.buckets for h in b.helds}
        self.sums: dict[str, Tensor] = {}
        self.final: frozenset[str] = frozenset()  # whose last gradient is coming
        self.per_micro_batch = False
        self.hooks: list[Any] = []
        joint = [bucket for bucket in self.buckets if bucket.axis is not None]
        chain = any(len(replica.stages) > 1 for replica in store.plan.replicas)
        for held in (held for bucket in joint for held in bucket.helds):
            # A single bucket starts when the backward ends: without a pipeline, with the step.
            if held.leaf.requires_grad and (
                    chain or len(joint) > 1 or store.gathers_per_use(held)):
                self.hooks += [held.leaf.register_post_accumulate_grad_hook(self._hook(held))]

    def _hook(self, held: Held) -> Callable[[Tensor], None]:
        return lambda _: self.arrived(held.name)

    def retire(self) -> None:
        """Another one takes over; steps that have begun end with this one."""
        while self.hooks:
            self.hooks.pop().remove()

    @property
    def reached(self) -> set[str]:
        """Parameters that got gradients on this rank since the step began."""
        return set().union(*(bucket.reached for bucket in self.buckets))

    def begin(self, in_step: bool, varies: bool, read: Collection[str]) -> None:
        """A new step, of what is `read`; `in_step`: every replica has the same number of
        micro-batches; `varies`: some gradients may come on some ranks only, so no bucket starts
        before the backward ends."""
        self.buckets = [b for b in self.all_buckets if not b.names.isdisjoint(read)]
        self.sums, self.final, self.varies = {}, frozenset(), varies
        self.per_micro_batch = self.store.plan.zero >= 2 and in_step
        for bucket in self.buckets:
            bucket.waiting = set(bucket.names)
            bucket.reached.clear()

    def arrived(self, name: str) -> None:
        """A leaf has its gradient of this micro-batch."""
        held = self.store.held[name]
        if self.store.gathers_per_use(held):
            self.store.release(held)
        if name in self.final and not self.varies:
            bucket = self.bucket_of[name]
            bucket.waiting.discard(name)
            if not bucket.waiting:
                self._launch_ready()

    def expect_last(self, names: Iterable[str]) -> None:
        """The coming backward is the last one of these parameters."""
        self.final = frozenset(names)

    def _launch_ready(self) -> None:
        """Buckets start in one order on every rank."""
        for bucket in self.buckets:
            if not bucket.works and bucket.axis is not None:
                if bucket.waiting:
                    return
                bucket.launch()

    def after_backward(self, names: Iterable[str]) -> None:
        """ZeRO 2 and 3 do not keep whole gradients from one micro-batch to the next."""
        self.final = frozenset()
        if not self.per_micro_batch:
            return
        touched = {id(self.bucket_of[n]): self.bucket_of[n] for n in names if n in self.bucket_of}
        for bucket in self.buckets:
            if id(bucket) in touched and bucket.same_schedule:
                if not bucket.works:
                    bucket.launch()
                bucket.finish(self.sums, self.store)

    def finish(self) -> dict[str, Tensor]:
        """Every gradient of this rank's parameters, summed over the ranks with the same part."""
        for bucket in self._pending():
            bucket.finish(self.sums, self.store)
        sums, self.sums = self.sums, {}
        return sums

    def launch_rest(self) -> None:
        """Start every reduction that has not started, before anything else is communicated."""
        for bucket in self._pending():
            if not bucket.works:
                bucket.launch()

    def _pending(self) -> list[GradBucket]:
        return [b for b in self.buckets if not (self.per_micro_batch and b.same_schedule)]
