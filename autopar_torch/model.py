"""ModelGraph: the traced model as a chain of blocks; equal blocks share a kind.

Sizes are written for a batch of `ROWS` rows, a large prime. Whatever is divisible by it grows with
the batch, whatever is not does not, so one trace serves every micro-batch size (`at_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

ROWS = 1_000_003
_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2,
               "complex64": 8, "complex128": 16, "int16": 2}


def item_bytes(dtype: str) -> int:
    return _ITEM_BYTES.get(dtype, 1)


def leaf_type(dtype: str, precision: str) -> str:
    """The type of what forward reads of a parameter: what ZeRO gathers is of that type."""
    is_float = dtype.startswith(("float", "bfloat"))
    return precision if precision == "bfloat16" and is_float else dtype


def at_rows(size: int, rows: int) -> int:
    """A size of the trace, for a batch of so many rows."""
    return at_rows(size // ROWS, rows) * rows if size and size % ROWS == 0 else size


class TensorInfo(Struct, frozen=True):
    """Shape (in trace sizes) and type of a value; `grad` says whether a gradient flows back."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool = False

    def at(self, rows: int) -> tuple[int, ...]:
        return tuple(at_rows(size, rows) for size in self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))

    @property
    def rows_dim(self) -> int | None:
        """The first dim that grows with the batch."""
        return next((d for d, s in enumerate(self.shape) if s and s % ROWS == 0), None)

    def num_bytes(self, rows: int = 1) -> int:
        return math.prod(self.at(rows)) * item_bytes(self.dtype)


class Kind(Struct, frozen=True):
    """What equal blocks share: slots in order of first use, and the work of one row."""

    name: str
    inputs: dict[str, TensorInfo]  # values of earlier blocks
    context: dict[str, TensorInfo]  # values of the prologue and of the batch
    params: dict[str, TensorInfo]  # parameters and buffers
    outputs: dict[str, TensorInfo]
    num_ops: int
    flops_per_row: float
    couples_rows: tuple[str, ...] = ()  # ops that look at several rows at once (batch statistics)
    tested: tuple[str, ...] = ()  # such ops of which a test found that rows are independent outside
    local: tuple[str, ...] = ()  # such ops that see the rows of a part only, as the user allows
    why_coupled: str = ""  # what the test found
    mutates: bool = False  # has side effects on buffers
    joined: tuple[str, ...] = ()  # of `couples_rows`: what replicas do together, but batch_norm

    @property
    def runs_once(self) -> bool:
        """Whether it must not be computed again, for its side effects or what it exchanges."""
        return self.mutates or bool(self.joined)


class Block(Struct, frozen=True):
    """One link of the chain: its kind, and what fills the kind's slots."""

    name: str
    kind: str
    inputs: dict[str, str]
    context: dict[str, str]
    params: dict[str, str]
    outputs: dict[str, str]


