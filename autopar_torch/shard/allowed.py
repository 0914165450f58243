"""Whether a sharding is one that the rules know: what the solver may choose, and nothing else.

Texts are looked up among those, never read: after this every message of the program has one size
on all ranks, and the numbers are right if the rules are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from torch import fx

from ..cluster import LOOPBACK
from ..errors import ShardingError
from ..model import TensorInfo
from ..plan import Sharding
from .layout import Forms
from .price import FORBIDDEN, Prices, move_price, moves
from .rules import ShapedOp, writers
from .solve import SHOWN, border_forms, chosen_way, legal_are, param_forms, ways


class _Check:
    """One walk over the values of a kind, as `solve.tabulate` goes."""

    def __init__(self, graph: fx.Graph, sharding: Sharding) -> None:
        self.graph, self.sharding, self.mesh = graph, sharding, sharding.mesh
        self.prices = Prices(links=(LOOPBACK,) * len(self.mesh))
        self.legal = ways(graph, self.mesh)
        self._names("ops", sharding.ops, [node.name for node in self.legal])
        self.chosen = {node: chosen_way(node, found, sharding)
                       for node, found in self.legal.items()}
        self.outputs = list(enumerate(cast(Any, graph.find_nodes(op="output")[0].args[0])))

    def run(self) -> None:
        values = [node for node in self.graph.nodes if node.op != "output"]
        forms = {f"y{k}": border_forms(node.meta["info"], self.mesh) for k, node in self.outputs}
        for node in values:
            forms |= self._forms_of(node)
        self._names("forms", self.sharding.forms, forms)
        found = {name: self._form(name, among) for name, among in forms.items()}
        for node in values:
            self._follow(node, found)

    def _wrong(self, what: str, room: str, legal: Collection[str] = ()) -> ShardingError:
        return ShardingError(
            what, where=f"Plan.shardings[kind={self.sharding.kind}].{room}",
            fix=legal_are(legal) if legal else "leave the shardings out to have them found",
        )

    def _names(self, room: str, given: Collection[str], wanted: Collection[str]) -> None:
        if missing := sorted(set(wanted) - set(given)):
            raise self._wrong(f"{', '.join(missing[:SHOWN])}: not said how it is split", room)
        if unknown := sorted(set(given) - set(wanted)):
            raise self._wrong(f"{', '.join(unknown[:SHOWN])}: the block has no such value", room)

    def _form(self, name: str, legal: Sequence[Forms]) -> Forms:
        for form in legal:
            if form.text == self.sharding.forms[name]:
                return form
        what = f"{name} cannot lie as {self.sharding.forms[name]!r} on a mesh of {self.mesh}"
        raise self._wrong(what, "forms", {form.text for form in legal})

    def _forms_of(self, node: fx.Node) -> dict[str, list[Forms]]:
        """The legal forms of a value: at a border, as a parameter, and as its readers share it."""
        name, info = node.name, cast(TensorInfo, node.meta.get("info"))
        readers = [k for k, value in self.outputs if value is node]
        wanted = [choice.ins[k] for user, k in self._users(node) for choice in self.legal[user]]
        if node.op == "placeholder" and name.startswith("w_"):
            kinds = (param_forms(info, wanted, self.mesh, shared) for shared in (False, True))
            return {name: [form for found in kinds for form in found]}
        if node.op == "placeholder" and name.startswith("c"):
            return {}
        found = {name: border_forms(info, self.mesh)} if node.op == "placeholder" else {}
        if len(readers) + len(self._users(node)) > 1:
            ends = border_forms(info, self.mesh) if readers else []
            found[f"{name}.form"] = [*wanted, *ends]
        return found

    def _users(self, node: fx.Node) -> list[tuple[fx.Node, int]]:
        """(op, number of its input) for each op that reads a value."""
        found = []
        for user in node.users:
            if user in self.legal:
                inputs = enumerate(ShapedOp(user).inputs)
                found += [(user, k) for k, value in inputs if value is node]
        return found

    def _follow(self, node: fx.Node, forms: dict[str, Forms]) -> None:
        """Check that a value can become, from the form it is made in, those it is read in."""
        choice = self.chosen.get(node)
        have = choice.made if choice else forms.get(
            node.name, Forms.whole(len(self.mesh)))
        info = node.meta.get("info")
        if info is None:
            return
        wanted = [self.chosen[user].ins[k] for user, k in self._users(node)]
        wanted += [forms[f"y{k}"] for k, value in self.outputs if value is node]
        if middle := forms.get(f"{node.name}.form"):
            self._convert(node, have, middle)
            have = middle
        for want in wanted:
            self._convert(node, have, want)

    def _convert(self, node: fx.Node, have: Forms, want: Forms) -> None:
        info = node.meta["info"]
        if isinstance(info, tuple) or writers(node):
            steps, possible = [], have.value == want.value
        else:
            steps, possible = moves(have.value, want.value), True
            steps += moves(want.grad, have.grad) if info.grad else []
        prices = (move_price(step, self.mesh[step.axis], self.prices) for step in steps)
        if not possible or any(start >= FORBIDDEN for start, _ in prices):
            raise self._wrong(
                f"{node.name} lies as {have.text}, which cannot become {want.text}", "forms"
            )


def check(graph: fx.Graph, sharding: Sharding) -> None:
    """Refuse a sharding that the rules do not allow."""
    _Check(graph, sharding).run()
