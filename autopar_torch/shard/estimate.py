"""Time and bytes of a block that was never run: its ops by datasheet, its conversions by links."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

from torch import fx

from ..model import TensorInfo
from ..plan import Recompute, Sharding
from ..profile import BlockCost
from .again import Drop, Savings, path, within
from .by_rows import tails
from .layout import Forms, parse_forms, parts_of
from .price import VIEWS, Prices, convert_seconds, num_bytes, op_seconds
from .rules import op_name
from .solve import chosen_way, ring_costs, ways

_LINEAR = VIEWS | {"add", "sub", "neg", "sum", "mean", "cat", "add_", "clone", "to", "_to_copy"}


class _Estimate:
    """One walk over a block, collecting seconds and bytes."""

    def __init__(self, graph: fx.Graph, sharding: Sharding | None, prices: Prices) -> None:
        self.graph, self.sharding, self.prices = graph, sharding, prices
        self.mesh = sharding.mesh if sharding else ()
        self.choices = {node: chosen_way(node, legal, sharding) for node, legal in ways(
            graph, self.mesh).items()} if sharding else {}
        self.compute = self.comm_forward = self.comm_backward = self.kept = self.out = 0.0
        self.largest = self.ahead = 0.0
        found = tails(graph, self.choices, self.mesh, prices.rows)
        self.kept += sum(tail.bytes_kept for tail in found.values())
        self.pieces = {n: tail.pieces for loss, tail in found.items() for n in tail.inside(loss)}
        self.done: set[tuple[str, Forms, Forms]] = set()
        self.saved: dict[str, float] = {}  # by what made it
        self.seconds: dict[str, float] = {}

    def run(self) -> BlockCost:
        for node in self.graph.nodes:
            if node.op == "call_function":
                self._op(node)
            elif node.op == "output":
                self._output(node)
        kept = self.kept + self.out
        return BlockCost(
            self.prices.rows, self.compute + 2 * self.ahead, 2 * (self.compute - self.ahead),
            self.compute - self.ahead, self.compute - self.ahead, self.comm_forward,
            self.comm_backward, out_bytes=self.out, kept_bytes=kept, forward_bytes=kept,
            backward_bytes=self.largest * 3, stash_bytes=kept,
        )

    def _op(self, node: fx.Node) -> None:
        choice = self.choices.get(node)
        seconds = op_seconds(node, self.prices, choice.share if choice else 1)
        self.compute += seconds
        self.seconds[node.name] = seconds
        if choice:
            ahead, back, block = ring_costs(node, choice, self.mesh, self.prices, seconds)
            self.comm_forward += ahead
            self.comm_backward += back
            self.kept += block
        size = self._local_bytes(node) / self.pieces.get(node, 1)
        self.ahead += seconds if node in self.pieces else 0.0  # of its backward, in forward
        self.largest = max(self.largest, size)
        if node.meta["info"] is not None and node not in self.pieces and any(
                user.op == "call_function" and op_name(user) not in _LINEAR for user in node.users):
            self.kept += size
            owner = _owner(node)
            self.saved[owner] = max(size, self.saved.get(owner, 0.0))
        for k, value in enumerate(n for n in node.all_input_nodes if n.meta.get("info")):
            if choice:
                self._convert(value, choice.ins[k])

    def _output(self, node: fx.Node) -> None:
        for k, value in enumerate(node.args[0]):  # type: ignore[arg-type]
            self.out += self._local_bytes(value)  # type: ignore[arg-type]
            if form := self._form(f"y{k}"):
                self._convert(value, form)  # type: ignore[arg-type]

    def _form(self, name: str) -> Forms | None:
        text = self.sharding.forms.get(name) if self.sharding else None
        return parse_forms(text) if text else None

    def _made(self, node: fx.Node) -> Forms:
        if node in self.choices:
            return self.choices[node].made
        return self._form(node.name) or Forms.whole(len(self.mesh))

    def _local_bytes(self, node: fx.Node) -> float:
        parts = parts_of(self.mesh, self._made(node).value)
        return num_bytes(node.meta["info"], self.prices.rows) / parts

    def _convert(self, node: fx.Node, want: Forms) -> None:
        """Through the form that its readers share, each conversion once."""
        steps = [self._made(node), *filter(None, [self._form(f"{node.name}.form")]), want]
        info = node.meta["info"]
        if isinstance(info, tuple) or node.name.startswith("c"):
            return
        for have, then in pairwise(steps):
            if have != then and (node.name, have, then) not in self.done:
                self.done.add((node.name, have, then))
                self._move(info, have, then)

    def _move(self, info: TensorInfo, have: Forms, then: Forms) -> None:
        size = float(info.num_bytes(self.prices.rows))
        self.comm_forward += convert_seconds(have.value, then.value, size, self.mesh, self.prices)
        if info.grad:
            self.comm_backward += convert_seconds(
                then.grad, have.grad, size, self.mesh, self.prices
            )


def _owner(node: fx.Node) -> str:
    """Whose memory a value shows."""
    while node.op == "call_function" and op_name(node) in VIEWS:
        node = node.all_input_nodes[0]
    return node.name


class Again:
    """From what a block costs to what it costs where backward makes values again."""

    def __init__(self, graph: fx.Graph, sharding: Sharding | None, prices: Prices) -> None:
        self.graph, self.sharding, self.prices = graph, sharding, prices

    def __call__(self, cost: BlockCost, recompute: Recompute) -> BlockCost:
        if not recompute or recompute is True:
            return cost.recomputed if recompute else cost
        return cost.again(*self._parts(recompute))

    def _parts(self, recompute: float) -> tuple[float, float]:
        """Of the bytes that are kept beside results, and of the seconds of forward."""
        made, path = self._path
        steps = within(path, recompute * made.compute)
        return (steps[-1].freed / made.kept, steps[-1].seconds / made.compute) if steps else (0, 0)

    @cached_property
    def _path(self) -> tuple[_Estimate, list[Drop]]:
        graph, made = self.graph, _Estimate(self.graph, self.sharding, self.prices)
        made.run()
        others = {_owner(n) for n in graph.find_nodes(op="output")[0].all_input_nodes}
        others |= {n.name for n in graph.find_nodes(op="placeholder")}
        saved = {name: size for name, size in made.saved.items() if name not in others}
        return made, path(graph, Savings(saved, made.seconds, others))


def estimate(graph: fx.Graph, sharding: Sharding | None, prices: Prices) -> BlockCost:
    """The cost as measuring would give it."""
    return _Estimate(graph, sharding, prices).run()
