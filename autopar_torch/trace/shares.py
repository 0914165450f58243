"""Values of a part of the batch that count by the part's share of the rows.

A term of the loss that knows no rows (a penalty on weights) is added once, not once per part. And
where the user allows it, what looks at the whole batch looks at the rows of a part instead; the
parts are joined by their shares, as the mean over replicas is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ..model import ROWS, TensorInfo
from ..shard.layout import PARTIAL, WHOLE, Layout
from ..shard.rows import rows_dim
from ..shard.rules import op_name
from .blocks import TracedBlock
from .clean import aten, info_of

SLOT = "c_num_rows"
_SUMS = "add", "sub", "rsub"
Flow = dict[fx.Node, Layout]


def added_once(piece: TracedBlock, node: fx.Node, flow: Flow, known: Flow, num_rows: str) -> bool:
    """Scale what is added to a sum over the rows and knows none; False if that is not the case."""
    if PARTIAL in [flow.get(value) for value in node.all_input_nodes]:
        _number_as_value(node, known)
    at = [flow.get(value, WHOLE) for value in node.all_input_nodes]
    if op_name(node) not in _SUMS or sorted(map(str, at)) != [PARTIAL, WHOLE]:
        return False
    value = node.all_input_nodes[at.index(WHOLE)]
    node.replace_input_with(value, _scaled(piece, value, node, num_rows))
    known[node] = PARTIAL
    return True


def _number_as_value(node: fx.Node, known: Flow) -> None:
    """`4 - x`: the number as a tensor, which may be scaled."""
    if op_name(node) in _SUMS and len(node.args) == 2 and isinstance(
            node.args[1], (int, float)) and info_of(node.args[0]).is_float:  # type: ignore[arg-type]
        with node.graph.inserting_before(node):
            value = node.graph.call_function(aten.full_like.default, node.args[:2])
        value.meta, known[value] = dict(node.meta), WHOLE
        node.target = getattr(aten, op_name(node)).Tensor
        node.args = (node.args[0], value)


def local(piece: TracedBlock, node: fx.Node, flow: Flow, known: Flow, num_rows: str) -> None:
    """Let an op look at the rows of a part."""
    for value in node.all_input_nodes:
        if flow.get(value) == PARTIAL and info_of(value).is_float:
            node.replace_input_with(value, _scaled(piece, value, node, num_rows, back=True))
    known[node] = _plain_layout(node)


def leaving(piece: TracedBlock, start: Sequence[fx.Node], flow: Flow, known: Flow,
            num_rows: str) -> None:
    """What leaves a block and was made of the rows of a part becomes its share of a sum."""
    seen = set(start)
    for node in list(piece.graph.nodes):
        if node.op == "call_function" and not seen.isdisjoint(node.all_input_nodes):
            seen.add(node)
    end = piece.graph.find_nodes(op="output")[0]
    leaving: Any = end.args[0]
    for value in (n for n in leaving if n in seen):
        if flow.get(value, WHOLE) == WHOLE and _plain_layout(value) == WHOLE \
                and info_of(value).is_float:
            new = _scaled(piece, value, end, num_rows)
            end.replace_input_with(value, new)
            new.meta = {**new.meta, "origin": value.meta.get("origin")}
            known[new] = PARTIAL


def _plain_layout(node: fx.Node) -> Layout:
    info = info_of(node)
    return rows_dim(info.shape) if isinstance(info, TensorInfo) else WHOLE


def _scaled(piece: TracedBlock, value: fx.Node, before: fx.Node, num_rows: str,
            back: bool = False) -> fx.Node:
    """The value times the part's share of the rows, or back: divided by it."""
    slot = next((n for n in piece.graph.find_nodes(op="placeholder") if n.target == SLOT), None)
    if slot is None:
        with piece.graph.inserting_before(next(iter(piece.graph.nodes))):
            slot = piece.graph.placeholder(SLOT)
        slot.meta = {"info": TensorInfo((), "float32")}
        fill(piece, num_rows)
    with piece.graph.inserting_before(before):
        first, last = (aten.mul, aten.div) if back else (aten.div, aten.mul)
        one = piece.graph.call_function(first.Tensor, (value, slot))
        two = piece.graph.call_function(last.Tensor, (one, ROWS))
    one.meta, two.meta = dict(value.meta), dict(value.meta)
    return two


def fill(piece: TracedBlock, num_rows: str) -> None:
    """Blocks of one kind have the same slots."""
    piece.context[SLOT] = num_rows
    piece.infos[SLOT] = TensorInfo((), "float32")
