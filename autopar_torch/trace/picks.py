"""Values whose sizes depend on the data (`x[mask]`) have no place in a plan: they become one op,
with all that reads them up to values of known sizes. It is whole on every rank, and couples rows
until a test says otherwise.

A mean over what is picked is its sum over how many these are, which is a number of the whole batch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import dropwhile, takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from ..model import ROWS
from ..shard.rows import at_batch
from ..shard.rules import is_mutable, is_random, op_name, written_by

aten = torch.ops.aten
_MEAN, _SUM = 1, 2
# Losses whose mean is that of a value for each element, or for each label.
_OF_ELEMENTS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
                "binary_cross_entropy_with_logits", "kl_div")
_OF_LABELS = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
_APART = {"index_put_": aten.index_put.default, "index_add_": aten.index_add.default,
          "masked_scatter_": aten.masked_scatter.default}


class Picked:
    """The target of a node that stands for such ops. Its arguments are the number of rows, and the
    values that these ops read."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.__name__ = graph, "picked"
        self.programs: dict[tuple[int, torch.device], fx.GraphModule] = {}

    def __repr__(self) -> str:
        return f"picked({self.graph!s})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "programs": {}}

    def __call__(self, rows: int, *given: Tensor) -> tuple[Tensor, ...]:
        key = rows, given[0].device
        if key not in self.programs:
            self.programs[key] = fx.GraphModule(nn.Module(), at_batch(self.graph, *key), "Picked")
        found: tuple[Tensor, ...] = self.programs[key](*given)
        return found


