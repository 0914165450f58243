"""How much memory measuring needs, by a bound; and fewer rows where that is more than there is.

Times of more rows are on the line through those that were measured (`BlockCosts.at`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace
from torch import fx

from ..model import ModelGraph
from ..plan import Recompute
from ..profile import BlockNeed
from ..shard.layout import Layouts, parse_forms, parse_layout, parts_of
from ..shard.price import VIEWS, num_bytes
from ..shard.rules import op_name
from ..trace import Traced

COPIES = 3  # copies of a repeated kind, so that weights are not in the cache, as in the model
PART = 0.8  # of a device's memory: the rest is for what fits into no account


class Chain(NamedTuple):
    """Blocks of one kind of plan run after one another, as in a step of it."""

    mesh: tuple[int, ...]
    recompute: Recompute
    compiled: bool
    rows: int


def chain_of(need: BlockNeed) -> Chain:
    mesh = need.sharding.mesh if need.sharding else ()
    return Chain(mesh, need.recompute, need.compiled, need.rows)


def num_copies(graph: ModelGraph, kind: str) -> int:
    return min(COPIES, sum(block.kind == kind for block in graph.blocks))


def capped(needs: Iterable[BlockNeed], traced: Traced, room_bytes: float) -> list[BlockNeed]:
    """The needs, each chain at as many rows as there is room for, at least at one."""
    chains: dict[Chain, list[BlockNeed]] = {}
    for need in needs:
        chains.setdefault(chain_of(need), []).append(need)
    found: dict[BlockNeed, None] = {}
    for chain, own in chains.items():
        rows = chain.rows
        while rows > 1 and chain_bytes([replace(n, rows=rows) for n in own], traced) > room_bytes:
            rows //= 2
        found |= dict.fromkeys(replace(need, rows=rows) for need in own)
    return list(found)


def chain_bytes(needs: Sequence[BlockNeed], traced: Traced) -> float:
    """At most so much is there while the blocks run forward, all of them, and then backward."""
    lasting = working = 0.0
    for need in needs:
        copies = num_copies(traced.graph, need.kind)
        given, made, left = _block_bytes(need, traced)
        lasting += copies * (given + 2 * left + (0.0 if need.recompute is True else made))
        working = max(working, 3 * made if need.recompute else 2 * made)
    return lasting + working


def _block_bytes(need: BlockNeed, traced: Traced) -> tuple[float, float, float]:
    """What a block is given, with gradients (float32 beside bfloat16); what its ops make; and what
    leaves it."""
    given = made = left = 0.0
    for node in traced.programs[need.kind].nodes:
        info = node.meta.get("info")
        if node.op == "placeholder" and not node.name.startswith("c"):
            size = num_bytes(info, need.rows) / _parts(need, node.name)
            given += size * (3 if info.grad else 1)
        elif node.op == "call_function" and op_name(node) not in VIEWS:
            made += num_bytes(info, need.rows) / _parts_made(need, node)
        elif node.op == "output":
            left = sum(num_bytes(y.meta["info"], need.rows) / _parts(need, f"y{k}")
                       for k, y in enumerate(node.args[0]))  # type: ignore[arg-type, misc, union-attr]
    return given, made, left


def _parts(need: BlockNeed, slot: str) -> int:
    if need.sharding is None or slot not in need.sharding.forms:
        return 1
    return parts_of(need.sharding.mesh, parse_forms(need.sharding.forms[slot]).value)


def _parts_made(need: BlockNeed, node: fx.Node) -> int:
    """An op's own text says how its result lies: `S1,R>S1` on each axis."""
    if need.sharding is None or node.name not in need.sharding.ops:
        return 1
    texts = need.sharding.ops[node.name].split(";")
    layouts: Layouts = tuple(parse_layout(text.partition(">")[2]) for text in texts)
    return parts_of(need.sharding.mesh, layouts)
