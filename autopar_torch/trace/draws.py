"""Numbers that are drawn in the shape of a parameter need the shape alone.

So they are drawn before the blocks, once for the whole batch: all rows, wherever they are, see the
same noise in a weight, and the same of its elements dropped.
"""

from __future__ import annotations

import torch
from torch import fx

from ..shard.rules import is_random, op_name
from .clean import aten, has_rows, info_of

_AS_LARGE = {f"{name}_like" for name in ("rand", "randn", "randint", "zeros", "ones", "empty",
                                         "full")} | {
    f"new_{name}" for name in ("zeros", "ones", "empty", "full")}


def loosen(graph: fx.Graph) -> None:
    """Of what has no rows: `randn_like(w)` is of a tensor as large, `dropout(w)` is w times that of
    ones."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.all_input_nodes or has_rows(info_of(node)):
            continue
        if op_name(node) in _AS_LARGE and any(map(is_random, (node, *node.users))):
            node.update_arg(0, _ones(graph, node, node.all_input_nodes[0]))
        elif op_name(node) in ("dropout", "feature_dropout") and is_random(node):
            value = node.all_input_nodes[0]
            with graph.inserting_after(node):
                times = graph.call_function(aten.mul.Tensor, (value, node))
            times.meta = dict(node.meta)
            node.replace_all_uses_with(times, lambda user, own=times: user is not own)
            node.update_arg(0, _ones(graph, node, value))


def _ones(graph: fx.Graph, before: fx.Node, like: fx.Node) -> fx.Node:
    info = info_of(like)
    with graph.inserting_before(before):
        made = graph.call_function(aten.ones.default, (list(info.shape),), {
            "dtype": getattr(torch, info.dtype), "device": torch.device("cpu")})
    made.meta = {"info": info, "module": before.meta.get("module", "")}
    return made
