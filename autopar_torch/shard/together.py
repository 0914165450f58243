"""Ops that look at all rows of a batch, as one op: every replica does it, with the rows of all.

Rows are gathered and sums over rows are added up; what comes out is cut again, where it has rows.
Gradients go the other way, so a value without rows gets on each replica a part of its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from .again import is_retained
from .collectives import Axis, gather_pieces
from .layout import PARTIAL, Layout, Split, is_cut
from .parts import join, rows_of
from .rows import at_batch


class Together:
    """The target of a node that stands for some ops. Its arguments are the number of rows, and the
    values that these ops read; layouts say where rows are in those, and in the results."""

    def __init__(self, graph: fx.Graph, names: str, text: str, ins: Sequence[Layout],
                 outs: Sequence[Layout]) -> None:
        self.graph, self.text, self.ins, self.outs = graph, text, tuple(ins), tuple(outs)
        self.__name__ = names

    def __repr__(self) -> str:
        return f"together({self.text}, {self.ins}, {self.outs})"

    def program(self, rows: int, device: torch.device) -> fx.GraphModule:
        return fx.GraphModule(nn.Module(), at_batch(self.graph, rows, device), "Together")

    def __call__(self, rows: int, *given: Tensor) -> Any:
        device = next((x.device for x in given if isinstance(x, Tensor)), torch.device("cpu"))
        return self.program(rows, device)(*given)


class Replicas(NamedTuple):
    """The ranks of all replicas with a block; `alike`: one of each, which have the same part of it.
    `places`: where in the group the first of each replica is; this rank's is number `own`."""

    axis: Axis
    alike: bool
    places: tuple[int, ...]
    own: int

    def gather(self, x: Tensor) -> list[Tensor]:
        """Of each replica."""
        found = gather_pieces(x, self.axis)
        return [found[place] for place in self.places]


class AllRows(nn.Module):
    """Such an op on one of several replicas, which has so many of the rows."""

    def __init__(self, what: Together, rows: int, device: torch.device,
                 replicas: Replicas) -> None:
        super().__init__()
        self.what, self.rows, self.device, self.replicas = what, rows, device, replicas
        self.programs: dict[int, fx.GraphModule] = {}

    def forward(self, *own: Tensor) -> Any:
        made = cast(tuple[Tensor, ...], _AllRows.apply(self, *own))
        return made if len(self.what.outs) > 1 else made[0]

    def run(self, rows: int, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if rows not in self.programs:
            self.programs[rows] = self.what.program(rows, self.device)
        made = self.programs[rows](*values)
        return made if isinstance(made, tuple) else (made,)

    def counts(self) -> list[int]:
        """Rows of each replica."""
        own = torch.tensor([self.rows], device=self.device)
        return [int(count) for count in torch.cat(self.replicas.gather(own)).tolist()]

    def joined(self, x: Tensor, layout: Layout, counts: Sequence[int]) -> Tensor:
        """The value of all rows: of pieces, or of a sum over the rows."""
        if layout == PARTIAL:
            return torch.stack(self.replicas.gather(x)).sum(0, dtype=x.dtype)
        if not isinstance(layout, Split):
            return x
        front = x.unflatten(layout.dim, (layout.outer, -1)).movedim(layout.dim + 1, 0)
        each, most = len(front) // self.rows, max(counts)
        padded = front.new_zeros((each * most, *front.shape[1:]))
        padded[: len(front)] = front
        kind = torch.uint8 if x.dtype == torch.bool else x.dtype
        pieces = [piece.view(x.dtype)[: each * count].movedim(0, layout.dim + 1).flatten(
            layout.dim, layout.dim + 1)
            for piece, count in zip(self.replicas.gather(padded.view(kind)), counts, strict=True)]
        return join(pieces, layout)

    def own(self, x: Tensor, layout: Layout, counts: Sequence[int]) -> Tensor:
        """What this replica has of a value of all rows."""
        start = sum(counts[: self.replicas.own])
        return rows_of(x, layout, start, start + self.rows, sum(counts)) if isinstance(
            layout, Split) else x


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: AllRows, *own: Tensor) -> tuple[Tensor, ...]:
        counts = what.counts()
        values = [what.joined(x.detach(), layout, counts)
                  for x, layout in zip(own, what.what.ins, strict=True)]
        for value, needed in zip(values, ctx.needs_input_grad[1:], strict=True):
            value.requires_grad_(needed)
        with torch.enable_grad():
            made = what.run(sum(counts), values)
        ctx.what, ctx.counts, ctx.values, ctx.made = what, counts, values, made
        return tuple(what.own(x.detach(), layout, counts).clone()
                     for x, layout in zip(made, what.what.outs, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        what, counts = ctx.what, ctx.counts
        share = what.rows / sum(counts)
        ends = [(made, what.joined(grad, layout if is_cut(layout) else PARTIAL, counts))
                for made, grad, layout in zip(ctx.made, grads, what.what.outs, strict=True)
                if made.requires_grad]
        leaves = [value for value in ctx.values if value.requires_grad]
        found = iter(torch.autograd.grad([made for made, _ in ends], leaves,
                                         [grad for _, grad in ends], allow_unused=True,
                                         retain_graph=is_retained()))
        given: list[Tensor | None] = []
        for value, layout in zip(ctx.values, what.what.ins, strict=True):
            grad = next(found) if value.requires_grad else None
            if grad is not None and layout != PARTIAL:
                grad = what.own(grad, layout, counts) if is_cut(layout) else grad * share
            given.append(grad)
        return None, *given
