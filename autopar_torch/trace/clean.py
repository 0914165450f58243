"""Make the captured graph plain: no nested graphs, no ops that do nothing."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ..errors import TraceError
from ..model import TensorInfo
from ..shard.rules import is_mutable, op_name
from . import items
from .autocast import spell_out
from .capture import Captured, line_of, module_path
from .effects import refuse_sparse

log = logging.getLogger("autopar_torch")
aten = torch.ops.aten
_LIKE: dict[Any, Any] = {
    aten.view_as.default: aten.view.default, aten.reshape_as.default: aten.reshape.default,
    aten.expand_as.default: aten.expand.default,
}
_SPARSE = {"embedding": 4, "embedding_bag": 5}  # the argument that asks for sparse gradients
_CASTS = ("aten::to", "aten::alias", "aten::type_as")
_DROPOUTS = ("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout",
             "aten::feature_alpha_dropout")


def info_of(node: fx.Node) -> Any:
    """TensorInfo of a node's value; a tuple of them for several; None for what is no tensor."""
    return node.meta.get("info")


def each_info(info: Any) -> list[TensorInfo]:
    """Of one value, or of several; nothing of what is no tensor."""
    infos = info if isinstance(info, tuple) else (info,)
    return [own for own in infos if isinstance(own, TensorInfo)]


def has_rows(info: Any) -> bool:
    """Whether a value, or one of several, grows with the batch."""
    return any(i.rows_dim is not None for i in each_info(info))


def largest(node: fx.Node, num_rows: int) -> int:
    """Elements of the largest that it makes, for so many rows."""
    return max((torch.Size(i.at(num_rows)).numel() for i in each_info(info_of(node))), default=0)


def _info(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorInfo(tuple(value.shape), str(value.dtype).removeprefix("torch."))
    if isinstance(value, (tuple, list)):
        return tuple(_info(v) for v in value)
    return None


def _memory(value: Any, line: str) -> frozenset[int]:
    """Of one tensor or of several: equal numbers are the same memory, as the graph keeps them."""
    tensors = [t for t in (value if isinstance(value, (tuple, list)) else (value,))
               if isinstance(t, torch.Tensor)]
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        raise TraceError("torch.func (vmap, grad, jvp) cannot be traced", where=line or "forward",
                         fix="write it out for the whole batch")
    refuse_sparse(tensors, line)
    return frozenset(t.untyped_storage()._cdata for t in tensors)


def schema_name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""


def flatten(captured: Captured) -> fx.Graph:
    """A new graph of plain ops, with a TensorInfo on every node and the memory that it shows."""
    graph = fx.Graph()
    params = frozenset(n for n, source in captured.sources.items() if source.kind == "param")
    graph.output(_copy(graph, captured.module, {}, params, captured.autocast))
    items.keep(graph)
    _say_sizes(graph)
    return graph


def _copy(graph: fx.Graph, module: Any, env: dict[fx.Node, Any], params: frozenset[str],
          autocast: torch.dtype | None) -> Any:
    """Copy the nodes of one (nested) graph and return what it returns."""
    for node in module.graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: env[n])
        if node in env or "_assert" in str(node.target) or node.op == "get_attr":
            continue
        if "wrap_with_set_grad_enabled" in str(node.target):
            env[node] = _inline(graph, node, module, env, params, autocast)
        elif "wrap_with_autocast" in str(node.target):
            env[node] = _inline_autocast(graph, node, module, env, params, autocast)
        elif _picks_from_region(node, env):
            region, item = cast(Any, node.args)  # getitem of an inlined region
            env[node] = env[region][item]
        else:
            new = graph.node_copy(node, lambda n: env[n])
            value = node.meta.get("val")
            line = line_of(node)
            new.meta = {"info": _info(value), "memory": _memory(value, line),
                        "module": module_path(node), "line": line}
            if autocast is not None:
                spell_out(graph, node, new, autocast, _info)
            env[node] = new
    raise TraceError("a nested graph has no output", where=str(module))


def _picks_from_region(node: fx.Node, env: dict[fx.Node, Any]) -> bool:
    first = node.args[0] if node.args else None
    return isinstance(first, fx.Node) and isinstance(env.get(first), tuple)


