"""Block + sharding + place -> the program of one rank: an fx.GraphModule that reads as code.

Shapes become local, conversions appear where a value's form changes, and a few ops that sum over a
cut dim get their local meaning. Without a sharding (one device) the block only gets real sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from ..model import at_rows
from ..plan import Sharding
from . import by_rows, collectives
from .collectives import Axis, Peers, VocabPart
from .experts import OwnExperts, OwnRows
from .layout import (
    PARTIAL,
    WHOLE,
    Forms,
    Layout,
    Layouts,
    Split,
    Square,
    all_cuts,
    is_cut,
    local_shape,
    parse_forms,
)
from .linear import direct_linear
from .parts import part
from .price import Move, moves
from .ring_attention import RingAttention
from .rows import give_real_sizes, rows_dim
from .rules import OPERANDS, OWNED, ShapedOp, is_random, op_name
from .solve import OpWay, chosen_way, ways
from .spatial import SpatialLinear
from .together import AllRows, Replicas, Together

aten = torch.ops.aten
Ready = dict[fx.Node, fx.Node]  # an op's inputs in the form that it needs
_SIZED = {"view": 1, "reshape": 1, "_unsafe_view": 1, "expand": 1, "new_zeros": 1, "new_ones": 1,
          "new_full": 1, "new_empty": 1}


class Lowering:
    """Rewrites one block; `finish` gives the module."""

    def __init__(self, graph: fx.Graph, sharding: Sharding | None, axes: Sequence[Axis],
                 replicas: Replicas | None, rows: int, device: torch.device) -> None:
        self.source, self.sharding, self.axes = graph, sharding, tuple(axes)
        self.mesh = tuple(axis.parts for axis in axes)
        self.replicas, self.rows, self.device = replicas, rows, device
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.have: dict[fx.Node, Forms] = {}  # form of what env holds
        self.shared: dict[tuple[fx.Node, Forms], fx.Node] = {}
        self.choices: dict[fx.Node, OpWay] = {}
        if sharding is not None:
            self.choices = {node: chosen_way(node, legal, sharding)
                            for node, legal in ways(graph, self.mesh).items()}
        self.tails = by_rows.tails(graph, self.choices, self.mesh, rows)

    def finish(self) -> fx.GraphModule:
        for node in self.source.nodes:
            if node.op == "placeholder":
                self.env[node] = self.graph.placeholder(node.name)
                self.have[node] = self._form(node.name) or Forms.whole(len(self.mesh))
            elif node.op == "output":
                self._output(node)
            else:
                self._op(node)
        return fx.GraphModule(self.root, self.graph, "Block")

    def _form(self, name: str) -> Forms | None:
        text = self.sharding.forms.get(name) if self.sharding else None
        return parse_forms(text) if text else None

    def _output(self, node: fx.Node) -> None:
        whole = Forms.whole(len(self.mesh))
        results = [self._as(value, self._form(f"y{k}") or whole)
                   for k, value in enumerate(cast(Any, node.args[0]))]
        self.graph.output(tuple(results))

    def _as(self, node: fx.Node, want: Forms) -> fx.Node:
        """The value in the form a reader needs, through the form its readers share."""
        if isinstance(node.meta.get("info"), tuple) or self.sharding is None:
            return self.env[node]
        have, value = self.have[node], self.env[node]
        middle = self._form(f"{node.name}.form")
        if middle is not None:
            value = self._converted(node, value, have, middle)
            have = middle
        return self._converted(node, value, have, want)

    def _converted(self, node: fx.Node, value: fx.Node, have: Forms, want: Forms) -> fx.Node:
        ahead = self._real(moves(have.value, want.value))
        back = self._real(moves(want.grad, have.grad)) if node.meta["info"].grad else []
        if not ahead and not back:
            return value
        key = (value, want)
        if key not in self.shared:
            name = "_".join(dict.fromkeys(_verb(m) for m in [*ahead, *back])) or "keep"
            shape = local_shape(tuple(node.meta["info"].at(self.rows)), want.value, self.mesh)
            target = self._module(name, collectives.Convert(ahead, back, self.axes, shape))
            self.shared[key] = self.graph.call_module(target, (value,))
        return self.shared[key]  # readers that convert alike share it: one reduction

    def _real(self, steps: list[Move]) -> list[Move]:
        return [Move(m.axis, self._layout(m.source), self._layout(m.target)) for m in steps]

    def _layout(self, layout: Layout) -> Layout:
        """A layout with the outer parts that so many rows have."""
        if isinstance(layout, Square):
            row = None if layout.row is None else self._split(layout.row)
            return Square(row, self._split(layout.col), layout.skew)
        return self._split(layout) if isinstance(layout, Split) else layout

    def _split(self, split: Split) -> Split:
        return Split(split.dim, at_rows(split.outer, self.rows))

    def _module(self, name: str, module: nn.Module) -> str:
        number = sum(1 for other in self.root._modules if other.startswith(name))
        self.root.add_module(f"{name}_{number}", module)
        return f"{name}_{number}"

    def _op(self, node: fx.Node) -> None:
        choice = self.choices.get(node)
        if choice is None:
            ready = {n: self.env[n] for n in node.all_input_nodes}
            self.have[node] = Forms.whole(len(self.mesh))
        else:
            ready = {n: self._as(n, form)
                     for n, form in zip(ShapedOp(node).inputs, choice.ins, strict=True)}
            ready |= {n: self.env[n] for n in node.all_input_nodes if n not in ready}
            self.have[node] = choice.made
        self.env[node] = self._special(node, choice, ready) or self._plain(node, choice, ready)
        self.env[node].meta.setdefault(
            "part", (node, choice.share if choice is not None else 1, self.rows))
        if tail := self.tails.get(node):
            self.env[node] = self._by_rows(self.env[tail.product], self.env[node], tail.pieces)

    def _by_rows(self, product: fx.Node, loss: fx.Node, count: int) -> fx.Node:
        module, args = by_rows.fold(self.root, product, loss, count)
        for node in by_rows.between(product, loss)[::-1]:
            self.graph.erase_node(node)
        return self.graph.call_module(self._module("loss_by_rows", module), args)

    def _plain(
        self, node: fx.Node, choice: OpWay | None, ready: dict[fx.Node, fx.Node]
    ) -> fx.Node:
        new = self.graph.node_copy(node, lambda n: ready[n])
        if new.target is aten.view.default:  # a local part may lie otherwise than the whole did
            new.target = aten.reshape.default
        if choice is not None:
            self._localise(node, new, choice)
        give_real_sizes(new, self.rows, self.device)
        if choice is not None and op_name(node) == "mean":
            return self._scaled(new, self._summed(choice))
        return new

    def _localise(self, node: fx.Node, new: fx.Node, choice: OpWay) -> None:
        """Sizes among the arguments become local ones."""
        name, args = op_name(node), list(new.args)
        if name in _SIZED or name == "unflatten":
            full = node.meta["info"].shape
            local = local_shape(full, choice.out, self.mesh)
            if name == "unflatten":
                first = int(cast(Any, args[1])) % len(ShapedOp(node).shapes[0])
                args[2] = local[first : first + len(args[2])]  # type: ignore[arg-type]
            else:
                args[_SIZED[name]] = local
        elif name == "repeat_interleave":  # the size that it would else work out
            new.kwargs = {k: v for k, v in new.kwargs.items() if k != "output_size"}
        elif name in ("split", "split_with_sizes"):
            parts = self._num_parts(choice, ShapedOp(node).dim(2, len(ShapedOp(node).out)))
            args[1] = fx.node.map_aggregate(args[1], lambda size: cast(int, size) // parts)
        elif name == "group_norm" or (name in _BIAS and len(args) > 6 and args[6] != 1):
            place = 1 if name == "group_norm" else 6
            args[place] = int(cast(Any, args[place])) // self._num_parts(choice, 1)
        new.args = tuple(args)

    def _num_parts(self, choice: OpWay, dim: int) -> int:
        """Into how many parts a dim of the result is cut."""
        return math.prod(cut.parts for cut in all_cuts(choice.out, self.mesh)
                         if cut.split.dim == dim)

    def _summed(self, choice: OpWay | None) -> int:
        """Product of the axes whose results are partial sums."""
        layouts = choice.out if choice is not None else (WHOLE,) * len(self.mesh)
        return math.prod(parts for layout, parts in zip(layouts, self.mesh, strict=True)
                         if layout == PARTIAL)

    def _scaled(self, value: fx.Node, by: int) -> fx.Node:
        return value if by == 1 else self.graph.call_function(aten.mul.Tensor, (value, 1.0 / by))

    def _special(self, node: fx.Node, choice: OpWay | None,
                 ready: Ready) -> fx.Node | None:
        """Ops whose local meaning differs from running them on the pieces."""
        name = op_name(node)
        if choice is not None and choice.around is not None:
            module = RingAttention(self.axes[choice.around], ShapedOp(node).arg(6, "scale"))
            return self.graph.call_module(self._module("ring_attention", module),
                                          tuple(ready[value] for value in ShapedOp(node).inputs))
        if name == "batch_norm" and node.args[5] and self.replicas is not None and rows_dim(
                ShapedOp(node).shapes[0]) != WHOLE:
            args = [ready[a] if isinstance(a, fx.Node) else None for a in node.args[:5]]
            peers = self._peers(self.replicas, node, choice)
            norm = collectives.SyncBatchNorm(peers, node.args[6], node.args[7])  # type: ignore[arg-type]
            return self.graph.call_module(self._module("sync_batch_norm", norm), tuple(args))
        if isinstance(node.target, Together):
            own = node.target.program(self.rows, self.device) if self.replicas is None else AllRows(
                node.target, self.rows, self.device, self.replicas)
            return self.graph.call_module(self._module("together", own),
                                          tuple(ready[n] for n in node.args[1:]))  # type: ignore[index]
        if choice is not None and is_random(node) and self._place_of(choice.out) is not None:
            return self._own_random(node, choice, ready)
        if choice is not None and name in OWNED and PARTIAL in choice.out and (
                new := self._owned(node, choice, ready)):
            return new
        if name == "cross_entropy":
            return self._loss(node, choice, ready)
        if name in OPERANDS and (new := self._linear(node, choice, ready)):
            return new
        if choice is not None and PARTIAL in choice.out and name in _BIAS:
            return self._with_scaled_bias(node, choice, ready)
        return None

    def _peers(self, replicas: Replicas, node: fx.Node, choice: OpWay | None) -> Peers:
        """Who joins the statistics of a batch norm, and which channels this rank has of it."""
        if replicas.alike:
            return Peers(replicas.axis)
        num_channels, copies = node.meta["info"].shape[1], math.prod(self.mesh)
        own = torch.arange(num_channels, device=self.device)
        layouts = choice.out if choice is not None else (WHOLE,) * len(self.mesh)
        for cut in all_cuts(layouts, self.mesh, tuple(axis.index for axis in self.axes)):
            own = part(own, cut._replace(split=cut.split._replace(dim=0)))
            copies //= cut.parts
        return Peers(replicas.axis, own, num_channels, copies)

    def _owned(self, node: fx.Node, choice: OpWay, ready: Ready) -> fx.Node | None:
        """An op on the part that this rank has of the first dim of a weight."""
        name = op_name(node)
        place = cast(int, ShapedOp(node).at(OWNED[name]))
        owner = VocabPart(tuple(axis for axis, layout in zip(
            self.axes, choice.ins[place].value, strict=True) if layout == Split(0)))
        plain = self._plain(node, choice, ready)
        if not owner.axes:
            return plain
        if name == "embedding":
            module: nn.Module = collectives.VocabEmbedding(owner, ShapedOp(node).arg(2, "", -1))
        else:
            module = OwnRows(owner) if name == "index" else OwnExperts(owner, plain.target)
        new = self.graph.call_module(self._module(f"own_{name}", module), plain.args, plain.kwargs)
        self.graph.erase_node(plain)
        return new

    def _place_of(self, layouts: Layouts) -> int | None:
        """The number of the part of a value that this rank has; None if it has all of it."""
        if not any(is_cut(layout) for layout in layouts):
            return None
        place = 0
        for layout, axis in zip(layouts, self.axes, strict=True):
            place = place * axis.parts + (axis.index if is_cut(layout) else 0)
        return place

    def _own_random(self, node: fx.Node, choice: OpWay, ready: Ready) -> fx.Node:
        place = self._place_of(choice.out)
        target = self._module("own_random", collectives.OwnRandom(node.target, place or 0))
        plain = self._plain(node, choice, ready)
        new = self.graph.call_module(target, plain.args, plain.kwargs)
        self.graph.erase_node(plain)
        return new

    def _owner(self, layouts: Layouts, which: Layout) -> VocabPart:
        return VocabPart(tuple(a for a, x in zip(self.axes, layouts, strict=True) if x == which))

    def _loss(self, node: fx.Node, choice: OpWay | None, ready: Ready) -> fx.Node:
        if choice is not None and Split(1) in choice.ins[0].value:
            owner = self._owner(choice.ins[0].value, Split(1))
            loss = collectives.VocabCrossEntropy(owner, node.args[4])  # type: ignore[arg-type]
            args = tuple(ready[a] if isinstance(a, fx.Node) else None for a in node.args[:3])
            new = self.graph.call_module(self._module("vocab_cross_entropy", loss), args)
        else:
            new = self._plain(node, choice, ready)
        if _is_read_once(cast(fx.Node, node.args[0])):
            new.kwargs = {"overwrite": True}
        return new

    def _with_scaled_bias(self, node: fx.Node, choice: OpWay,
                          ready: Ready) -> fx.Node | None:
        """Every rank adds its share of the bias, so that the sum adds it once."""
        place = _BIAS[op_name(node)]
        bias = node.args[place] if len(node.args) > place else None
        if not isinstance(bias, fx.Node):
            return None
        shared = self._scaled(ready[bias], self._summed(choice))
        return self._plain(node, choice, {**ready, bias: shared})

    def _linear(self, node: fx.Node, choice: OpWay | None, ready: Ready) -> fx.Node | None:
        """A linear by a parameter, in a ring or not. If its results are partial sums, each rank
        adds a share of the bias."""
        x, weight, bias = (ShapedOp(node).arg(place) for place in OPERANDS[op_name(node)])
        ring = choice.ring if choice is not None else None
        own = ready[weight]  # a leaf: the parameter as this rank holds it
        leaf = own.op == "placeholder" and own.name.startswith("w_") and weight.meta["info"].grad
        if ring is None and not (leaf and _is_plain(node, x, weight, bias)):
            return None
        args, transposed = [ready[x], ready[weight]], op_name(node) == "linear"
        if bias is not None:
            args.append(self._scaled(ready[bias], self._summed(choice)))
        if ring is None:
            new = self.graph.call_function(direct_linear, tuple(args))
            new.kwargs = {} if transposed else {"transposed": False}
            return new
        module = SpatialLinear(self.axes[ring], transposed, leaf)
        return self.graph.call_module(self._module("spatial_linear", module), tuple(args))


def _is_plain(node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> bool:
    """Whether it is rows times a matrix, with one bias added to all rows."""
    dims = [None if n is None else len(n.meta["info"].shape) for n in (x, weight, bias)]
    return not node.kwargs and dims[0] != 1 and dims[1] == 2 and dims[2] in (None, 1)


_BIAS = {"linear": 2, "addmm": 0, "baddbmm": 0, "conv1d": 2, "conv2d": 2, "conv3d": 2,
         "conv_transpose1d": 2, "conv_transpose2d": 2, "conv_transpose3d": 2}


_PASSING = ("view", "reshape", "_unsafe_view", "slice", "to", "contiguous", "flatten", "alias")
_FORGOTTEN = ("linear", "matmul", "mm", "addmm", "add", "mul", "div")  # backward needs no result


def _is_read_once(node: fx.Node) -> bool:
    """Whether a value was made here for one reader, which may then write over it."""
    while len(node.users) == 1 and op_name(node) in _PASSING:
        node = cast(fx.Node, node.args[0])
    made = node.op == "call_function" and op_name(node) in _FORGOTTEN
    return made and len(node.users) == 1


def _verb(step: Move) -> str:
    source, target = step.source, step.target
    if is_cut(target):
        if is_cut(source):
            return "reblock" if Square in (type(source), type(target)) else "all_to_all"
        return "reduce_scatter" if source == PARTIAL else "take_part"
    if is_cut(source):
        return "all_gather" if target == WHOLE else "pad"
    return "all_reduce" if source == PARTIAL else "share"


def lower(graph: fx.Graph, sharding: Sharding | None, axes: Sequence[Axis], *, rows: int,
          device: torch.device, replicas: Replicas | None = None) -> fx.GraphModule:
    """The program of this rank for micro-batches of `rows` rows.

    `replicas` are the ranks with this block, for ops that look at the whole batch.
    """
    return Lowering(graph, sharding, axes, replicas, rows, device).finish()