class ParamInfo(Struct, frozen=True):
    """A parameter or buffer under its first name; `aliases` are further names of the same one."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    buffer: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class ModelGraph(Struct, frozen=True, dict=True):
    """The chain, its kinds, its parameters, and the names of what it returns."""

    kinds: dict[str, Kind]
    blocks: tuple[Block, ...]
    params: dict[str, ParamInfo]
    outputs: dict[str, str]  # name ("loss", "logits") -> value
    replicated_ops: tuple[str, ...] = ()  # ops without a splitting rule, for the report
    summed: tuple[str, ...] = ()  # outputs that are sums over the rows
    couples_rows: tuple[str, ...] = ()  # ops on the batch, before any parameter, that mix its rows
    given: dict[str, TensorInfo] = {}  # values of the batch that get gradients; no block makes them

    @property
    def coupled(self) -> tuple[str, ...]:
        """Every op, of a block or before all blocks, that looks at several rows at once."""
        found = {op for kind in self.kinds.values() for op in kind.couples_rows}
        return tuple(sorted(found | set(self.couples_rows)))

    @property
    def unjoined(self) -> tuple[str, ...]:
        """The coupled ops that replicas cannot do together."""
        joined = {"batch_norm"}.union(*(kind.joined for kind in self.kinds.values()))
        return tuple(op for op in self.coupled if op not in joined)

    @property
    def tested(self) -> tuple[str, ...]:
        """Ops that couple rows inside; rows tried together and apart gave the same."""
        return tuple(sorted({op for kind in self.kinds.values() for op in kind.tested}))

    @property
    def local(self) -> tuple[str, ...]:
        """Ops that look at the rows of a replica and micro-batch, not at the batch."""
        return tuple(sorted({op for kind in self.kinds.values() for op in kind.local}))

    def part_of(self, kinds: Collection[str]) -> float:
        """The part of all operations that blocks of these kinds do."""
        each = [(block.kind, self.kinds[block.kind].flops_per_row) for block in self.blocks]
        return sum(x for kind, x in each if kind in kinds) / (sum(x for _, x in each) or 1)

    def named(self, kinds: Collection[str]) -> str:
        """The kinds as a user knows them: each by the first block of it."""
        return ", ".join(self._first[kind] for kind in self.kinds if kind in kinds)

    @cached_property
    def _first(self) -> dict[str, str]:
        return {block.kind: block.name for block in reversed(self.blocks)}

    def coupling(self) -> str:
        """Which ops look at several rows at once, in which block, and how that was found."""
        said = [f"{', '.join(kind.couples_rows)} in {self._first[name]}"
                + (f" ({kind.why_coupled})" if kind.why_coupled else "")
                for name, kind in self.kinds.items() if kind.couples_rows]
        said += [f"{', '.join(self.couples_rows)} before all blocks"] if self.couples_rows else []
        return "; ".join(said)

    @property
    def writes(self) -> tuple[str, ...]:
        """Kinds that change buffers: once a step, so they have one micro-batch."""
        return tuple(name for name, kind in self.kinds.items() if kind.mutates)

    @cached_property
    def rewritten(self) -> set[str]:
        """Buffers that only blocks see that change them. These run once, so no backward reads
        them again."""
        seen: dict[bool, set[str]] = {True: set(), False: set()}
        for block in self.blocks:
            seen[self.kinds[block.kind].mutates].update(block.params.values())
        return {name for name in seen[True] - seen[False] if self.params[name].buffer}

    @property
    def written(self) -> set[str]:
        """Buffers that some block may change."""
        return {name for block in self.blocks if self.kinds[block.kind].mutates
                for name in block.params.values() if self.params[name].buffer}

    def training_all_but(self, frozen: Container[str]) -> ModelGraph:
        """The same model, of which these parameters are frozen."""
        return replace(self, params={
            name: info if info.buffer else replace(info, trainable=name not in frozen)
            for name, info in self.params.items()})

    def kind_of(self, block: int) -> Kind:
        return self.kinds[self.blocks[block].kind]

    def leading_to(self, outputs: Iterable[str]) -> set[str]:
        """Values that some of what the model returns is made of, and these outputs themselves."""
        found = {self.outputs[name] for name in outputs}
        for block in reversed(self.blocks):
            if not found.isdisjoint(block.outputs.values()):
                found.update(block.inputs.values())
        return found

    def crossing(self, border: int) -> dict[str, TensorInfo]:
        """Values made before block `border` and used in or after it, in order of making; those that
        are given are among them. After the last block those that are returned are used."""
        if border < len(self.blocks):
            return self.crossings()[border]
        returned = set(self.outputs.values())
        made = {v: self.kinds[block.kind].outputs[slot] for block in self.blocks
                for slot, v in block.outputs.items()}
        return {v: info for v, info in (self.given | made).items() if v in returned}

    def crossings(self) -> list[dict[str, TensorInfo]]:
        """`crossing` of every border from 0 to the number of blocks, in one pass."""
        end = len(self.blocks)
        last = {v: i for i, block in enumerate(self.blocks) for v in block.inputs.values()}
        last |= dict.fromkeys(self.outputs.values(), end - 1)
        open_, found = self.given, [self.given]
        for i, block in enumerate(self.blocks):
            infos = self.kinds[block.kind].outputs
            open_ = open_ | {v: infos[slot] for slot, v in block.outputs.items()}
            open_ = {v: info for v, info in open_.items() if last.get(v, -1) > i}
            found.append(dict(open_))
        return found

    def users(self, param: str) -> list[int]:
        """Blocks that read a parameter."""
        return self._users.get(param, [])

    @cached_property
    def _users(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, block in enumerate(self.blocks):
            for param in dict.fromkeys(block.params.values()):
                found.setdefault(param, []).append(i)
        return found

    @property
    def unread(self) -> list[str]:
        """Parameters and buffers that no block reads: those of a branch not taken."""
        return [name for name in self.params if name not in self._users]

    def params_of(self, first: int, last: int) -> list[str]:
        """Parameters and buffers of a range of blocks, each once, in order of use."""
        names = (name for block in self.blocks[first:last] for name in block.params.values())
        return list(dict.fromkeys(names))
