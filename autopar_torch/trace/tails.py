"""Where logits are made last: `view(linear(x))` becomes `linear(view(x))`.

So nothing but a product lies between the rows of a loss and their logits, which shard/by_rows.py
then need not hold all at once. Views and slices of rows move; what is done to each number stays.
"""

from __future__ import annotations

from typing import cast

from torch import fx

from ..model import TensorInfo
from ..shard.by_rows import between, is_by_element, is_product, would_pay
from ..shard.loss_sums import cross_entropy
from ..shard.rules import op_name
from .clean import aten, info_of

_VIEWS = {"view", "reshape", "_unsafe_view", "flatten", "contiguous", "slice"}


def straighten(graph: fx.Graph) -> None:
    """Rewrite the logits of each loss that may be worth it."""
    for loss in [node for node in graph.nodes if node.target is cross_entropy]:
        if found := _behind(loss):
            _straighten(graph, *found, loss)


def _behind(loss: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The product that makes the logits, and what is done to them, in order."""
    node, passed = cast(fx.Node, loss.args[0]), list[fx.Node]()
    width = info_of(node).shape[-1]
    while len(node.users) == 1 and info_of(node).shape[-1:] == (width,):
        if is_product(node):
            return (node, passed[::-1]) if would_pay(node) else None
        if not (_is_view(node) or is_by_element(node)):
            return None
        passed.append(node)
        node = cast(fx.Node, node.args[0])
    return None


def _is_view(node: fx.Node) -> bool:
    """Whether it only lays rows out anew, or takes some of them."""
    name, rank = op_name(node), len(info_of(node).shape)
    cut = cast(int, node.args[1]) % rank if name == "slice" and len(node.args) > 1 else 0
    return name in _VIEWS and cut != rank - 1


def _straighten(graph: fx.Graph, product: fx.Node, passed: list[fx.Node], loss: fx.Node) -> None:
    x = cast(fx.Node, product.args[0])
    for node in filter(_is_view, passed):
        shape = (*info_of(node).shape[:-1], info_of(x).shape[-1])
        with graph.inserting_before(product):
            if op_name(node) in ("slice", "contiguous"):
                new = graph.call_function(node.target, (x, *node.args[1:]), node.kwargs)  # type: ignore[arg-type]
            else:
                new = graph.call_function(aten.reshape.default, (x, list(shape)))
        new.meta = {**product.meta, "info": TensorInfo(shape, info_of(x).dtype)}
        node.replace_all_uses_with(cast(fx.Node, node.args[0]))
        graph.erase_node(node)
        x = new
    product.args = (x, *product.args[1:])
    rows = info_of(x).shape[:-1]
    for node in (product, *(n for n in passed if not n._erased)):
        info = info_of(node)
        node.meta["info"] = TensorInfo((*rows, info.shape[-1]), info.dtype)
    for node in between(product, loss):
        node.meta["module"] = product.meta["module"]  # all of it is one block
