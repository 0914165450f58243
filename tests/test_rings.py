"""What rings are priced by, and when a plan has them: the solver, the estimate, the constraint."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

import autopar_torch as ap
from autopar_torch.cluster import LOOPBACK, Cluster, Device, Link
from autopar_torch.errors import SearchError
from autopar_torch.find.ways import hidden, meshes, option, options
from autopar_torch.plan import Sharding
from autopar_torch.profile import Curve, Lookup, Profile
from autopar_torch.search.space import Constraints
from autopar_torch.shard import solve
from autopar_torch.shard.convert import conversions
from autopar_torch.shard.estimate import estimate
from autopar_torch.shard.layout import parse_forms, parse_layout, parts_of, side
from autopar_torch.shard.price import Prices, convert_seconds, param_costs, reduce_seconds
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from test_spatial import MANY_ROWS, Tiny, _tiny_batch


def test_the_estimate_of_a_block_is_what_the_solver_minimised() -> None:
    """Gathering a weight that is kept cut and used whole included."""
    traced = trace(Tiny(bias=False), take_apart((), _tiny_batch(4, 0, False))[0])
    for rows in (1, MANY_ROWS):
        prices = Prices(rows=rows, links=(Link(1e-9, 1e9),))
        block = traced.graph.blocks[0]
        graph = traced.programs[block.kind]
        table = solve.tabulate(graph, (4,), prices, spatial="never")
        sharding = solve.read_out(table, block.kind, dict.fromkeys(table.borders, 0))
        cost = estimate(graph, sharding, prices)
        total = cost.forward_s + cost.backward_s + _parameters(graph, sharding, prices)
        total += cost.comm_forward_s + cost.comm_backward_s
        assert total == pytest.approx(sharding.cost_s)


def _parameters(graph: Any, sharding: Sharding, prices: Prices) -> float:
    """Seconds of update and reduction."""
    total = 0.0
    for node in graph.find_nodes(op="placeholder"):
        if node.name.startswith("w_"):
            info, form = node.meta["info"], parse_forms(sharding.forms[node.name])
            total += param_costs(info, prices)[0] / parts_of(sharding.mesh, form.value)
            total += reduce_seconds(form.grad, info.num_bytes(1), sharding.mesh, prices)
    return total


@pytest.mark.parametrize("mesh", [(4,), (2, 4), (4, 2, 4)])
def test_all_conversions_at_once_cost_what_each_costs_alone(mesh: tuple[int, ...]) -> None:
    texts = ["R", "P", "S0", "S1", "S1/3", "S0x1o", "S1x0i", "Sx1o", "Sx1p"]
    options = [[parse_layout(t) for t in texts if side(parts) or "x" not in t] for parts in mesh]
    every = list(itertools.product(*options))
    layouts = random.Random(0).sample(every, min(60, len(every)))
    prices = Prices(links=tuple(Link(10.0**-k, 1e9 + k) for k in range(len(mesh))))
    found = conversions(layouts, mesh, prices).seconds(layouts, layouts, 1e6)
    for (i, a), (j, b) in itertools.product(enumerate(layouts), repeat=2):
        assert found[i, j] == pytest.approx(convert_seconds(a, b, 1e6, mesh, prices)), (a, b)


def test_a_message_hides_as_far_as_it_leaves_the_core_free() -> None:
    """On a slow link a core waits, on a fast one it copies."""
    device = Device("core", 1e10, 1e9, 2**30)
    cluster = Cluster(((device,), (device,)), LOOPBACK, LOOPBACK)
    for busy, hides in ((0.1, 0.9), (0.7, 0.3), (1.0, 0.0)):
        curve = Curve("gather", cluster.place((0, 1)), ((1.0, 1.0),), busy)
        found = hidden(Lookup(Profile(cluster, (), (curve,))), [(0, 1)])
        assert found == pytest.approx(hides)


def test_where_prices_are_for_rings_the_plan_without_is_measured_too() -> None:
    with torch.device("meta"):
        example = {key: torch.zeros(1, 4096, 4096) for key in "xy"}
        traced = trace(Tiny(width=4096), take_apart((), example)[0])
    count = {how: len(options(traced, (4,), Prices(), how)) for how in ("free", "never", "always")}
    assert count == {"free": 2, "never": 1, "always": 1}


def machines(num_nodes: int, per_node: int) -> Cluster:
    device = Device("core", 1e10, 1e9, 2**30)
    return Cluster(((device,) * per_node,) * num_nodes, LOOPBACK, LOOPBACK)


def test_where_rings_are_asked_for_only_groups_that_have_them_are_considered() -> None:
    """Two nodes of two: a group of four is one axis, never 2 x 2; eight are 4 x 2."""
    always = Constraints(rings="always")
    assert (2, 2) in meshes(machines(2, 2), 8, Constraints())
    assert meshes(machines(2, 2), 8, always) == [(4,)]
    assert meshes(machines(4, 2), 8, always) == [(4,), (4, 2)]


@pytest.mark.parametrize("limits", [{}, {"tp": 2}, {"tp": 8}])
def test_rings_that_no_group_can_have_are_refused(limits: dict[str, int]) -> None:
    cluster = machines(1, 8 if limits else 2)
    with pytest.raises(SearchError, match="groups of 4 devices"):
        meshes(cluster, 8, Constraints(rings="always", **limits))


def test_a_plan_for_machines_that_are_not_here_has_the_rings_asked_for() -> None:
    batch = {key: torch.zeros(4, 16, 16) for key in "xy"}
    for rings in ("never", "always"):
        limits = {"rings": rings, "tp": 4}
        plan = ap.plan(Tiny(), batch, "1x4xH100", constraints=limits).plan
        assert ("w" in "".join(t for s in plan.shardings for t in s.ops.values())) == (
            rings == "always"
        )


def test_a_model_without_linears_that_can_run_in_rings_is_told_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    odd = {key: torch.zeros(4, 17, 16) for key in "xy"}
    traced = trace(Tiny(), take_apart((), odd)[0])
    option(traced, (4,), Prices(), "always")
    assert "no linear of this model can run in rings on 4 devices" in caplog.text