def _inline(graph: fx.Graph, node: fx.Node, module: Any, env: dict[fx.Node, Any],
            params: frozenset[str], autocast: torch.dtype | None) -> Any:
    """A region of its own gradient mode. Without gradients nothing in it sees that its inputs have
    any: some ops (`out=`) refuse those. Buffers stay themselves: it may write to them."""
    enabled, inner, *args = node.args
    given = [env[cast(fx.Node, a)] for a in args]
    if not enabled:
        given = [_detached(graph, v) if v.op != "placeholder" or v.name in params else v
                 for v in given]
    results = _region(graph, inner, given, module, params, autocast)
    return results if enabled else tuple(_detached(graph, r) for r in results)


def _inline_autocast(graph: fx.Graph, node: fx.Node, module: Any, env: dict[fx.Node, Any],
                     params: frozenset[str], outside: torch.dtype | None) -> Any:
    kind, dtype, enabled, _, inner, *args = node.args
    own = cast(Any, dtype) if enabled else None
    values = (n.meta.get("val") for n in node.all_input_nodes)
    if any(kind != v.device.type for v in values if isinstance(v, torch.Tensor)):
        own = outside  # autocast of another kind of device
    return _region(graph, inner, [env[cast(fx.Node, a)] for a in args], module, params, own)


def _region(graph: fx.Graph, ref: Any, given: list[Any], module: Any, params: frozenset[str],
            autocast: torch.dtype | None) -> tuple[Any, ...]:
    inner = getattr(module, str(ref.target))
    places = [n for n in inner.graph.nodes if n.op == "placeholder"]
    return tuple(_copy(graph, inner, dict(zip(places, given, strict=True)), params, autocast))


def _detached(graph: fx.Graph, value: Any) -> Any:
    new = graph.call_function(aten.detach.default, (value,))
    new.meta = dict(value.meta)
    return new


def _say_sizes(graph: fx.Graph) -> None:
    """`x.view_as(y)` becomes a view of the sizes that y has, which rules and lowering know, and
    `x.type_as(y)` a cast to its type. `x.squeeze()` names its dims: a part of one row keeps that of
    the rows. Gradients are dense."""
    for node in graph.nodes:
        if node.target is aten.squeeze.default:
            shape = info_of(node.args[0]).shape
            node.target, node.args = aten.squeeze.dims, (
                node.args[0], [dim for dim, size in enumerate(shape) if size == 1])
        at = _SPARSE.get(op_name(node), len(node.args))
        if at < len(node.args) and node.args[at]:
            log.warning("not honoured: sparse=True of %s; its gradients are dense, which Adam "
                        "takes, and SparseAdam does not", op_name(node))
            node.update_arg(at, False)
        if node.target in _LIKE:
            node.target = _LIKE[node.target]
            node.args = (node.args[0], list(info_of(node).shape))
        if node.target is aten.type_as.default:
            node.target = aten.to.dtype
            node.args = (node.args[0], getattr(torch, info_of(node).dtype))


def drop_no_ops(graph: fx.Graph) -> None:
    """Casts to the same type, dropout that drops nothing, and what nobody reads. Dropout that drops
    nothing returns what it is given, so who shows its memory shows that."""
    owners: dict[int, frozenset[int]] = {}
    for node in list(graph.nodes):
        name, memory = schema_name(node), node.meta.get("memory", frozenset())
        node.meta["memory"] = frozenset().union(*(owners.get(own, {own}) for own in memory))
        same = name in _CASTS and info_of(node) == info_of(node.args[0])  # type: ignore[arg-type]
        idle = name in _DROPOUTS and (node.args[1] == 0.0 or not node.args[2])
        if idle:
            given = node.args[0].meta["memory"]  # type: ignore[union-attr]
            owners.update(dict.fromkeys(node.meta["memory"], given))
        if same or idle:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function" and not is_mutable(node):
            graph.erase_node(node)


def part_reads(graph: fx.Graph) -> None:
    """An op that reads a value twice, as `x @ x`, reads a view of it, too: both may then be cut in
    ways of their own. Of pointwise ops they are cut alike."""
    for node in list(graph.nodes):
        if node.op != "call_function" or len(node.all_input_nodes) == _num_reads(node) or (
                is_mutable(node) or torch.Tag.pointwise in getattr(node.target, "tags", ())):
            continue
        seen = set[fx.Node]()

        def own(value: fx.Node, node: fx.Node = node, seen: set[fx.Node] = seen) -> fx.Node:
            if value not in seen:
                seen.add(value)
                return value
            with graph.inserting_before(node):
                view = graph.call_function(aten.alias.default, (value,))
            view.meta = {"info": info_of(value), "module": node.meta.get("module", "")}
            return view

        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), own)


def _num_reads(node: fx.Node) -> int:
    return sum(isinstance(leaf, fx.Node) for leaf in tree_leaves((node.args, node.kwargs)))
