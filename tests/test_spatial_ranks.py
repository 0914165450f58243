"""Linears in rings on several processes: their messages, and the numbers of one process."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopar_torch as ap
import claims
import oracle
import zoo
from autopar_torch.plan import Plan
from autopar_torch.run import world
from autopar_torch.run.sharded import local
from autopar_torch.shard import spatial
from autopar_torch.shard.collectives import Axis, run_moves
from autopar_torch.shard.layout import (
    Forms,
    Split,
    parse_layout,
    side,
)
from autopar_torch.shard.parts import piece
from autopar_torch.shard.price import moves
from ranks import run_ranks
from test_spatial import COLUMN, FUSED, SQUARES, ring_plan, rings


class Messages(TorchDispatchMode):
    """Counts what goes through torch.distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def _axis() -> Axis:
    rank, size = world.start()
    return Axis(dist.group.WORLD, size, rank, tuple(range(size)))


def claim_a_ring_sends_so_many_messages_and_starts_no_collective() -> None:
    axis = _axis()
    n = side(axis.parts)
    linear = spatial.SpatialLinear(axis, True, False)
    x, w, bias = (torch.randn(s).requires_grad_() for s in ((3, 4, 6), (8, 6), (8,)))
    with Messages() as ahead:
        y = linear(x, w, bias)
    with Messages() as back:
        y.sum().backward()
    assert ahead.count == {"send": 2 * (n - 1), "recv_": 2 * (n - 1)}, ahead.count
    both = 2 * (n - 1) + 2 * n - 1
    assert back.count == {"send": both, "recv_": both}, back.count
    with Messages() as frozen:
        linear(x.detach(), w).sum().backward()
    some = 2 * (n - 1) + 1 + 2 * n - 1  # backward has nothing to do but to turn dO
    assert frozen.count == {"send": some, "recv_": some}, frozen.count


def claim_every_conversion_ends_in_the_pieces_of_the_target() -> None:
    axis = _axis()
    whole = torch.randn(24, 48, generator=torch.Generator().manual_seed(0))
    plain = [Split(0), Split(1), Split(1, 3), Split(0, 2)]
    options: list[Any] = ["R", *plain, *SQUARES, *FUSED]

    def own(layout: Any) -> Tensor:
        if isinstance(layout, str):
            return whole if layout == "R" else whole * (axis.index + 1) / 10  # 1 + 2 + 3 + 4
        return piece(whole, layout, axis.parts, axis.index)

    for source, target in itertools.product(["P", *options, COLUMN], options):
        got = run_moves(own(source), moves((source,), (target,)), [axis])
        assert torch.allclose(got, own(target)), (source, target)


def claim_a_share_of_a_bias_gradient_becomes_partial_sums() -> None:
    axis = _axis()
    own = torch.full((2,), 1.0)
    sums = COLUMN._replace(skew="p")
    for target, want in (("P", None), ("R", torch.full((4,), 2.0))):
        got = run_moves(own, moves((sums,), (target,)), [axis])
        if want is None:
            want = torch.zeros(4)
            want[axis.index % 2 * 2 : axis.index % 2 * 2 + 2] = 1.0
        assert torch.equal(got, want), target


def slow_claim_what_is_saved_from_blocks_is_read_by_any_plan() -> None:
    torch.manual_seed(0)
    plan = ring_plan("nanogpt", {"tp": 4})
    model = ap.parallelize(zoo.build("nanogpt"), plan=plan)
    opt = oracle.optimizer(model.parameters())
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)

    def step(model: Any, opt: Any, seed: int) -> float:
        loss = oracle.loss_of(model(**zoo.batch("nanogpt", 8, seed, pad=True)))
        loss.backward()
        opt.step()
        opt.zero_grad()
        return float(loss)

    step(model, opt, 0)
    model.save(folder[0], opt)
    after = [step(model, opt, 1), step(model, opt, 2)]
    for other in (plan, Plan.uniform(tp=4), Plan.uniform(dp=4, zero=3)):
        again = ap.parallelize(zoo.build("nanogpt", 7), zoo.batch("nanogpt", 8), plan=other)
        fresh = oracle.optimizer(again.parameters())
        again.load(folder[0], fresh)
        found = [step(again, fresh, 1), step(again, fresh, 2)]
        assert found == pytest.approx(after, rel=1e-5), other.describe()


