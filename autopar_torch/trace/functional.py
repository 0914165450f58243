"""In-place writes become values; nothing is decomposed, and gradients stay as they were.

Who shows whose memory is told by the storages of the traced tensors. A write into a view becomes
the functional op, whose result is put back into every base up to the tensor that owns the memory.
Whoever reads that tensor or a view of it later on reads it anew. Writes to buffers stay writes.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..errors import TraceError
from ..model import TensorInfo
from ..shard.rules import is_mutable
from .capture import InputSource
from .clean import aten, info_of, schema_name

log = logging.getLogger("autopar_torch")
# Views with the elements of their base in its order: their way back is a reshape.
_RESHAPES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze",
             "view_as", "reshape_as", "contiguous", "alias", "to", "type_as", "expand", "expand_as",
             "detach"}
_PIECES = {"split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split"}
_MADE_AS = {"dtype", "layout", "device", "pin_memory"}
_SWAPS = {"transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT"}


_DRAWS = {("normal_", "default"): aten.normal_functional.default,
          ("bernoulli_", "float"): aten.bernoulli.p}


class _Alias(NamedTuple):
    """A value in the memory of another, and how it was made of it."""

    base: fx.Node
    args: Any
    kwargs: Any


def functionalize(graph: fx.Graph, sources: Mapping[str, InputSource]) -> None:
    """Rewrite every write of a graph to anything but a whole buffer."""
    _Writes(graph, {name: source.kind for name, source in sources.items()}).run()
    for node in reversed(list(graph.nodes)):
        if schema_name(node) == "aten::lift_fresh_copy" and not any(map(is_mutable, node.users)):
            node.replace_all_uses_with(node.all_input_nodes[0])
        if not node.users and node.op == "call_function" and not is_mutable(node):
            graph.erase_node(node)
    _join_scatters(graph)
    graph.lint()


class _Writes:
    def __init__(self, graph: fx.Graph, kinds: dict[str, str]) -> None:
        self.graph, self.kinds = graph, kinds
        self.aliases: dict[fx.Node, _Alias] = {}
        self.root: dict[fx.Node, fx.Node] = {}  # value -> what owns its memory, if another
        self.families: dict[fx.Node, list[fx.Node]] = {}  # owner -> who shows its memory
        self.now: dict[fx.Node, fx.Node] = {}  # written owner -> its present value
        self.version: dict[fx.Node, int] = {}
        self.seen: dict[fx.Node, tuple[int, fx.Node]] = {}  # value -> (version, its value then)
        self.views: dict[str, fx.Node] = {}  # how a view is made -> the last that was made so
        self.grads: set[fx.Node] = set()  # values that gradients flow through
        self.tangled: set[fx.Node] = set()  # owners shown by a value that shows another one, too

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                if self.kinds.get(node.name) == "param":
                    self.grads.add(node)
                continue
            if node.op == "call_function" and schema_name(node) != "aten::batch_norm" \
                    and is_mutable(node):
                self._write(node)
                continue
            if node.op == "call_function":
                self._meet(node)
            if self.version:
                node.args, node.kwargs = self._present((node.args, node.kwargs), node)
            self._note_grad(node)

    def _present(self, args: Any, before: fx.Node) -> Any:
        return fx.node.map_arg(args, lambda n: self.value(n, before))

    def _note_grad(self, node: fx.Node) -> None:
        if schema_name(node) != "aten::detach" and any(
                n in self.grads for n in node.all_input_nodes):
            self.grads.add(node)

    def _meet(self, node: fx.Node) -> None:
        """Note whose memory a value shows."""
        memory = node.meta.get("memory", frozenset())
        bases = [n for n in node.all_input_nodes if memory & n.meta.get("memory", frozenset())]
        owners = {self.root.get(base, base) for base in bases}
        way = f"{node.target} {node.args} {node.kwargs}"
        if node.target is operator.getitem and bases and bases[0] not in self.aliases:
            if self.views.setdefault(way, node) is not node:  # a new tensor, taken once more
                node.replace_all_uses_with(self.views[way])
            return
        if not bases or self._is_own(node, owners):
            return
        if len(owners) > 1:
            self.tangled |= owners
        root = self.root.get(bases[0], bases[0])
        self.aliases[node] = _Alias(bases[0], node.args, node.kwargs)
        self.root[node] = root
        self.families.setdefault(root, []).append(node)
        version = self.version.get(root, 0)
        at, known = self.seen.get(self.views.get(way, node), (0, node))
        self.seen[node] = (version, known if version and at == version else node)
        self.views[way] = node

    def _is_own(self, node: fx.Node, owners: set[fx.Node]) -> bool:
        """Whether a value without gradients is the last to read its memory, and so may own it."""
        family = [n for owner in owners for n in (owner, *self.families.get(owner, ()))]
        return schema_name(node) == "aten::detach" and not any(
            n.op == "placeholder" or any(user > node for user in n.users) for n in family)

    def value(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The node with the present value; views are taken again where their base has changed."""
        root = self.root.get(node, node)
        version = self.version.get(root, 0)
        if version == 0:
            return node
        if node is root:
            return self.now[root]
        at, known = self.seen[node]
        if at != version:
            alias = self.aliases[node]
            args, kwargs = self._present((alias.args, alias.kwargs), before)
            with self.graph.inserting_before(before):
                known = self._call(node.target, args, kwargs, info_of(node), before)
            self.seen[node] = (version, known)
        return known

    def _call(self, target: Any, args: Any, kwargs: Any, info: Any, like: fx.Node) -> fx.Node:
        made = self.graph.call_function(target, tuple(args), dict(kwargs))
        made.meta = {"info": info, "module": like.meta.get("module", "")}
        self._note_grad(made)
        return made

    # --- writes ----------------------------------------------------------------------------------

    def _write(self, node: fx.Node) -> None:
        target = self._target(node)
        if node.kwargs.get("out") is target:
            self._copy_out(node, target)
        root = self.root.get(target, target)
        kind = self.kinds.get(root.name, "") if root.op == "placeholder" else ""
        if kind == "param" or root in self.tangled:
            raise _refusal(node, "a parameter" if kind == "param" else "several tensors at once")
        args, kwargs = self._present((node.args, node.kwargs), node)
        if torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            self._reshape_itself(node, target)
        elif target is root and (kind in ("buffer", "const") or _twin(node) is None):
            if kind:  # what is written stays the buffer itself
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: (
                    target if n is target else self.value(n, node)))
            node.args, node.kwargs = args, kwargs
            node.replace_all_uses_with(target)
            self._wrote(root, node)
            self._note_grad(node)
        else:
            if kind == "input":
                log.warning("forward writes to its input (%s); the caller's tensor stays as it is",
                            node.meta.get("module") or "the model")
            self._replace(node, target, root, args, kwargs, keep=kind in ("buffer", "const"))

    def _copy_out(self, node: fx.Node, target: fx.Node) -> None:
        """`torch.add(a, b, out=c)` is `c.copy_(a + b)`."""
        schema = node.target._schema  # type: ignore[union-attr]
        wanted = [(own.name, str(own.type)) for own in schema.arguments if own.name != "out"]
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        plain = [getattr(packet, name) for name in packet.overloads()]
        twin = next((own for own in plain if [(a.name, str(a.type)) for a in own._schema.arguments
                                              if a.name not in _MADE_AS] == wanted), None)
        if twin is None:
            raise _refusal(node, "`out=`")
        kwargs = {name: own for name, own in node.kwargs.items() if name != "out"}
        if len(twin._schema.arguments) > len(wanted):  # `torch.eye(n, out=c)`
            kwargs |= {"dtype": getattr(torch, info_of(target).dtype),
                       "device": torch.device("cpu")}
        args, kwargs = self._present((node.args, kwargs), node)
        with self.graph.inserting_before(node):
            new = self._call(twin, args, kwargs, info_of(node), node)
        new.meta["info"] = TensorInfo(info_of(target).shape, _dtype_of(new))
        node.target, node.args, node.kwargs = aten.copy_.default, (target, new), {}

    def _target(self, node: fx.Node) -> fx.Node:
        """The one argument that is written: the first, or `out=`."""
        arguments = node.target._schema.arguments  # type: ignore[union-attr]
        written = [node.args[i] if i < len(node.args) else node.kwargs.get(a.name)
                   for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
        if len(written) != 1 or not isinstance(written[0], fx.Node):
            raise _refusal(node, "several arguments")
        return written[0]

    def _wrote(self, root: fx.Node, new: fx.Node) -> None:
        self.version[root] = self.version.get(root, 0) + 1
        self.now[root] = new

    def _reshape_itself(self, node: fx.Node, target: fx.Node) -> None:
        """`x.unsqueeze_(0)`: another view of the same memory, which is meant by x from here on."""
        twin = _twin(node)
        if twin is None:
            raise _refusal(node, "the memory of a tensor")
        node.target = twin
        target.replace_all_uses_with(node, lambda user: user > node)
        self._meet(node)
        if self.version:
            node.args, node.kwargs = self._present((node.args, node.kwargs), node)
        self._note_grad(node)

    def _replace(self, node: fx.Node, target: fx.Node, root: fx.Node, args: Any, kwargs: Any, *,
                 keep: bool) -> None:
        """The functional op, its result in every base up to the owner, and in a buffer to keep."""
        chain, alias = [], target
        while alias is not root:
            chain.append(alias)
            alias = self.aliases[alias].base
        states = [self.value(self.aliases[view].base, node) for view in chain]
        with self.graph.inserting_before(node):
            new = made = self._functional(node, args, kwargs)
            for view, state in zip(chain, states, strict=True):
                if schema_name(view) == "aten::detach" and state in self.grads:
                    raise _refusal(node, "a detached value, which is read with gradients, too")
                if schema_name(view) == "aten::detach" and new in self.grads:
                    new = self._call(aten.detach.default, (new,), {}, info_of(new), node)
                new = self._put_back(node, view, state, new)
            if keep:
                new = self._call(aten.copy_.default, (root, new), {}, info_of(root), node)
        self._wrote(root, new)
        self.seen[target] = (self.version[root], made)
        node.replace_all_uses_with(target)
        self.graph.erase_node(node)

    def _functional(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """What a write makes of its target, as a value."""
        name, own = schema_name(node), info_of(node.args[0])  # type: ignore[arg-type]
        given = 0 if name == "aten::zero_" else args[1] if len(args) > 1 else None
        if name in ("aten::copy_", "aten::fill_") and isinstance(given, fx.Node):
            new = given
            if info_of(new).dtype != own.dtype:
                new = self._cast(new, own.dtype, node)
            return new if info_of(new).shape == own.shape else self._call(
                aten.expand.default, (new, list(own.shape)), {}, own, node)
        if name in ("aten::copy_", "aten::fill_", "aten::zero_"):
            like = node.args[0]  # as it once was: only its shape is read
            return self._call(aten.full_like.default, (like, given), {}, own, node)
        twin = _twin(node)
        if twin is None and node.kwargs.get("out") is not None:
            raise _refusal(node, "a view")
        if twin is None:
            copy = self._call(aten.clone.default, args[:1], {}, own, node)
            return self._call(node.target, (copy, *args[1:]), kwargs, own, node)
        if twin is aten.bernoulli.p and not (args[1:] or kwargs):
            args = (*args, 0.5)  # which is not written where it is the default
        made = self._call(twin, args, kwargs, own, node)
        others = [info_of(n) for n in node.all_input_nodes]
        if torch.Tag.pointwise in twin.tags and any(i.dtype != own.dtype for i in others):
            made.meta["info"] = TensorInfo(own.shape, _dtype_of(made))
            made = self._cast(made, own.dtype, node)
        return made

    def _cast(self, value: fx.Node, dtype: str, like: fx.Node) -> fx.Node:
        info = TensorInfo(info_of(value).shape, dtype)
        return self._call(aten.to.dtype, (value, getattr(torch, dtype)), {}, info, like)

    def _put_back(self, node: fx.Node, view: fx.Node, base: fx.Node, new: fx.Node) -> fx.Node:
        """`base` with the part that `view` shows replaced by `new`."""
        alias = self.aliases[view]
        rest, kwargs, info = alias.args[1:], alias.kwargs, info_of(alias.base)
        name = schema_name(view).removeprefix("aten::")
        if name in _PIECES:
            return new  # the whole already: its piece was put back
        if view.target is operator.getitem:
            many = self.aliases[alias.base]
            whole = self.value(many.base, node)
            op, place = _place_of_piece(alias.base, many, rest[0])
            return self._scatter(op, (whole, new, *place), {}, info_of(many.base), node)
        if name in ("slice", "select", "diagonal"):
            op = getattr(aten, f"{name}_scatter").default
            return self._scatter(op, (base, new, *rest), kwargs, info, node)
        if name == "narrow" and isinstance(rest[1], int):
            place = (rest[0], rest[1], rest[1] + rest[2])
            return self._scatter(aten.slice_scatter.default, (base, new, *place), {}, info, node)
        if name in _SWAPS:
            dims = rest or ((-2, -1) if len(info.shape) > 1 else (0, 0))
            return self._call(aten.transpose.int, (new, *dims), {}, info, node)
        if name == "permute":
            order = [d % len(rest[0]) for d in rest[0]]
            back = [order.index(i) for i in range(len(order))]
            return self._call(aten.permute.default, (new, back), {}, info, node)
        if name in ("movedim", "moveaxis"):
            return self._call(view.target, (new, rest[1], rest[0]), {}, info, node)
        if name in ("view_as_real", "view_as_complex"):
            other = {"view_as_real": "complex", "view_as_complex": "real"}[name]
            return self._call(getattr(aten, f"view_as_{other}").default, (new,), {}, info, node)
        shown = info_of(view)
        if (name not in _RESHAPES or shown.dtype != info.dtype
                or math.prod(shown.shape) != math.prod(info.shape)):
            raise _refusal(node, f"what {name or view.target} shows of a tensor")
        return new if shown.shape == info.shape else self._call(
            aten.reshape.default, (new, list(info.shape)), {}, info, node)

    def _scatter(self, op: Any, args: Any, kwargs: Any, info: Any, node: fx.Node) -> fx.Node:
        """Complex numbers as two real ones, since no gradient goes through a scatter of theirs."""
        if not info.dtype.startswith("complex") or op is aten.diagonal_scatter.default:
            return self._call(op, args, kwargs, info, node)
        real = {"complex64": "float32", "complex128": "float64"}[info.dtype]
        parts = [self._call(aten.view_as_real.default, (own,), {}, TensorInfo(
            (*info_of(own).shape, 2), real), node) for own in args[:2]]
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % len(info.shape)
        made = self._call(op, (*parts, dim, *args[3:]), {k: v for k, v in kwargs.items()
                                                         if k != "dim"}, info_of(parts[0]), node)
        return self._call(aten.view_as_complex.default, (made,), {}, info, node)


def _refusal(node: fx.Node, what: str) -> TraceError:
    return TraceError(f"{schema_name(node).removeprefix('aten::')} writes to {what}",
                      where=node.meta.get("line") or node.meta.get("module", ""),
                      fix="assign the result to a new tensor instead")


def _twin(node: fx.Node) -> Any:
    """The same op that writes to nothing, if there is one."""
    name = schema_name(node).removeprefix("aten::")
    if not name.endswith("_") or name.endswith("__") or name == "copy_":
        return None
    overload: str = node.target._overloadname  # type: ignore[union-attr]
    if found := _DRAWS.get((name, overload)):
        return found
    if name in ("pow_", "float_power_") and overload == "Scalar":
        overload = "Tensor_Scalar"  # in `pow.Scalar` the number is the base
    return getattr(getattr(aten, name[:-1], None), overload, None)


def _dtype_of(node: fx.Node) -> str:
    """What a pointwise op makes of its arguments."""
    empty = {n: torch.empty(info_of(n).shape, dtype=getattr(torch, info_of(n).dtype), device="meta")
             for n in node.all_input_nodes}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), empty.__getitem__)
    return str(node.target(*args, **kwargs).dtype).removeprefix("torch.")  # type: ignore[operator]


