"""Backward makes a part of the values again: the cheapest first, and to the last bit."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autopar_torch as ap
from autopar_torch.measure.bytes import TensorBytes
from autopar_torch.plan import Stage
from autopar_torch.run.stage import StageRunner
from autopar_torch.shard import again
from autopar_torch.simulate import simulate
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import oracle
from clock.accuracy import Side, pin, session_for
from models import gpt

PARTS = (0.1, 0.4)
BATCH = {"input_ids": torch.arange(4 * 64).view(4, 64) % 60}
BATCH["labels"] = BATCH["input_ids"]


def llama(attention: str = "eager", dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=176, vocab_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        attn_implementation=attention, attention_dropout=dropout)
    return transformers.LlamaForCausalLM(config)


def trained(model: Any, recompute: Any, **degrees: Any) -> tuple[Any, dict[str, Tensor]]:
    """After two steps, so that no first run is among them."""
    parallel = ap.parallelize(model, plan=ap.Plan.uniform(recompute=recompute, **degrees))
    for _ in range(2):
        parallel.zero_grad()
        torch.manual_seed(1)
        parallel(**BATCH).loss.backward()
    return parallel, {name: p.grad.clone() for name, p in parallel.named_parameters()}


def dropped_by(parallel: Any) -> set[str]:
    programs = [program for known in parallel._programs.values() for own in known
                for runner in own.stages.values() for program in runner.programs.values()]
    return {name for program in programs for way in program.meta.get("again", {}).values()
            for name in way.dropped}


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "dropout"), [("eager", 0.0), ("sdpa", 0.0), ("eager", 0.1)])
def test_gradients_are_the_same_to_the_last_bit(attention: str, dropout: float) -> None:
    _, want = trained(llama(attention, dropout), False, num_micro_batches=2)
    for part in PARTS:
        parallel, found = trained(llama(attention, dropout), part, num_micro_batches=2)
        assert dropped_by(parallel)
        assert all(torch.equal(found[name], want[name]) for name in want)


def middle_program(attention: str) -> tuple[fx.GraphModule, list[Any]]:
    """A layer as it is run, and its arguments."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []
    made = StageRunner._program

    def spy(self: StageRunner, index: int, rows: int, train: bool) -> Any:
        program = made(self, index, rows, train)
        return lambda *args: (found.append((program, list(args))), program(*args))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageRunner, "_program", spy)
        ap.parallelize(llama(attention), plan=ap.Plan.uniform())(**BATCH)
    return found[len(found) // 2]


class Regression(nn.Module):
    """`mse_loss` broadcasts what is made and what is given, in one op with two results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
                                    for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x.sin(), y)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_what_is_given_beside_a_value_that_is_made_again_stays(part: float) -> None:
    plain = Regression()
    model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(recompute=part))
    for _ in range(3):  # the first step keeps all
        x, y = torch.randn(2, 8, 12)
        for own in (plain, model):
            own.zero_grad()
            own(x, y).backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_path_contains_or_beats_the_attention_core(attention: str) -> None:
    """Korthikanti et al. recompute scores, softmax and what is made of them, and keep the rest."""
    program, args = middle_program(attention)
    look = again.PackReader(program)
    look.run(*args)
    costs, graph = look.costs, program.graph
    core = [name for name in costs.saved
            if any(word in name for word in ("softmax", "scaled_dot", "matmul"))]
    assert core
    freed = sum(costs.saved[n] for n in core)
    seconds = sum(costs.seconds.get(n.name, 0.0) for n in again._rerun(graph, costs, core))
    steps = again.path(graph, costs)
    best = max(s.freed for s in again.within(steps, seconds * (1 + 1e-9)))
    assert best >= freed, [(step.name, step.freed, step.seconds) for step in steps]


def kept_by(program: fx.GraphModule, args: list[Any], part: Any) -> int:
    args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
            for a in args]
    again.run_again(program, args, part)
    with TensorBytes() as count:
        start = count.mark()
        results = again.run_again(program, args, part)
        end = count.mark()
        del results
    return count.at(end) - count.at(start)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_as_many_bytes_are_freed_as_the_path_says(attention: str) -> None:
    program, args = middle_program(attention)
    look = again.PackReader(program)
    look.run(*args)
    whole = kept_by(program, args, False)
    for part in PARTS:
        kept = kept_by(program, args, part)
        [way] = [way for (own, *_), way in program.meta["again"].items() if own == part]
        freed = sum(look.costs.saved[name] for name in way.dropped)
        assert kept == pytest.approx(whole - freed, rel=0.05) and freed > 0.1 * whole


def test_plans_written_before_are_read_and_parts_are_parts() -> None:
    for text, value in (("true", True), ("false", False), ("0.25", 0.25)):
        written = f'{{"devices": [0], "recompute": {text}}}'.encode()
        stage = msgspec.json.decode(written, type=Stage)
        assert stage.recompute is value or stage.recompute == value
        assert msgspec.json.decode(msgspec.json.encode(stage), type=Stage) == stage
    for text in ("0.0", "1.0", "-0.5", "2"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(f'{{"devices": [0], "recompute": {text}}}', type=Stage)


PLANS: list[dict[str, Any]] = [
    {"tp": 2, "recompute": 0.4}, {"dp": 2, "zero": 3, "num_micro_batches": 2, "recompute": 0.1},
    {"pp": 2, "num_micro_batches": 4, "recompute": 0.4},
    {"pp": 2, "num_micro_batches": 4, "schedule": "zero_bubble", "recompute": 0.4},
]


def worst() -> list[float]:
    """On a rank: the worst difference from one process, of every plan."""
    with oracle.traced_once():
        return [max(oracle.compare("nanogpt", ap.Plan.uniform(**plan), False).values())
                for plan in PLANS]


@pytest.mark.slow
def test_two_ranks_that_make_parts_again_train_as_one() -> None:
    for found in run_ranks(2, "test_again:worst"):
        assert max(found) < oracle.TOLERANCE, found


def counted() -> list[tuple[float, float]]:
    """On a rank: (predicted, measured) bytes of every plan."""
    pin()
    torch.set_num_threads(1)
    sides = {str(plan): Side(lambda: gpt(width=128, layers=3, rows=16), plan) for plan in PLANS}
    for side in sides.values():
        side.step()
    session = session_for(sides)
    session.round()
    profile, rank = session.profile(), dist.get_rank()
    return [(float(simulate(s.model.plan, s.model.graph, profile, 16).memory[rank].peak_bytes),
             float(s.peak_bytes())) for s in sides.values()]


@pytest.mark.slow
def test_predicted_bytes_are_those_of_the_process() -> None:
    for rank in run_ranks(2, "test_again:counted"):
        for plan, (predicted, measured) in zip(PLANS, rank, strict=True):
            assert 0.95 < predicted / measured < 1.05, plan


def under_a_limit(cache: str) -> dict[str, Any]:
    """On a rank: what is found where all that is kept does not fit, and how it trains."""
    os.environ["AUTOPAR_CACHE"] = cache
    pin()
    torch.set_num_threads(1)
    pins = {"dp": 2, "zero": 0, "num_micro_batches": 1}
    model, batch = gpt(width=128, layers=3, rows=32)
    want = copy.deepcopy(model)

    def found(**limits: Any) -> Any:
        return ap.parallelize(copy.deepcopy(model), batch, constraints={**pins, **limits})

    sizes = {r: found(recompute=r).found.memory_bytes for r in (False, 0.1, True)}
    limit = int((sizes[False] + sizes[0.1]) / 2 * 1.04)
    parallel = found(memory_bytes=limit)
    loss = parallel(**batch)[1]
    loss.backward()
    whole = want(**batch)[1]
    whole.backward()
    pairs = zip(parallel.parameters(), want.parameters(), strict=True)
    off = max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs)
    return {"sizes": list(sizes.values()), "limit": limit, "loss": [float(loss), float(whole)],
            "recompute": parallel.plan.replicas[0].stages[0].recompute, "off": off}


@pytest.mark.slow
def test_a_part_is_made_again_where_all_does_not_fit(tmp_path: Path) -> None:
    for found in run_ranks(2, "test_again:under_a_limit", str(tmp_path)):
        assert found["recompute"] in PARTS
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-6)
        assert found["off"] < 1e-5


def test_a_block_of_a_thousand_values_is_no_longer_to_choose_from_than_to_trace() -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(1000):
        value = graph.call_function(torch.ops.aten.silu.default, (value,))
    graph.output(value)
    names = [node.name for node in graph.nodes if node.op == "call_function"]
    costs = again.Savings(dict.fromkeys(names, 1.0), dict.fromkeys(names, 1e-6), ())
    asked = 0

    def counted(*args: Any) -> bool:
        nonlocal asked
        asked += 1
        return is_there(*args)

    is_there = again._is_there
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again, "_is_there", counted)
        assert len(again.path(graph, costs)) == 1000
    assert asked < 10_000
