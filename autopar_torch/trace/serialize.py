"""What tracing found, as bytes: one rank traces for all, the others read.

Graphs travel as lists of plain nodes, operators by name (which all ranks must have registered),
constants by way of the CPU.
"""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ..errors import AutoparError
from . import Traced
from .clean import info_of

_Line = tuple[str, str, Any, Any, Any, Any, Any]  # op, name, target, args, kwargs, info, factors


@dataclass(frozen=True)
class _Ref:
    """A node, by its place in its graph."""

    index: int


def pack(found: Traced | AutoparError) -> bytes:
    if isinstance(found, Traced):
        consts = {name: t.detach().cpu() for name, t in found.consts.items()}
        found = replace(found, consts=consts, form=found.form.portable())
    target = io.BytesIO()
    _Pickler(target).dump(found)
    return target.getvalue()


def unpack(data: bytes) -> Traced | AutoparError:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about the class of its own specs
        found: Traced | AutoparError = pickle.loads(data)
    return found


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, OpOverload):
            return _operator, (thing._schema.name, thing._overloadname)
        if isinstance(thing, fx.Graph):
            return _graph, (_lines(thing),)
        return NotImplemented


def _operator(name: str, overload: str) -> Any:
    space, _, short = name.partition("::")
    return getattr(getattr(getattr(torch.ops, space), short), overload)


def _lines(graph: fx.Graph) -> list[_Line]:
    refs: Any = {node: _Ref(index) for index, node in enumerate(graph.nodes)}
    return [(node.op, node.name, node.target,
             *fx.node.map_arg((node.args, node.kwargs), refs.__getitem__), info_of(node),
             node.meta.get("factors", ()))
            for node in graph.nodes]


def _graph(lines: list[_Line]) -> fx.Graph:
    graph = fx.Graph()
    made: list[fx.Node] = []

    def node_of(value: Any) -> Any:
        return made[value.index] if isinstance(value, _Ref) else value

    for op, name, target, args, kwargs, info, factors in lines:
        args, kwargs = fx.node.map_aggregate((args, kwargs), node_of)
        node = graph.create_node(op, target, args, dict(kwargs))
        node.name, node.meta = name, {"info": info, "factors": factors}
        made.append(node)
    return graph
