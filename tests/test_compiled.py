"""Compiled blocks: the numbers of uncompiled ones, few compilations, and nothing lost.

A stand-in for the compiler keeps everything but the machine code: the same tracing, the same graphs
of forward and backward. What is `slow` compiles.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module_simplified

import autopar_torch as ap
import claims
import oracle
import zoo
from autopar_torch.find import compiling
from autopar_torch.plan import Plan
from autopar_torch.shard import compiled
from autopar_torch.shard.linear import WeightQueue, delivered, direct_linear

ROWS = 8


def stand_in(graph: fx.GraphModule, like: Sequence[Tensor]) -> compiled.Run:
    """Forward and backward as graphs, which run op by op."""
    def boxed(module: fx.GraphModule, _: Any) -> Any:
        def run(args: list[Any]) -> Any:
            given, args[:] = tuple(args), []
            return module(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return cast(compiled.Run, aot_module_simplified(graph, list(like), fw_compiler=boxed))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for known in (compiled.compilations, compiled.failures, compiled._programs):
        monkeypatch.setattr(compiled, _name(known), type(known)())
    if "slow" not in request.keywords:
        monkeypatch.setattr(compiled, "compile_graph", stand_in)


def _name(known: object) -> str:
    return next(name for name, value in vars(compiled).items() if value is known)


def kinds_of(name: str, plan: Plan) -> tuple[str, ...]:
    model = ap.parallelize(zoo.build(name), zoo.batch(name, ROWS), plan=plan)
    return tuple(model.graph.kinds)


def trained(module: nn.Module, name: str, plan: Plan) -> tuple[Tensor, list[Tensor]]:
    """Losses and last gradients of two steps."""
    torch.manual_seed(3)
    model, losses = ap.parallelize(copy.deepcopy(module), plan=plan), []
    for step in range(2):
        model.zero_grad()
        loss = oracle.loss_of(model(**zoo.batch(name, ROWS, seed=step)))
        loss.backward()
        losses.append(loss.item())
    return torch.tensor(losses), [cast(Tensor, p.grad) for p in model.parameters()]


# --- numbers and counts ---------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_blocks_are_compiled_once_for_each_number_of_rows_and_evaluation_not_at_all() -> None:
    plan, module = Plan.uniform(num_micro_batches=3, recompute=True), zoo.build("llama")
    fused = replace(plan, compiled=kinds_of("llama", plan))
    torch.testing.assert_close(trained(module, "llama", fused), trained(module, "llama", plan))
    made = dict(compiled.compilations)
    assert (set(made.values()), compiled.failures) == ({2}, {}), "3, 3 and 2 rows"
    with torch.no_grad():
        ap.parallelize(module.eval(), plan=fused)(**zoo.batch("llama", ROWS))
    assert made == compiled.compilations


@pytest.mark.slow
def test_dropout_draws_the_numbers_that_it_draws_uncompiled() -> None:
    module = zoo.build("gpt2")
    for own in module.modules():
        if isinstance(own, nn.Dropout):
            own.p = 0.3
    plan = Plan.uniform()
    fused = replace(plan, compiled=kinds_of("gpt2", plan))
    first, second = trained(module, "gpt2", fused), trained(module, "gpt2", plan)
    torch.testing.assert_close(first, second)
    assert compiled.compilations and not compiled.failures


def test_inputs_that_lie_in_ever_other_ways_are_compiled_for_eight_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = fx.Graph()
    x = made = graph.placeholder("x")
    for _ in range(compiled.LEAST_OPS):
        made = graph.call_function(torch.ops.aten.sin.default, (made,))
    graph.output((made,))
    block = compiled.compiled(fx.GraphModule({}, graph), "waves")
    assert x in graph.nodes
    for n in range(compiled.MOST + 2):
        given = torch.randn(n + 1, 3)
        torch.testing.assert_close(block(given)[0], given.sin().sin().sin().sin())
    assert compiled.compilations["waves"] == compiled.MOST
    assert "8 times" in compiled.failures["waves"]


# --- weight gradients -----------------------------------------------------------------------------


def test_a_linear_that_hands_nothing_over_is_torchs_own() -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    assert type(direct_linear(x, weight).grad_fn).__name__ == "_DirectBackward"
    with delivered(math.inf):
        assert not hasattr(direct_linear(x, weight).grad_fn, "saved_tensors")


def slow_claim_zero_bubble_puts_off_as_many_weight_gradients_when_compiled() -> None:
    plan = Plan.uniform(pp=2, num_micro_batches=4, schedule="zero_bubble")
    counts: list[int] = []
    flush = WeightQueue.flush

    def counted(queue: WeightQueue, *done: Any) -> None:
        counts.append(len(queue.waiting))
        flush(queue, *done)

    WeightQueue.flush = counted  # type: ignore[method-assign]
    module = zoo.build("llama")
    own = [trained(module, "llama", plan)]
    usual, counts[:] = list(counts), []
    own.append(trained(module, "llama", replace(plan, compiled=kinds_of("llama", plan))))
    torch.testing.assert_close(*own)
    assert compiled.compilations, compiled.failures
    assert counts[-8:] == usual
    assert usual[0] > 7


def claim_a_split_block_is_one_program_with_its_exchanges_inside() -> None:
    compiled.compile_graph = stand_in
    slow_claim_a_split_block_is_one_program_with_its_exchanges_inside()


def slow_claim_a_split_block_is_one_program_with_its_exchanges_inside() -> None:
    plan = Plan.uniform(tp=2)
    kinds = kinds_of("llama", plan)
    worst = oracle.compare("llama", replace(plan, compiled=kinds), pad=True)
    assert max(worst.values()) < oracle.TOLERANCE, worst
    assert not compiled.failures, compiled.failures
    assert max(compiled.compilations.values()) == 1
    exchanges = [key[0].count("moved") for key in compiled._programs]
    assert max(exchanges) >= 4


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


# --- what cannot be compiled ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_block_that_the_compiler_refuses_runs_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def picky(graph: fx.GraphModule, like: Sequence[Tensor]) -> compiled.Run:
        if len(graph.graph.nodes) > 20:
            raise RuntimeError("too long\nby far")
        return stand_in(graph, like)

    monkeypatch.setattr(compiled, "compile_graph", picky)
    plan, module = Plan.uniform(), zoo.build("llama")
    fused = replace(plan, compiled=kinds_of("llama", plan))
    torch.testing.assert_close(trained(module, "llama", fused), trained(module, "llama", plan))
    assert "RuntimeError: too long" in compiled.failures.values()


@pytest.mark.slow
def test_what_is_measured_compiled_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "GAIN", -9.0)
    monkeypatch.setattr(compiling, "ROUNDS", 1)
    batch = zoo.batch("llama", ROWS)
    model = ap.parallelize(zoo.build("llama"), batch, compile=True)
    made = dict(compiled.compilations)
    model(**batch).loss.backward()
    assert (model.plan.compiled, compiled.compilations) == (tuple(model.graph.kinds), made)
    assert set(made.values()) == {1}


def test_without_a_compiler_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> compiled.Run:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(compiled, "compile_graph", refused)
    with caplog.at_level(logging.WARNING, "autopar_torch"):
        model = ap.parallelize(zoo.build("llama"), zoo.batch("llama", ROWS), compile=True)
    assert model.plan.compiled == ()
    assert [r.message for r in caplog.records] == [
        "blocks run uncompiled, as torch's compiler fails here: RuntimeError: no C++ compiler "
        "(rank 0)"]
