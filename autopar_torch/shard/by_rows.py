"""The loss of a vocabulary, some rows at a time: at no moment are there the logits of all rows.

Forward computes the gradients along with the loss, while the logits of a piece are there, and keeps
those instead of logits: of the rows, and of the weight. So no product is computed twice. Backward
multiplies them by the gradient of the loss. It is done where that is less to keep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..model import TensorInfo, at_rows
from .layout import local_shape
from .linear import deliver, direct_linear, outer, product
from .loss_sums import cross_entropy
from .rules import ShapedOp, has_tag, op_name
from .solve import OpWay

LEAST_ROWS = 512  # of a piece: each adds to the gradient of all of the weight, which takes time
LEAST_LOGITS = 2**24  # numbers; fewer need no care
PAYS = 0.75  # of the logits, at most, must be what is there instead
_PRODUCTS = ("linear", "matmul", "mm")


class Tail(NamedTuple):
    """What makes the logits of a loss, in how many pieces, and how many numbers are kept instead
    of them."""

    product: fx.Node
    pieces: int
    num_kept: int

    @property
    def bytes_kept(self) -> int:
        return 4 * self.num_kept

    def inside(self, loss: fx.Node) -> list[fx.Node]:
        """What is never there for all rows: the logits, and what becomes of them."""
        return between(self.product, loss)[:-1]


def is_product(node: fx.Node) -> bool:
    """Whether it is rows times a matrix."""
    if op_name(node) not in _PRODUCTS or node.kwargs:
        return False
    dims = [len(n.meta["info"].shape) for n in node.args[:2]]  # type: ignore[union-attr]
    return dims[0] > 1 and dims[1] == 2


def is_by_element(node: fx.Node) -> bool:
    """Whether it is done to each number of its first input alone, with nothing to be learned."""
    plain = op_name(node) in ("to", "_to_copy") or (
        has_tag(node, torch.Tag.pointwise) and not has_tag(node, torch.Tag.nondeterministic_seeded))
    first, *others = node.all_input_nodes or [node]
    return plain and node.args[0] is first and all(map(_is_fixed, others)) and (
        node.meta["info"].shape == first.meta["info"].shape)


def _is_fixed(node: fx.Node) -> bool:
    info = node.meta["info"]
    return isinstance(info, TensorInfo) and info.rows_dim is None and not info.grad


def would_pay(node: fx.Node) -> bool:
    """Whether a product has so many columns that it pays for many rows."""
    width = node.args[0].meta["info"].shape[-1]  # type: ignore[union-attr]
    return bool(node.meta["info"].shape[-1] >= 2 * width)


def tails(graph: fx.Graph, choices: Mapping[fx.Node, OpWay], mesh: tuple[int, ...],
          rows: int) -> dict[fx.Node, Tail]:
    """By loss: what of a block is computed in pieces if it is split so, for so many rows."""
    found = {}
    for loss in graph.nodes:
        if loss.target is cross_entropy and (node := _product_of(loss, choices)):
            tail = _tail(node, choices.get(node), mesh, rows)
            if tail.pieces > 1:
                found[loss] = tail
    return found


def _product_of(loss: fx.Node, choices: Mapping[fx.Node, OpWay]) -> fx.Node | None:
    """What makes its logits, if all in between is by element and nothing is exchanged there."""
    reader, node = loss, cast(fx.Node, loss.args[0])
    if len(node.meta["info"].shape) != 2 or not all(
            n.meta["info"].shape[1:] == () and not n.meta["info"].grad
            for n in loss.all_input_nodes[1:]):
        return None
    while len(node.users) == 1 and _stays(node, reader, choices):
        if is_product(node):
            ring = node in choices and choices[node].ring is not None
            return None if ring else node
        if not is_by_element(node):
            return None
        reader, node = node, cast(fx.Node, node.args[0])
    return None


def _stays(node: fx.Node, reader: fx.Node, choices: Mapping[fx.Node, OpWay]) -> bool:
    """Whether a value is read in the form in which it is made."""
    if node not in choices or reader not in choices:
        return not choices
    place = ShapedOp(reader).inputs.index(node)
    return choices[reader].ins[place] == choices[node].made


def _tail(node: fx.Node, choice: OpWay | None, mesh: tuple[int, ...], rows: int) -> Tail:
    shape = node.meta["info"].shape
    own = local_shape(shape, choice.out, mesh) if choice else shape
    num_rows, num_columns = (at_rows(size, rows) for size in own)
    width = node.args[0].meta["info"].shape[-1]  # type: ignore[union-attr]
    every, kept = num_rows * num_columns, width * (num_rows + num_columns)
    count = min(-(-2 * every // kept), num_rows // LEAST_ROWS)  # a piece is half of what is kept
    pays = every >= LEAST_LOGITS and count > 1 and kept + every / count <= PAYS * every
    return Tail(node, count if pays else 1, kept)


def between(made: fx.Node, loss: fx.Node) -> list[fx.Node]:
    """A product, and what follows it up to a loss."""
    chain = [loss]
    while chain[0] is not made:
        chain.insert(0, cast(fx.Node, chain[0].args[0]))
    return chain


def fold(root: nn.Module, made: fx.Node, loss: fx.Node,
         count: int) -> tuple[LossByRows, tuple[fx.Node | None, ...]]:
    """The module for these, and its arguments."""
    chain = between(made, loss)
    target = cast(fx.Node, loss.args[1])
    read = dict.fromkeys(n for node in chain[1:] for n in node.all_input_nodes)
    rest = [n for n in read if n not in chain and n is not target]
    inner = fx.Graph()
    env = {n: inner.placeholder(n.name) for n in (made, target, *rest)}
    for node in chain[1:]:
        env[node] = inner.node_copy(node, env.__getitem__)
    inner.output(env[loss])
    x, weight, bias = cast(Any, (*made.args, None)[:3])
    module = LossByRows(fx.GraphModule(root, inner, "Piece"), count,
                        transposed=op_name(made) == "linear" or (
                            made.target is direct_linear and not made.kwargs),
                        is_leaf=made.target is direct_linear)
    return module, (x, weight, bias, target, *rest)


class LossByRows(nn.Module):
    """A product, and what is done to it up to its loss, for some rows at a time."""

    def __init__(self, piece: fx.GraphModule, count: int, transposed: bool, is_leaf: bool) -> None:
        super().__init__()
        self.piece, self.count = piece, count
        self.transposed, self.is_leaf = transposed, is_leaf

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
                *rest: Any) -> Tensor:
        if torch.is_grad_enabled():
            return cast(Tensor, _ByRows.apply(self, x, weight, bias, target, *rest))
        return self.total(x, weight, bias, target, *rest)

    def pieces(self, x: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(x.chunk(self.count), target.chunk(self.count), strict=True)

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight if self.transposed else weight.t(), bias)

    def total(self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
              *rest: Any) -> Tensor:
        return cast(Tensor, sum(self.piece(self.logits(rows, weight, bias), labels, *rest)
                                for rows, labels in self.pieces(x, target)))

    def with_grads(self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
                   *rest: Any, needs: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """The loss, and gradients of the rows, the weight and the bias, added up in float32."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        total = 0.0
        dx = torch.empty_like(x) if needs[0] else None
        dw, db, start = None, None, 0
        for rows, labels in self.pieces(x, target):
            own = self.logits(rows, weight, bias).requires_grad_()
            with torch.enable_grad():
                loss = self.piece(own, labels, *rest)
            total = loss.detach() + total
            (dy,) = torch.autograd.grad(loss, own)
            del own, loss
            if dx is not None:
                into = dx[start : start + len(rows)]
                torch.mm(dy, weight if self.transposed else weight.t(), out=into)
            if needs[1]:
                new = product(dw, *outer(rows, dy, self.transposed))
                dw = new if dw is not None else new.to(wide)
            if needs[2]:
                db = dy.sum(0, dtype=wide) if db is None else db + dy.sum(0, dtype=wide)
            start += len(rows)
        return cast(Tensor, total), [dx, dw, db]

    def blank(self, args: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
        """Of the shapes and types of the gradients, without memory for them."""
        wide = torch.promote_types(cast(Tensor, args[1]).dtype, torch.float32)
        return [like.new_empty((), dtype=like.dtype if k == 0 else wide).expand(like.shape)
                if like is not None and needs[k] else None for k, like in enumerate(args)]


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: LossByRows, *args: Any) -> Tensor:
        ctx.own, ctx.weight, needs = own, args[1], ctx.needs_input_grad[1:4]
        if _first.get():
            total, kept = own.total(*args), own.blank(args[:3], needs)
        else:
            with torch.autograd.graph.saved_tensors_hooks(_same, _same):
                total, kept = own.with_grads(*args, needs=needs)
        ctx.save_for_backward(*kept)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (scale,), (dx, made, db), weight = grads, ctx.saved_tensors, ctx.weight
        for one in (dx, db):
            if one is not None:
                one.mul_(scale)  # in place: a step runs backward once
        dw = None
        if made is not None and ctx.own.is_leaf:
            dw = deliver(weight, lambda into: made.mul_(scale) if into is None
                         else into.addcmul_(made, scale))
        elif made is not None:
            dw = made.mul_(scale).to(weight.dtype)
        return (None, dx, dw, db, *[None] * (len(ctx.needs_input_grad) - 4))


def _same(value: Tensor) -> Tensor:
    return value.detach()


_first: ContextVar[bool] = ContextVar("first", default=False)  # all of it runs again for backward


@contextlib.contextmanager
def first_run() -> Iterator[None]:
    """A run that backward repeats: gradients of a loss are not wanted until then."""
    token = _first.set(True)
    try:
        yield
    finally:
        _first.reset(token)
