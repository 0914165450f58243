"""Numbers that forward takes out of tensors (`x.sum().item()`) stay tensors in a trace."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..errors import TraceError
from ..model import TensorInfo
from ..shard.rules import is_mutable, op_name

aten = torch.ops.aten
Make = Callable[..., fx.Node]


def keep(graph: fx.Graph) -> None:
    """Rewrite what is computed with such numbers; who reads them gets them in its own type."""
    numbers = dict[fx.Node, fx.Node]()
    _drop_unread(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not (
                node.target is aten.item.default or numbers.keys() & {*node.all_input_nodes}):
            continue

        def call(target: Any, *args: Any, like: fx.Node = node) -> fx.Node:
            with graph.inserting_before(like):
                made = graph.call_function(target, args)
            made.meta = {**like.meta, "memory": frozenset(), "info": _info(made)}
            return made

        if node.meta["info"] is not None:
            _give(node, numbers, call)
        elif node.users:
            numbers[node] = _tensor(node, [numbers.get(a, a) for a in node.args], call)  # type: ignore[arg-type, call-overload]
    for number, value in numbers.items():
        graph.output_node().replace_input_with(number, value)
    _drop_unread(graph)


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.meta["info"] is None and not (
                node.users or is_mutable(node)):
            graph.erase_node(node)


def _tensor(node: fx.Node, args: list[Any], call: Make) -> fx.Node:
    """What a number is, as a tensor. In Python it is one of 64 bits."""
    (first, *rest), target = args, node.target
    if target is aten.item.default:
        floats = getattr(torch, first.meta["info"].dtype).is_floating_point
        return call(aten.to.dtype, call(aten.detach.default, call(aten.view.default, first, [])),
                    torch.float64 if floats else torch.int64)
    if target in (torch.sym_float, operator.neg):
        return call(*((aten.neg.default, first) if target is operator.neg
                      else (aten.to.dtype, first, torch.float64)))
    if target is torch.sym_not:
        return call(aten.logical_not.default, first)
    if target in _BOTH:
        plain, of_tensors = _BOTH[target]
        if not isinstance(first, fx.Node):
            first, rest = rest[0], [first]
            if (turned := _TURNED.get(op_name(node))) is not None:
                plain = getattr(aten, turned).Scalar
        return call(of_tensors if isinstance(rest[0], fx.Node) else plain, first, *rest)
    if target is operator.sub:
        return call(aten.sub.Tensor, *args) if isinstance(first, fx.Node) else call(
            aten.rsub.Scalar, *rest, first)
    if target is operator.truediv:
        exact = [call(aten.to.dtype, a, torch.float64) if isinstance(a, fx.Node) else a
                 for a in args]
        return call(aten.div.Tensor, *exact) if isinstance(first, fx.Node) else call(
            aten.mul.Tensor, call(aten.reciprocal.default, exact[1]), first)
    raise _refusal(node)


_TURNED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
_BOTH = {torch.sym_max: (aten.clamp_min.default, aten.maximum.default),
         torch.sym_min: (aten.clamp_max.default, aten.minimum.default),
         operator.add: (aten.add.Tensor, aten.add.Tensor),
         operator.mul: (aten.mul.Tensor, aten.mul.Tensor),
         **{getattr(operator, name): (getattr(aten, name).Scalar, getattr(aten, name).Tensor)
            for name in _TURNED}}


def _give(node: fx.Node, numbers: dict[fx.Node, fx.Node], call: Make) -> None:
    """A pointwise op reads a tensor in the place of a number. Half precision has too few digits."""
    kind = getattr(torch, node.meta["info"].dtype) if isinstance(
        node.meta["info"], TensorInfo) else torch.bool
    places = [str(a.type) for a in node.target._schema.arguments]  # type: ignore[union-attr]
    args = list(node.args)
    for k, own in enumerate(node.args):
        if own in numbers:
            if places[k] != "Tensor" or kind not in (torch.float32, torch.float64) or (
                    torch.Tag.pointwise not in node.target.tags):  # type: ignore[union-attr]
                raise _refusal(node)
            args[k] = call(aten.to.dtype, numbers[own], kind)  # type: ignore[index]
    node.args = tuple(args)
    if numbers.keys() & {*node.all_input_nodes}:
        raise _refusal(node)


def _info(node: fx.Node) -> TensorInfo:
    """Of a tensor without dims."""
    empty = {n: torch.empty((), dtype=getattr(torch, n.meta["info"].dtype), device="meta")
             for n in node.all_input_nodes}
    made = node.target(*fx.node.map_arg(node.args, empty.__getitem__))  # type: ignore[operator]
    return TensorInfo((), str(made.dtype).removeprefix("torch."))


def _refusal(node: fx.Node) -> TraceError:
    return TraceError(f"{op_name(node)} takes a number out of the data",
                      where=node.meta.get("line") or "forward",
                      fix="keep it as a tensor, without item()")