def _place_of_piece(split: fx.Node, made: _Alias, k: int) -> tuple[Any, Sequence[int]]:
    """How piece k is put back: the op, and the dim and the place that it takes."""
    is_unbound = schema_name(split) == "aten::unbind"
    at = 1 if is_unbound else 2
    dim = made.args[at] if len(made.args) > at else made.kwargs.get("dim", 0)
    if is_unbound:
        return aten.select_scatter.default, (dim, k)
    sizes = [info.shape[dim] for info in info_of(split)]
    return aten.slice_scatter.default, (dim, sum(sizes[:k]), sum(sizes[: k + 1]))


# --- writes that fill a dim ----------------------------------------------------------------------


def _join_scatters(graph: fx.Graph) -> None:
    """Writes that one after the other fill a dim (`x[..., :n] = a; x[..., n:] = b`) become one
    `cat`: the old content is of no use, and many copies of the whole become one."""
    for last in reversed(list(graph.nodes)):
        if last._erased or schema_name(last) not in ("aten::slice_scatter", "aten::select_scatter"):
            continue
        found, dim, chain = _filled(last)
        spans = sorted(found)
        size = info_of(last).shape[dim]
        if [a for a, _ in spans] + [size] != [0] + [b for _, b in spans]:
            continue
        with graph.inserting_before(last):
            parts = [_as_slice(graph, found[span], dim, last) for span in spans]
            joined = graph.call_function(aten.cat.default, (parts, dim))
        joined.meta = dict(last.meta)
        last.replace_all_uses_with(joined)
        for node in chain:
            graph.erase_node(node)


