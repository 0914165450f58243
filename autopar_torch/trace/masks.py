"""What attention can do without: masks that only say "causal", and keys repeated for each query.

A fused kernel needs neither, and is refused where it gets them: a mask is as large as the square of
the sequence. A mask that depends on no value of the batch is computed here, once, and looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..shard.rules import ShapedOp, is_mutable, is_random, op_name
from .apart import run
from .clean import info_of, largest
from .tiles import Tiles

log = logging.getLogger("autopar_torch")
aten = torch.ops.aten
NUM_ROWS = 2
MOST_ELEMENTS = 1 << 26  # of any value behind a mask, at a time
WIDEST = 256  # heads of more numbers have no fused kernel that takes groups
ATTENTION = "scaled_dot_product_attention"
# Ops whose result does not depend on the values of their input.
_SHAPED = {"new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"}
_FLAT = ("reshape", "view", "_unsafe_view")
Fixed = Mapping[fx.Node, Tensor]  # placeholders whose values are known


def settle(graph: fx.Graph, known: Fixed) -> None:
    """Rewrite each attention of a flat graph."""
    meanings: dict[fx.Node, bool | None] = {}
    for node in [node for node in graph.nodes if op_name(node) == ATTENTION]:
        mask = ShapedOp(node).arg(3, "attn_mask")
        if mask is not None and mask not in meanings:
            meanings[mask] = _is_causal(mask, _lengths(node), known)
        if mask is not None and (causal := meanings[mask]) is not None:
            _unmask(node, causal)
        if ShapedOp(node).arg(3, "attn_mask") is None:
            _group(node)


def all_ones(node: fx.Node) -> Tensor:
    """The value of an input that is known to hold ones only."""
    return torch.ones(info_of(node).at(NUM_ROWS), dtype=_dtype(node), device="cpu")


def _dtype(node: fx.Node) -> torch.dtype:
    found: torch.dtype = getattr(torch, info_of(node).dtype)
    return found


def _lengths(node: fx.Node) -> tuple[int, int]:
    """Of the queries and of the keys."""
    q, k = (info_of(arg).shape[-2] for arg in node.args[:2])  # type: ignore[arg-type]
    return q, k


# --- masks ----------------------------------------------------------------------------------------


def _is_causal(mask: fx.Node, lengths: tuple[int, int], known: Fixed) -> bool | None:
    """True: it is the causal mask; False: it hides nothing; None: it is needed."""
    while op_name(mask) == "expand":  # what is expanded says it all
        mask = mask.args[0]  # type: ignore[assignment]
    behind = _behind(mask, known)
    if behind is None:
        return None
    try:
        with torch.no_grad():
            return _meaning(*behind, mask, lengths)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        log.debug("a mask does not run: %s", error)
        return None


def _meaning(graph: fx.Graph, given: dict[str, Tensor], mask: fx.Node,
             lengths: tuple[int, int]) -> bool | None:
    large = {node.name for node in graph.nodes if largest(node, NUM_ROWS) > MOST_ELEMENTS}
    if large:
        return _by_tiles(Tiles(graph, given, NUM_ROWS, large, lengths))
    shown, hidden = _says(run(graph, given, NUM_ROWS, {mask.name})[mask.name])
    if shown.all():
        return False
    return True if (shown | hidden).all() and _is_lower(shown, lengths) else None


def _by_tiles(tiles: Tiles) -> bool | None:
    shown, hidden = map(torch.logical_and, *map(_says, tiles.bounds()))
    if shown.all():
        return False
    ahead = torch.ones(shown.shape[-2:], dtype=torch.bool, device="cpu").triu(1)
    if not (shown | ~ahead.mT).all() or not (hidden | ~ahead).all():
        return None
    found = map(_says, tiles.on_diagonal())
    return True if all((shown | hidden).all() and _is_lower(shown, shown.shape[-2:])
                       for shown, hidden in found) else None


def _says(mask: Tensor) -> tuple[Tensor, Tensor]:
    """What it surely shows, and what it surely hides."""
    if mask.dtype == torch.bool:
        return mask, ~mask
    return mask == 0.0, mask <= torch.finfo(mask.dtype).min


def _is_lower(shown: Tensor, lengths: Sequence[int]) -> bool:
    """Whether it shows of keys those up to the query."""
    square = len({*lengths, *shown.shape[-2:]}) == 1 and shown.dim() > 1
    return square and bool((shown == torch.ones_like(shown).tril()).all())


def _behind(mask: fx.Node, known: Fixed) -> tuple[fx.Graph, dict[str, Tensor]] | None:
    """What computes a mask, and the values that it starts from; None if it depends on others."""
    leaves: dict[fx.Node, Tensor] = {}
    inner: set[fx.Node] = set()
    stack = [mask]
    while stack:
        node = stack.pop()
        if node in known:
            leaves[node] = known[node]
        elif node.op != "call_function" or is_mutable(node) or is_random(node):
            return None
        elif node not in inner:
            inner.add(node)
            before = node.all_input_nodes
            if op_name(node) in _SHAPED:
                leaves |= {n: _blank(n) for n in before if n not in known}
            else:
                stack += before
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in mask.graph.nodes:
        if node in inner:
            made[node] = graph.node_copy(node, made.__getitem__)
        elif node in leaves:
            made[node] = graph.placeholder(node.name)
        if node in made:
            made[node].name, made[node].meta = node.name, node.meta
    return graph, {node.name: value for node, value in leaves.items() if node not in inner}


def _blank(node: fx.Node) -> Tensor:
    """Of the right shape, without memory for it."""
    return torch.zeros((), dtype=_dtype(node), device="cpu").expand(info_of(node).at(NUM_ROWS))


def _unmask(node: fx.Node, causal: bool) -> None:
    op = ShapedOp(node)
    dropout = op.arg(4, "dropout_p", 0.0)
    rest = {k: v for k, v in node.kwargs.items()
            if k not in ("attn_mask", "dropout_p", "is_causal")}
    node.args, node.kwargs = (*node.args[:3], None, dropout, causal), rest


# --- groups of queries with one key ---------------------------------------------------------------


def _group(node: fx.Node) -> None:
    """Keys and values as they are before each is repeated for its group of queries."""
    if node.kwargs.get("enable_gqa"):
        return
    key, value = map(_unrepeated, node.args[1:3])
    if key is None or value is None:
        return
    shape = info_of(key).shape
    if shape == info_of(value).shape and shape[-1] <= WIDEST:
        node.args = (node.args[0], key, value, *node.args[3:])
        node.kwargs = {**node.kwargs, "enable_gqa": True}


def _unrepeated(node: Any) -> fx.Node | None:
    """(batch, heads, length, size) before its heads were repeated, each for a run of others."""
    if op_name(node) == "transpose" and {d % 4 for d in node.args[1:]} == {1, 2}:
        if (before := _unrepeated_at(node.args[0], 2)) is None:
            return None
        with node.graph.inserting_before(node):
            new: fx.Node = node.graph.call_function(aten.transpose.int, (before, 1, 2))
        shape = info_of(before).shape
        info = type(info_of(before))((shape[0], shape[2], shape[1], shape[3]),
                                     info_of(before).dtype)
        new.meta = {**node.meta, "info": info}
        return new
    return _unrepeated_at(node, 1)


def _unrepeated_at(node: fx.Node, dim: int) -> fx.Node | None:
    shape = info_of(node).shape
    if len(shape) != 4 or node.op != "call_function":
        return None
    if op_name(node) == "repeat_interleave" and node.args[2:3] == (dim,):
        return node.args[0] if isinstance(node.args[1], int) else None  # type: ignore[return-value]
    wide = node.args[0]
    if op_name(node) not in _FLAT or op_name(wide) != "expand":  # type: ignore[arg-type]
        return None
    narrow: Any = wide.args[0]  # type: ignore[union-attr]
    if op_name(narrow) != "unsqueeze" or narrow.args[1] % 5 != dim + 1:
        return None
    before: fx.Node = narrow.args[0]
    own, grown = info_of(before).shape, info_of(wide).shape  # type: ignore[arg-type]
    copies = grown[dim + 1]
    repeated = (*own[: dim + 1], copies, *own[dim + 1 :])
    return before if grown == repeated and shape == (
        *own[:dim], own[dim] * copies, *own[dim + 1 :]) else None