def slow_claim_weights_and_their_state_are_cut_n_times_n_ways() -> None:
    model = ap.parallelize(zoo.build("tiny"), plan=ring_plan("tiny", {"tp": 4}))
    opt = oracle.optimizer(model.parameters())
    model(**zoo.batch("tiny", 8)).backward()
    opt.step()
    for name, sizes in (("up.weight", (16, 8)), ("up.bias", (16,))):
        param = dict(model.named_parameters())[name]
        kept = (param, param.grad, opt.state[param]["exp_avg"])
        assert {tuple(local(tensor).shape) for tensor in kept} == {sizes}, name


def slow_claim_evaluation_follows_the_cut_of_the_parameters() -> None:
    model = ap.parallelize(zoo.build("nanogpt"), plan=ring_plan("nanogpt", {"tp": 4}))
    batch = zoo.batch("nanogpt", 8, pad=True)
    trained = float(oracle.loss_of(model(**batch)))
    with torch.no_grad():
        assert float(oracle.loss_of(model.eval()(**batch))) == pytest.approx(trained, rel=1e-5)


def slow_claim_gpt2_matches_one_process() -> None:
    _judge(numbers(["gpt2"], {"tp": 4}), {"tp": 4})


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_4_ranks(name: str) -> None:
    claims.hold(__name__, name, 4)


def numbers(names: list[str], degrees: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """In a rank: model -> how many kinds of linear run in rings, worst difference."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        plan = ring_plan(name, degrees)
        found[name] = len(rings(plan)), max(oracle.compare(name, plan, True).values())
    return found


def check_numbers(num_ranks: int, names: list[str], degrees: dict[str, Any]) -> None:
    _judge(run_ranks(num_ranks, "test_spatial_ranks:numbers", names, degrees)[0], degrees)


def _judge(found: dict[str, tuple[int, float]], degrees: dict[str, Any]) -> None:
    for name, (num_rings, worst) in found.items():
        assert num_rings > 0, f"{name} has nothing that runs in rings"
        assert worst <= oracle.TOLERANCE, (name, degrees, worst)


OTHERS = ["llama", "qwen3", "mistral", "gemma", "opt", "bloom", "neox", "phi", "bert", "t5",
          "mixtral", "nanogpt", "encoder"]


@pytest.mark.slow
def test_every_transformer_matches_one_process_on_4_ranks() -> None:
    """All but ViT: its sequence of 17 cannot be cut."""
    check_numbers(4, OTHERS, {"tp": 4})


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [
    {"tp": 4, "pp": 2, "num_micro_batches": 4, "schedule": "zero_bubble"},
    {"tp": 4, "pp": 2, "num_micro_batches": 2, "recompute": True},
    {"tp": 4, "dp": 2, "zero": 3, "num_micro_batches": 2},
    {"tp": 8, "tp_mesh": (2, 4)},
    {"tp": 8, "tp_mesh": (4, 2)},
], ids=oracle.text)
def test_rings_go_with_everything_else_on_8_ranks(degrees: dict[str, Any]) -> None:
    check_numbers(8, ["gpt2", "llama"], degrees)


@pytest.mark.slow
def test_16_ranks_match_one_process() -> None:
    check_numbers(16, ["tiny"], {"tp": 16})


def mixed(mesh: list[int]) -> dict[str, float]:
    """In a rank: weights cut by a square on one axis, and by every factor on the other."""
    torch.set_num_threads(1)
    found = {}
    for weight, grad in (("R", "P"), ("S0", "S0"), ("S1", "S1")):
        forms = [(weight, grad) if size == 2 else ("S1x0w", "S1x0w") for size in mesh]
        form = Forms(*(tuple(map(parse_layout, side)) for side in zip(*forms, strict=True)))
        pins = {name: {tuple(mesh): form} for name in ("up.weight", "down.weight")}
        plan = ring_plan("tiny", {"tp": 8, "tp_mesh": tuple(mesh)}, pins, rows=1)
        found[",".join(rings(plan))] = max(oracle.compare("tiny", plan, False).values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 4), (4, 2)])
def test_the_other_axis_may_cut_rows_columns_or_what_is_summed(mesh: tuple[int, ...]) -> None:
    found = run_ranks(8, "test_spatial_ranks:mixed", mesh)[0]
    assert len(found) == 3, "some pinned form was not used"
    assert max(found.values()) <= oracle.TOLERANCE, found
