"""Per-block numbers of an option, as arrays: what bounds and evaluation add up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..model import ModelGraph, TensorInfo
from ..profile import SPLIT, Lookup, Piece, sharding_key
from ..shard.layout import parse_forms, parts_of
from .space import Option

Array = NDArray[np.float64]


class Params(NamedTuple):
    """Per block, on one device: bytes of parameters, of those with gradients, of the largest."""

    held: Array
    trained: Array
    largest: Array
    number: Array


class Blocks(NamedTuple):
    """Per block, one micro-batch on one device."""

    forward: Array
    backward: Array
    input: Array
    weight: Array
    kept: Array
    working: Array
    out: Array


class Tables:
    """Looked up once per option, rows and kind; spread over the blocks by index."""

    def __init__(self, options: Sequence[Option], graph: ModelGraph, profile: Lookup) -> None:
        self.options, self.graph, self.profile = options, graph, profile
        self._blocks: dict[tuple[int, int, bool, bool], Blocks] = {}
        self._params: dict[int, Params] = {}
        self._sends: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._keys = [self._programs(option) for option in options]

    @property
    def cluster(self) -> Cluster:
        return self.profile.profile.cluster

    def _programs(self, option: Option) -> tuple[list[tuple[str, str]], NDArray[np.int64]]:
        """The distinct (kind, sharding) of an option, and which one each block runs."""
        keys: dict[int, str] = {}
        found: dict[tuple[str, str], int] = {}
        which = []
        for block, sharding in zip(self.graph.blocks, option.shardings, strict=True):
            if id(sharding) not in keys:
                keys[id(sharding)] = sharding_key(sharding)
            which.append(found.setdefault((block.kind, keys[id(sharding)]), len(found)))
        return list(found), np.array(which)

    def blocks(self, option: int, rows: int, split: bool, recompute: bool) -> Blocks:
        key = (option, rows, split, recompute)
        if key not in self._blocks:
            programs, which = self._keys[option]
            suffix = SPLIT if split else ""
            pieces = [self.profile.piece(kind, own + suffix, rows) for kind, own in programs]
            mutates = [self.graph.kinds[kind].mutates for kind, _ in programs]
            columns = [_column(p, recompute and not m)
                       for p, m in zip(pieces, mutates, strict=True)]  # fmt: skip
            self._blocks[key] = Blocks(*np.array(columns).T[:, which])
        return self._blocks[key]

    def params(self, option: int) -> Params:
        """A parameter that several blocks share counts where it is used first."""
        if option not in self._params:
            seen: set[str] = set()
            rows = []
            for block, sharding in zip(self.graph.blocks, self.options[option].shardings,
                                       strict=True):  # fmt: skip
                sizes = [(0.0, 0.0)]
                for slot, name in block.params.items():
                    if name in seen and len(self._users[name]) > 1:
                        continue
                    seen.add(name)
                    info = self.graph.params[name]
                    cut = 1
                    if sharding is not None:
                        cut = parts_of(sharding.mesh, parse_forms(sharding.forms[slot]).value)
                    size = info.num_elements * _item(info.dtype) / cut
                    sizes.append((size, size if info.trainable and not info.buffer else 0.0))
                rows.append((sum(h for h, _ in sizes), sum(t for _, t in sizes),
                             max(t for _, t in sizes), sum(t > 0 for _, t in sizes)))  # fmt: skip
            self._params[option] = Params(*np.array(rows, dtype=float).T)
        return self._params[option]

    @cached_property
    def _users(self) -> dict[str, list[int]]:
        users: dict[str, list[int]] = {}
        for i, block in enumerate(self.graph.blocks):
            for name in block.params.values():
                users.setdefault(name, []).append(i)
        return users

    def sends(self, option: int, rows: int) -> tuple[Array, Array]:
        """Per border: bytes forward, bytes of gradients backward, per device."""
        key = (option, rows)
        if key not in self._sends:
            pairs = [self._crossing(option, values, rows)
                     for values in self._crossings]  # fmt: skip
            ahead, back = np.array(pairs, dtype=float).T
            self._sends[key] = ahead, back
        return self._sends[key]

    @cached_property
    def _crossings(self) -> list[dict[str, TensorInfo]]:
        return self.graph.crossings()

    @cached_property
    def _makers(self) -> dict[str, tuple[int, str]]:
        return {value: (i, slot) for i, block in enumerate(self.graph.blocks)
                for slot, value in block.outputs.items()}  # fmt: skip

    def _crossing(self, option: int, values: dict[str, TensorInfo],
                  rows: int) -> tuple[float, float]:  # fmt: skip
        ahead = back = 0.0
        for value, info in values.items():
            block, slot = self._makers[value]
            sharding = self.options[option].shardings[block]
            cut = 1
            if sharding is not None:
                cut = parts_of(sharding.mesh, parse_forms(sharding.forms[slot]).value)
            size = info.num_bytes(rows) / cut
            ahead += size
            back += size if info.grad else 0.0
        return ahead, back


def _column(piece: Piece, recompute: bool) -> list[float]:
    forward = piece.forward_s + piece.comm_forward_s
    again = forward if recompute else 0.0
    kept = piece.out_bytes if recompute else piece.kept_bytes
    working = max(piece.forward_bytes, piece.backward_bytes)
    return [
        forward,
        piece.backward_s + piece.comm_backward_s + again,
        piece.input_s + piece.comm_backward_s + again,
        piece.weight_s,
        kept,
        working + (piece.kept_bytes if recompute else 0.0),
        piece.out_bytes,
    ]


def _item(dtype: str) -> int:
    return TensorInfo((1,), dtype).num_bytes()


__all__ = ["Blocks", "Params", "Tables"]
