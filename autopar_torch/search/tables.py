"""Per-block numbers of an option, as arrays: what bounds and evaluation add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..model import ModelGraph, TensorInfo, item_bytes, leaf_type
from ..plan import BUCKET_BYTES, Precision, Recompute, Sharding
from ..profile import BlockCost, Curve, Lookup, program_key, sharding_key
from ..shard.eliminate import Array
from ..shard.layout import parse_forms, parts_of
from ..simulate.walk import Pipeline, walk
from .borders import FreeCuts, Once, free_cuts
from .space import RECOMPUTES, Candidate, Option

BUSY = 0.5  # part of a core: sending that takes more leaves little for computing
SMALL_BYTES = 2 * 2**20  # of a bucket

Ints = NDArray[np.int64]
Crossing = tuple[tuple[TensorInfo, int], ...]  # values and in how many parts they lie


class Params(NamedTuple):
    """Per block, on one device: bytes of its parameters, of those that are trained, of their leaves
    (what forward reads: a bfloat16 copy, or the parameter itself), and of the largest; how many are
    trained; and the bytes of each of these, in the order in which their gradients come."""

    held: Array
    trained: Array
    leaf: Array
    largest: Array
    number: Array
    each: list[tuple[float, ...]]


class Blocks(NamedTuple):
    """Per block, one micro-batch on one device."""

    forward: Array
    backward: Array
    input: Array
    weight: Array
    kept: Array
    working: Array
    added: Array  # more seconds of a backward that adds to gradients which are there already
    stash: Array  # bytes kept of it for the weight part of a split backward


class Least(NamedTuple):
    """Per block, or summed over the blocks before each border: the least seconds of a micro-batch
    on one device, whatever the schedule."""

    forward: Array
    backward: Array  # the quicker of one backward and of one in two parts
    input: Array  # what the stage before waits for


class Tables:
    """Looked up once per option, rows and kind; spread over the blocks by index."""

    def __init__(self, options: Sequence[Option], graph: ModelGraph, profile: Lookup,
                 precision: Precision = "float32",
                 grad_dtype: Precision = "float32",
                 devices: Sequence[int] | None = None) -> None:
        self.options, self.graph, self.profile = options, graph, profile
        self.devices = devices or range(self.cluster.num_devices)
        self.classes = {self.cluster.class_of[device] for device in self.devices}
        self.overheads = max(map(profile.overheads, self.classes),
                             key=lambda own: own.update_s_per_byte)
        self.precision = precision
        self.half_grads = precision == grad_dtype == "bfloat16"  # gradients so far, as the leaves
        self._columns: dict[tuple[int, int, Recompute, int | None], Array] = {}
        self._blocks: dict[tuple[int, int, Recompute, int | None], Blocks] = {}
        self._params: dict[int, Params] = {}
        self._sends: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._curves: dict[tuple[str, int, int, int], Curve] = {}
        self._ends: dict[tuple[object, ...], list[float]] = {}
        self._messages: dict[tuple[int, int, int], Array] = {}
        self._hops: dict[tuple[int, int, int], list[tuple[Curve, NDArray[np.int64]]]] = {}
        self._free_cuts: dict[tuple[object, ...], FreeCuts] = {}
        self.programs = [self._programs(option) for option in options]
        self._sorted = [_sorted(which) for _, which in self.programs]

    @property
    def cluster(self) -> Cluster:
        return self.profile.profile.cluster

    @cached_property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Of what may recompute: what the profile knows, and what changes the cost of a block."""
        costs = {(cell.kind, cell.sharding, cell.device): cell.pieces
                 for cell in self.profile.profile.cells}

        def changes(less: Recompute, more: Recompute) -> bool:
            end = program_key("", more)
            plain = program_key("", less)
            return any(sharding.endswith(end) and pieces != costs.get(
                (kind, sharding.removesuffix(end) + plain, device))
                for (kind, sharding, device), pieces in costs.items())

        return tuple(r for k, r in enumerate(RECOMPUTES) if isinstance(r, bool) or changes(
            RECOMPUTES[k - 1], r))

    def curve(self, op: str, start: int, step: int, count: int) -> Curve:
        """The curve of ranks at equal distances."""
        key = (op, start, step, count)
        if key not in self._curves:
            places = range(start, start + step * count, step)
            self._curves[key] = self.profile.curve(op, [self.devices[k] for k in places])
        return self._curves[key]

    def bucket_bytes(self, c: Candidate) -> int:
        """Small buckets where sending leaves the core free: most then travel beside the backward.

        ZeRO 2 and 3 have a bucket per block anyway.
        """
        if c.dp == 1 or c.zero >= 2:
            return BUCKET_BYTES
        op = "scatter" if c.zero else "sum"
        curve = self.curve(op, 0, c.pp * self.options[c.option].degree, c.dp)
        return self.bucket_size(curve, self.params(c.option).trained.sum() / c.pp)

    def bucket_size(self, curve: Curve, trained_bytes: float) -> int:
        """Of a bucket of gradients of so many bytes that are summed so."""
        if curve.core > BUSY:
            return BUCKET_BYTES
        return int(min(max(trained_bytes / 4, SMALL_BYTES), BUCKET_BYTES))

    def message(self, option: int, rows: int, curve: Curve) -> Array:
        """Per border: seconds of its message over such a line, and of the gradients back."""
        key = (option, rows, id(curve))
        if key not in self._messages:
            sizes = np.array(self.sends(option, rows))
            known = {size: curve.seconds(size) for size in set(sizes.ravel().tolist())}
            seconds = [known[size] for size in sizes.ravel().tolist()]
            self._messages[key] = np.array(seconds).reshape(sizes.shape)
        return self._messages[key]

    def hops(self, tp: int, pp: int, num_stages: int) -> list[tuple[Curve, NDArray[np.int64]]]:
        """The distinct lines between neighbours of a pipeline, and after which stages each lies."""
        key = (tp, pp, num_stages)
        if key not in self._hops:
            places: dict[int, tuple[Curve, list[int]]] = {}
            for s in range(num_stages - 1):
                here, there = s % pp * tp, (s + 1) % pp * tp
                curve = self.curve("send", here, there - here, 2)
                places.setdefault(id(curve), (curve, []))[1].append(s)
            self._hops[key] = [(curve, np.array(after)) for curve, after in places.values()]
        return self._hops[key]

    def free_cuts(self, key: tuple[object, ...], seconds: Array, num_stages: int,
                  once: Once | None) -> FreeCuts:
        """How to cut without a memory limit, found once for equal work."""
        if key not in self._free_cuts:
            self._free_cuts[key] = free_cuts(seconds, num_stages, once)
        return self._free_cuts[key]

    def ends(self, name: str, pipe: Pipeline, count: int, virtual: int,
             starts: tuple[float, ...]) -> list[float]:
        """When every stage ends, worked out once for equal pipelines."""
        key = (name, pipe, count, virtual, starts)
        if key not in self._ends:
            position_of = tuple(range(len(pipe.forward) // virtual)) * virtual
            self._ends[key] = walk(name, position_of, pipe, count, starts)
        return self._ends[key]

    def _programs(self, option: Option) -> tuple[list[tuple[str, str]], NDArray[np.int64]]:
        """The distinct (kind, sharding) of an option, and which one each block runs."""
        found: dict[tuple[str, str], int] = {}
        which = [
            found.setdefault((block.kind, sharding_key(sharding)), len(found))
            for block, sharding in zip(self.graph.blocks, option.shardings, strict=True)
        ]
        return list(found), np.array(which)

    def least(self, option: int, values: Array) -> Array:
        """Per program of an option: the least of its blocks (shared parameters count only once)."""
        order, starts = self._sorted[option]
        return np.minimum.reduceat(values[order], starts)

    def columns(self, option: int, rows: int, recompute: Recompute,
                device: int | None = None) -> Array:
        """Per program of an option: the fields of `Blocks`, on the slowest class or on one."""
        key = (option, rows, recompute, device)
        if key not in self._columns:
            self._columns[key] = np.array([
                _column(self.cost(*program, rows, recompute, device))
                for program in self.programs[option][0]
            ])
        return self._columns[key]

    def cost(self, kind: str, own: str, rows: int, recompute: Recompute,
             device: int | None = None) -> BlockCost:
        key = program_key(own, not self.graph.kinds[kind].runs_once and recompute)
        classes = self.classes if device is None else (device,)
        return self.profile.slowest(kind, key, rows, classes)

    def blocks(self, option: int, rows: int, recompute: Recompute,
               device: int | None = None) -> Blocks:
        key = (option, rows, recompute, device)
        if key not in self._blocks:
            self._blocks[key] = Blocks(*self.columns(*key).T[:, self.programs[option][1]])
        return self._blocks[key]

    def quickest(self, option: int, rows: int, recompute: Recompute, device: int) -> Least:
        own = self.blocks(option, rows, recompute, device)
        backward = np.minimum(own.backward, own.input + own.weight)
        added = np.minimum(own.added, 0.0)
        return Least(own.forward, backward + added, np.minimum(own.input, backward) + added)

    def params(self, option: int) -> Params:
        """A parameter that several blocks share counts where it is used first."""
        if option not in self._params:
            which = self.programs[option][1]
            known: dict[int, tuple[list[float], tuple[float, ...]]] = {}
            seen: set[str] = set()
            rows, each = [], []
            for i, names in enumerate(self._shared):
                row = known.get(int(which[i])) if not names else None
                if row is None:
                    row = self._sizes(i, self.options[option].shardings[i], seen)
                    known |= {} if names else {int(which[i]): row}
                seen.update(names)
                rows.append(row[0])
                each.append(row[1])
            self._params[option] = Params._make([*np.array(rows, dtype=float).T, each])
        return self._params[option]

    def _sizes(self, index: int, sharding: Sharding | None,
               seen: set[str]) -> tuple[list[float], tuple[float, ...]]:
        """The fields of `Params` of one block, without what was seen before."""
        held = leaf = 0.0
        each: list[float] = []
        for slot, name in self.graph.blocks[index].params.items():
            info = self.graph.params[name]
            if name in seen:
                continue
            cut = 1
            if sharding is not None:
                cut = parts_of(sharding.mesh, parse_forms(sharding.forms[slot]).value)
            size = info.num_elements * item_bytes(info.dtype) / cut
            held += size
            if info.trainable and not info.buffer:
                each.insert(0, size)
                kind = leaf_type(info.dtype, self.precision)
                leaf += info.num_elements * item_bytes(kind) / cut
        return [held, sum(each), leaf, max(each, default=0.0), len(each)], tuple(each)

    @cached_property
    def _shared(self) -> list[list[str]]:
        """Per block: its parameters that others use too."""
        users = Counter(name for block in self.graph.blocks for name in block.params.values())
        return [[name for name in block.params.values() if users[name] > 1]
                for block in self.graph.blocks]

    def sends(self, option: int, rows: int) -> tuple[Array, Array]:
        """Per border: bytes forward, bytes of gradients backward, per device."""
        key = (option, rows)
        if key not in self._sends:
            kinds, which = self._borders(option)
            sizes = [(sum(i.num_bytes(rows) / cut for i, cut in kind),
                      sum(i.num_bytes(rows) / cut for i, cut in kind if i.grad))
                     for kind in kinds]
            ahead, back = np.array(sizes, dtype=float)[which].T
            self._sends[key] = ahead, back
        return self._sends[key]

    def _borders(self, option: int) -> tuple[list[Crossing], NDArray[np.int64]]:
        """The distinct sets of values that cross a border, and which of them each border has."""
        if option not in self._crossing:
            found: dict[Crossing, int] = {}
            which = [found.setdefault(tuple((info, self._cut(option, value))
                                            for value, info in values.items()), len(found))
                     for values in self._crossings]
            self._crossing[option] = list(found), np.array(which)
        return self._crossing[option]

    @cached_property
    def _crossings(self) -> list[dict[str, TensorInfo]]:
        return self.graph.crossings()

    @cached_property
    def _crossing(self) -> dict[int, tuple[list[Crossing], NDArray[np.int64]]]:
        return {}

    @cached_property
    def _makers(self) -> dict[str, tuple[int, str]]:
        return {value: (i, slot) for i, block in enumerate(self.graph.blocks)
                for slot, value in block.outputs.items()}

    def _cut(self, option: int, value: str) -> int:
        """In how many parts a value is cut where it is made."""
        if value in self.graph.given:  # the batch brings it
            return 1
        block, slot = self._makers[value]
        sharding = self.options[option].shardings[block]
        if sharding is None:
            return 1
        return parts_of(sharding.mesh, parse_forms(sharding.forms[slot]).value)


def sums_before(values: Array) -> Array:
    """Sums over the blocks before each border, along the last axis."""
    found = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=found[..., 1:])
    return found


def _sorted(which: Ints) -> tuple[Ints, Ints]:
    """Blocks in the order of their programs, and where each of these begins."""
    order = np.argsort(which, kind="stable")
    return order, np.flatnonzero(np.diff(which[order], prepend=-1))


def _column(cost: BlockCost) -> list[float]:
    return [
        cost.forward_s + cost.comm_forward_s,
        cost.backward_s + cost.comm_backward_s,
        cost.input_s + cost.comm_backward_s,
        cost.weight_s,
        cost.kept_bytes,
        max(cost.forward_bytes, cost.backward_bytes),
        cost.added_s,
        max(cost.kept_bytes, cost.stash_bytes),
    ]


__all__ = ["Array", "Blocks", "Ints", "Least", "Params", "Tables", "sums_before"]