def _filled(last: fx.Node) -> tuple[dict[tuple[int, int], fx.Node], int, list[fx.Node]]:
    """Spans of a dim -> who fills them, in a chain of scatters that nobody else reads."""
    found: dict[tuple[int, int], fx.Node] = {}
    dim, node, chain = _dim_of(last), last, list[fx.Node]()
    while node.target is last.target and (node is last or len(node.users) == 1):
        span = _span_of(node)
        if _dim_of(node) != dim or span is None or any(
                span[0] < b and a < span[1] for a, b in found):
            break
        found[span] = node.args[1]  # type: ignore[assignment]
        chain.append(node)
        if sum(b - a for a, b in found) == info_of(last).shape[dim]:
            break
        node = node.args[0]  # type: ignore[assignment]
    return found, dim, chain


def _dim_of(node: fx.Node) -> int:
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    return int(dim) % len(info_of(node).shape)


def _span_of(node: fx.Node) -> tuple[int, int] | None:
    """Where a scatter writes in its dim; None where it leaves gaps."""
    size = info_of(node).shape[_dim_of(node)]
    if schema_name(node) == "aten::select_scatter":
        index: Any = node.args[3]
        return (index % size, index % size + 1)
    given: Any = [*node.args[3:], *(None,) * (6 - len(node.args))]
    start, end, step = given[0] or 0, size if given[1] is None else given[1], given[2] or 1
    bounds = [min(max(x + size if x < 0 else x, 0), size) for x in (start, end)]
    plain = step == 1 and not node.kwargs and bounds[0] < bounds[1]
    return (bounds[0], bounds[1]) if plain else None


def _as_slice(graph: fx.Graph, part: fx.Node, dim: int, scatter: fx.Node) -> fx.Node:
    if schema_name(scatter) == "aten::slice_scatter":
        return part
    made = graph.call_function(aten.unsqueeze.default, (part, dim))
    shape = list(info_of(part).shape)
    made.meta = {**scatter.meta, "info": TensorInfo((*shape[:dim], 1, *shape[dim:]),
                                                    info_of(part).dtype)}
    return made