class UnknownSizeError(RuntimeError):
    """A size depends on the data, and what reads it cannot be one op."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__("a size depends on the data")
        self.node = node


def fold(program: ExportedProgram, under_autocast: bool) -> None:
    """In the graph of an export, and in regions of their own gradient mode. What autocast casts is
    written out later, and not inside of such an op."""
    params = {spec.arg.name for spec in program.graph_signature.input_specs
              if spec.kind is InputKind.PARAMETER}
    graphs = [own for own in program.graph_module.modules() if isinstance(own, fx.GraphModule)]
    casts = under_autocast or any("wrap_with_autocast" in str(node.target)
                                  for own in graphs for node in own.graph.nodes)
    for module in graphs:
        if odd := [*filter(_is_odd, module.graph.nodes)]:
            if casts:
                raise UnknownSizeError(odd[0])
            places = module.graph.find_nodes(op="placeholder")
            if wrong := [*filter(_is_odd, places)]:
                raise UnknownSizeError(wrong[0])
            _Folding(module.graph, {n for n in places if module is not program.graph_module
                                    or n.name in params or n.meta["val"].requires_grad}).run()
            module.recompile()


def _is_odd(node: Any) -> bool:
    """Whether a value, or one of several, has a size that nobody knows."""
    return any(isinstance(x, Tensor) and not all(type(n) is int for n in x.shape)
               for x in pytree.tree_leaves(node.meta.get("val")))


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _reads_odd(node: fx.Node) -> bool:
    return any(map(_is_odd, node.all_input_nodes))


class _Folding:
    def __init__(self, graph: fx.Graph, learning: set[fx.Node]) -> None:
        self.graph, self.learning = graph, learning  # what may depend on a parameter
        self.counts: dict[Any, fx.Node] = {}  # a size -> how many were picked
        self.apart: set[fx.Node] = set()  # what was written to, and is written to no more

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if "_assert" in str(node.target) or "sym_constrain" in str(node.target):
                self.graph.erase_node(node)
        self.graph.eliminate_dead_code()
        for node in [n for n in self.graph.nodes if n.op == "call_function"]:
            self._note_count(node)
            self._write_apart(node)
        for node in list(self.graph.nodes):
            if isinstance(node.target, OpOverload) and _reads_odd(node) and not (
                    _is_odd(node) or _is_number(node)):
                self._as_sum(node)
        self._count_outside()
        self.graph.eliminate_dead_code()
        for node in self.graph.nodes:  # in order, so that all above is known
            if not self.learning.isdisjoint(node.all_input_nodes):
                self.learning.add(node)
        self._fold_all()
        self.graph.eliminate_dead_code()
        if left := [*filter(_is_odd, self.graph.nodes)]:
            raise UnknownSizeError(left[0])
        self.graph.lint()

    # --- how many there are -------------------------------------------------------------------

    def _note_count(self, node: fx.Node) -> None:
        """A size that is how often a mask is true."""
        name, mask, dim = op_name(node), next(iter(node.args), None), 0
        if name == "index":
            picks = [(dim, own) for dim, own in enumerate(_given(node)["indices"]) if own]
            dim, mask = picks[0]
            if len(picks) > 1 or mask.meta["val"].dtype != torch.bool:  # type: ignore[union-attr]
                return
        elif name == "masked_select":
            mask = node.args[1]
        elif name not in ("nonzero", "nonzero_numpy") and (name != "where" or len(node.args) > 1):
            return
        key = _key(next(x for x in pytree.tree_leaves(node.meta["val"])).shape[dim])
        if key is None or key in self.counts:
            return
        with self.graph.inserting_before(node):
            if mask.meta["val"].dtype != torch.bool:  # type: ignore[union-attr]
                mask = self._call(node, aten.ne.Scalar, mask, 0)
            if name == "masked_select":
                shapes = [a.meta["val"].shape for a in node.all_input_nodes]
                mask = self._call(node, aten.expand.default, mask,
                                  list(torch.broadcast_shapes(*shapes)))
            self.counts[key] = self._call(node, aten.sum.default, mask)

    def _number_of(self, sizes: Iterable[Any], like: fx.Node) -> fx.Node | None:
        """The product of sizes as a tensor; None where it is not known so."""
        sizes = list(sizes)
        known = [self.counts.get(_key(n)) for n in sizes if type(n) is not int]
        if len(known) != 1 or known[0] is None:
            return None
        return self._call(like, aten.mul.Scalar, known[0],
                          math.prod(n for n in sizes if type(n) is int))

    def _as_sum(self, node: fx.Node) -> None:
        """A mean over what is picked, as a sum over its number, if half precision has room."""
        name, given, target = op_name(node), _given(node), node.target
        if getattr(node.meta["val"], "dtype", None) == torch.float16:
            return
        with self.graph.inserting_before(node):
            if name == "mean":
                shape = given["self"].meta["val"].shape
                dims = given.get("dim") or range(len(shape))
                count = self._number_of((shape[d] for d in dims), node)
                target = aten.sum.dim_IntList if "dim" in given else aten.sum.default
            elif given.get("reduction") == _MEAN and name in (*_OF_ELEMENTS, *_OF_LABELS):
                given["reduction"] = _SUM
                both = [own.meta["val"].shape for own in (given["self"], given["target"])]
                count = self._labels(node, given) if name in _OF_LABELS else self._number_of(
                    torch.broadcast_shapes(*both), node)
            else:
                return
            if count is None:
                return
            fixed = {a.name for a in target._schema.arguments if a.kwarg_only}  # type: ignore[union-attr]
            total = self._call(node, target, *(v for k, v in given.items() if k not in fixed),
                               **{k: v for k, v in given.items() if k in fixed})
            node.replace_all_uses_with(self._call(node, aten.div.Tensor, total, count))
        self.graph.erase_node(node)

    def _labels(self, node: fx.Node, given: dict[str, Any]) -> fx.Node | None:
        """How many labels count; None where they are weighted, or are distributions."""
        shapes = [own.meta["val"].shape for own in (given["self"], given["target"])]
        if given["weight"] is not None or len(shapes[0]) == len(shapes[1]):
            return None
        counts = self._call(node, aten.ne.Scalar, given["target"], given["ignore_index"])
        return self._call(node, aten.sum.default, counts)

    def _count_outside(self) -> None:
        """A number of what is picked that others read is that of the whole batch."""
        again: dict[fx.Node, fx.Node] = {}
        for node in filter(_is_number, list(self.graph.nodes)):
            count = self.counts.get(_key(node.meta["val"])) if op_name(node) == "sym_size" else None
            with self.graph.inserting_after(node):
                if count is not None:
                    again[node] = self._call(node, aten.item.default, count, val=node.meta["val"])
                elif not again.keys().isdisjoint(node.all_input_nodes):
                    again[node] = self.graph.node_copy(node, lambda n: again.get(n, n))
        for node, own in again.items():
            node.replace_all_uses_with(own, lambda user: not (
                _is_number(user) or _is_odd(user) or _reads_odd(user)))

    # --- one op ---------------------------------------------------------------------------------

    def _write_apart(self, node: fx.Node) -> None:
        """`x[mask] = values` makes another value, where nothing else shows the memory of this."""
        if not is_mutable(node) or not _reads_odd(node) or _is_odd(first := node.args[0]):
            return
        own = self.apart | {first}
        for later in self.graph.nodes:
            own |= {later} if op_name(later) in _APART and later.args[0] in own else set()
        alike = [n for n in self.graph.nodes if memory_of(first) & memory_of(n) and n.op != "output"
                 and n not in own]
        if op_name(node) not in _APART or alike or first.op != "call_function":  # type: ignore[union-attr]
            raise UnknownSizeError(node)
        node.target = _APART[op_name(node)]
        self.apart |= {first, node}  # type: ignore[arg-type]
        for user in [*takewhile(lambda n: n is not node, reversed(self.graph.nodes))]:
            user.replace_input_with(first, node)  # type: ignore[arg-type]

    def _fold_all(self) -> None:
        odd = {*filter(_is_odd, self.graph.nodes)}
        ends = {n for n in self.graph.nodes if n.op == "call_function" and n not in odd
                and not _is_number(n) and not odd.isdisjoint(n.all_input_nodes)}
        for end in [n for n in self.graph.nodes if n in ends and n not in self.learning]:
            self._fold({end}, odd)
        chain = (odd | ends) & self.learning
        while chain:
            group, more = set[fx.Node](), {next(n for n in self.graph.nodes if n in chain)}
            while more:
                group |= more
                more = {n for own in more for n in (*own.users, *own.all_input_nodes)
                        if n in chain and n not in group and (own in odd or n in odd)}
            inside = self._between(group)
            self._fold(inside, odd)
            chain -= inside

    def _between(self, group: Collection[fx.Node]) -> set[fx.Node]:
        """These, and what lies on a way from one of them to another."""
        below, above = set(group), set(group)
        for node in self.graph.nodes:
            if node.op == "call_function" and not below.isdisjoint(node.all_input_nodes):
                below.add(node)
        for node in reversed(self.graph.nodes):
            if node in above:
                above.update(node.all_input_nodes)
        return below & above

    def _fold(self, inside: set[fx.Node], odd: set[fx.Node]) -> None:
        """One node for these and for the sizes, and what has such, that they read."""
        inside |= {user for n in inside if isinstance(n.meta["val"], (tuple, list))
                   for user in n.users}
        results = [n for n in self.graph.nodes if n in inside and not _is_number(n)
                   and any(user not in inside and not _is_number(user) for user in n.users)]
        for node in reversed(self.graph.nodes):
            if node in inside:
                inside = inside | {n for n in node.all_input_nodes if n in odd or _is_number(n)}
        nodes = [n for n in self.graph.nodes if n in inside]
        given = list(dict.fromkeys(n for own in nodes for n in own.all_input_nodes
                                   if n not in inside))
        memory = frozenset[int]().union(*map(memory_of, given))
        if wrong := [n for n in results if n in odd] + [
                n for n in nodes if is_random(n) or op_name(n) == "opaque"] + [
                n for n in self._within(nodes) if is_mutable(n)
                and any(memory & memory_of(own) for own in written_by(n))]:
            raise UnknownSizeError(wrong[0])
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for k, node in enumerate(given):
            made[node] = graph.placeholder(f"g{k}")
        for node in nodes:
            made[node] = graph.node_copy(node, made.__getitem__)
            made[node].meta = {}
        graph.output(tuple(made[n] for n in results))
        values = tuple(n.meta["val"] for n in results)
        with self.graph.inserting_after(nodes[-1]):
            new = self._call(results[-1], Picked(graph), ROWS, *given, val=values)
        self._read(new, results, inside)

    def _within(self, nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """What runs from the first of these to the last, where all that they read has to stay."""
        yield from dropwhile(lambda n: n is not nodes[0],
                             takewhile(lambda n: n is not nodes[-1], self.graph.nodes))
        yield nodes[-1]

    def _read(self, new: fx.Node, results: Sequence[fx.Node], inside: Collection[fx.Node]) -> None:
        """Who reads the results reads those of the new node, and stands behind it."""
        last, behind = new, {new}
        for k, old in enumerate(results):
            with self.graph.inserting_after(last):
                last = self._call(old, operator.getitem, new, k, val=old.meta["val"])
            old.replace_all_uses_with(last, lambda user: user not in inside)
            behind.add(last)
        for node in list(takewhile(lambda n: n is not new, self.graph.nodes)):
            if not behind.isdisjoint(node.all_input_nodes):
                if any(is_mutable(n) and n not in inside for n in self._within([node, new])):
                    raise UnknownSizeError(node)
                behind.add(node)
                last.append(node)
                last = node

    def _call(self, like: fx.Node, target: Any, *args: Any, val: Any = None,
              **kwargs: Any) -> fx.Node:
        """A node that is said to stand where another does."""
        made = self.graph.call_function(target, args, kwargs)
        if val is None:
            values: Any = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
            val = target(*values[0], **values[1])
        made.meta = {**like.meta, "val": val}
        return made


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op by name."""
    names = {a.name: a.default_value for a in node.target._schema.arguments}  # type: ignore[union-attr]
    return names | dict(zip(names, node.args, strict=False)) | node.kwargs


def _key(size: Any) -> Any:
    """Of a size that is one unknown number."""
    expr = size.node.expr if isinstance(size, torch.SymInt) else None
    return expr if expr is not None and expr.is_symbol else None


def memory_of(node: Any) -> frozenset[int]:
    values = pytree.tree_leaves(node.meta.get("val")) if isinstance(node, fx.Node) else ()
    return frozenset(x.untyped_storage()._cdata for x in values if isinstance(x, Tensor))
