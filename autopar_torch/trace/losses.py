"""Means over the batch become sums divided by a number of the whole batch.

A mean of means is not the mean when rows count differently (ignored labels), so the part of a
micro-batch or of a replica is its sum over the denominator of the global batch.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from ..model import ROWS, TensorInfo
from ..shard import loss_sums
from .clean import aten, has_rows, info_of, schema_name

_MEAN, _SUM = 1, 2
# Losses whose mean is the plain mean of their values. Others weigh them, by class or by length.
_MEANS = ("binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss",
          "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss",
          "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "poisson_nll_loss",
          "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss")


def rewrite(graph: fx.Graph, batch: list[fx.Node]) -> None:
    """Rewrite every loss whose mean goes over rows; `batch` are the inputs that have rows."""
    for node in list(graph.nodes):
        name = schema_name(node).removeprefix("aten::")
        if name == "cross_entropy_loss" and _has_rows(node.args[0]):
            _cross_entropy(graph, node, batch)
        elif name in ("nll_loss", "nll_loss_nd") and _has_rows(node.args[0]):
            _summed(graph, node, batch)
        elif name == "mean" and info_of(node).shape == () and _has_rows(node.args[0]):
            _mean(graph, node, node.args[0], batch)
        elif name == "mean" and _has_rows(node.args[0]) and not _has_rows(node):
            _mean_over_dims(graph, node, batch)
        elif _reduction(node) in (_MEAN, _SUM) and _has_rows(node.args[0]):
            _by_element(graph, node, batch)
        elif batch and rows_in(node)[0]:
            _scaled(graph, node, batch)
    graph.lint()


def _has_rows(node: Any) -> bool:
    info = info_of(node) if isinstance(node, fx.Node) else None
    return isinstance(info, TensorInfo) and has_rows(info)


def _reduction(node: fx.Node) -> int | None:
    """The `reduction` of a loss op, None where it has none."""
    if schema_name(node).removeprefix("aten::") not in _MEANS or not isinstance(
        node.target, OpOverload
    ):
        return None
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == "reduction":
            given: Any = node.kwargs.get("reduction", argument.default_value)
            return int(cast(Any, node.args[i]) if len(node.args) > i else given)
    return None


def rows_in(node: fx.Node) -> tuple[int, bool]:
    """How many times the number of rows a value is multiplied or divided by, and whether divided:
    `x / y.shape[0]`, or `x * (1 / y.shape[0])` where Python has divided. 0 if it is not."""
    name = schema_name(node)
    if name not in ("aten::div", "aten::mul") or len(node.args) != 2 or node.kwargs or (
            not _is_float(node.args[0])):
        return 0, False
    number, divides = node.args[1], name == "aten::div"
    if not isinstance(number, (int, float)) or not number or not math.isfinite(number):
        return 0, False
    if number % ROWS == 0:
        return int(number) // ROWS, divides
    times = round(1 / (number * ROWS))
    return (times, not divides) if times and number == 1 / (times * ROWS) else (0, False)


def _is_float(value: Any) -> bool:
    info = info_of(value) if isinstance(value, fx.Node) else None
    return isinstance(info, TensorInfo) and "float" in info.dtype


def _scaled(graph: fx.Graph, node: fx.Node, batch: list[fx.Node]) -> None:
    """What a user scales by the size of the batch is scaled by that of the whole one."""
    count, divides = rows_in(node)
    with graph.inserting_before(node):
        number = _number(graph, node, loss_sums.count_values, batch[0], count)
        op = aten.div.Tensor if divides else aten.mul.Tensor
        new = graph.call_function(op, (node.args[0], number))
    _replace(graph, node, new)


def _cross_entropy(graph: fx.Graph, node: fx.Node, batch: list[fx.Node]) -> None:
    defaults: tuple[Any, ...] = (None, None, None, _MEAN, -100, 0.0)
    given: tuple[Any, ...] = node.args + defaults[len(node.args) :]
    logits, target, weight, reduction, ignore, smoothing = given
    if reduction not in (_MEAN, _SUM):
        return
    if info_of(target).shape == info_of(logits).shape:  # type: ignore[arg-type]
        _summed(graph, node, batch)
        return
    with graph.inserting_before(node):
        count = (_number(graph, node, loss_sums.count_labels, target, weight, ignore)
                 if reduction == _MEAN else None)
        new = graph.call_function(
            loss_sums.cross_entropy, (logits, target, count, weight, ignore, smoothing))
    _replace(graph, node, new)


def _summed(graph: fx.Graph, node: fx.Node, batch: list[fx.Node]) -> None:
    """A mean of one loss for each label, or each distribution, as a sum over their number."""
    defaults: tuple[Any, ...] = (None, None, None, _MEAN, -100)
    values, target, weight, reduction, ignore, *rest = node.args + defaults[len(node.args):]
    if reduction != _MEAN:
        return
    shape = info_of(cast(fx.Node, values)).shape
    with graph.inserting_before(node):
        if info_of(cast(fx.Node, target)).shape == shape:
            count = _number(graph, node, loss_sums.count_values, batch[0],
                            math.prod(shape) // shape[len(shape) > 1] // ROWS)
        else:
            count = _number(graph, node, loss_sums.count_labels, target, weight, ignore)
        total = graph.call_function(node.target, (  # type: ignore[arg-type]
            values, target, weight, _SUM, ignore, *rest))
        total.meta = dict(node.meta)
        new = graph.call_function(aten.div.Tensor, (total, count))
    _replace(graph, node, new)


def _mean_over_dims(graph: fx.Graph, node: fx.Node, batch: list[fx.Node]) -> None:
    values, *dims = cast(Any, node.args)
    per_row = math.prod(info_of(values).shape) // max(1, math.prod(info_of(node).shape)) // ROWS
    with graph.inserting_before(node):
        count = _number(graph, node, loss_sums.count_values, batch[0], per_row)
        total = graph.call_function(aten.sum.dim_IntList, (values, *dims), dict(node.kwargs))
        total.meta = dict(node.meta)
        new = graph.call_function(aten.div.Tensor, (total, count))
    _replace(graph, node, new)


def _mean(graph: fx.Graph, node: fx.Node, values: Any, batch: list[fx.Node]) -> None:
    per_row = math.prod(info_of(values).shape) // ROWS
    with graph.inserting_before(node):
        count = _number(graph, node, loss_sums.count_values, batch[0], per_row)
        new = graph.call_function(loss_sums.mean_over_rows, (values, count))
    _replace(graph, node, new)


def _by_element(graph: fx.Graph, node: fx.Node, batch: list[fx.Node]) -> None:
    """reduction="mean" of an elementwise loss: its values, then their mean over the batch."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    kwargs = dict(node.kwargs)
    args = list(node.args)
    place = names.index("reduction")
    if len(args) > place:
        args[place] = 0
    else:
        kwargs["reduction"] = 0
    with graph.inserting_before(node):
        values = graph.call_function(node.target, tuple(args), kwargs)  # type: ignore[arg-type]
        values.meta = {**node.meta, "info": TensorInfo(_shape(values), info_of(node).dtype)}
        joint = aten.mean if _reduction(node) == _MEAN else aten.sum
        mean = graph.call_function(joint.default, (values,))
        mean.meta = dict(node.meta)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)
    if joint is aten.mean:
        _mean(graph, mean, values, batch)


def _number(graph: fx.Graph, node: fx.Node, op: Any, *args: Any) -> fx.Node:
    """A number of the whole batch, for what `node` becomes."""
    made = graph.call_function(op, args)
    made.meta = {"info": TensorInfo((), "float32"), "module": node.meta["module"]}
    return made


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Shape of the values of a loss: one value for each element, or one for each row."""
    empty = {n: torch.empty(info_of(n).shape, dtype=getattr(torch, info_of(n).dtype), device="meta")
             for n in node.all_input_nodes}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), empty.__getitem__)
    with torch.device("meta"):
        return tuple(node.target(*args, **kwargs).shape)  # type: ignore[operator, arg-type]


def _replace(graph: fx.Graph, node: fx.Node, new: fx.Node) -> None:
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
