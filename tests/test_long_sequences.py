"""Attention along the sequence: its numbers are those of one process, and it is chosen where it is
cheapest."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import autopar_torch as ap
import claims
import oracle
import zoo
from autopar_torch import files
from autopar_torch.cluster import Link
from autopar_torch.model import ROWS, TensorInfo
from autopar_torch.plan import Plan, fit
from autopar_torch.run import shardings, verify, world
from autopar_torch.shard import ring_attention, solve
from autopar_torch.shard.collectives import Axis
from autopar_torch.shard.price import around_waits
from autopar_torch.shard.rules import ShapedOp
from autopar_torch.shard.strategies import along_sequence
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import big_models

ALONG = "S2,S2,S2>S2"


def _bare(rows: int, seed: int, pad: bool) -> zoo.Batch:
    """Without a mask, but with labels that do not count."""
    batch = zoo.batch("llama", rows, seed, pad)
    del batch["attention_mask"]
    return batch


zoo.OWN |= {f"long_{name}": (zoo.MODELS[name][0], _bare) for name in ("llama", "gpt2", "qwen3")}


def along_plan(name: str, degrees: dict[str, Any]) -> Plan:
    """A plan whose attention goes along the sequence, through its file."""
    traced = trace(zoo.build(name), take_apart((), zoo.batch(name, oracle.ROWS))[0])

    def forced(choices: Sequence[solve.OpWay], spatial: solve.Spatial) -> Sequence[solve.OpWay]:
        return [c for c in choices if c.around is not None] or choices

    with mock.patch.object(solve, "_allowed", forced):
        plan = shardings.complete(fit(Plan.uniform(**degrees), traced.graph), traced, oracle.ROWS)
    return files.decode(files.encode(plan), Plan)


def along(plan: Plan) -> list[str]:
    return [text for sharding in plan.shardings for text in sharding.ops.values() if ALONG in text]


def numbers(names: list[str], degrees: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """In a rank: model -> how many kinds have such an attention, worst difference."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        plan = along_plan(name, degrees)
        found[name] = len(along(plan)), max(oracle.compare(name, plan, True).values())
    return found


def _judge(found: dict[str, tuple[int, float]]) -> None:
    for name, (count, worst) in found.items():
        assert count > 0, f"no attention of {name} goes along the sequence"
        assert worst <= oracle.TOLERANCE, (name, worst)


# --- claims on any number of ranks ----------------------------------------------------------------


def _axis() -> Axis:
    rank, size = world.start()
    return Axis(dist.group.WORLD, size, rank, tuple(range(size)))


def _differences(dtype: torch.dtype, sizes: tuple[int, ...], scale: float | None) -> list[float]:
    """Of the result and of the gradients, for (rows, heads, keys, size, size of values)."""
    axis, (rows, heads, keys, size, out) = _axis(), sizes
    gen = torch.Generator().manual_seed(0)

    def own(x: Tensor) -> Tensor:
        return x.chunk(axis.parts, 2)[axis.index]

    q, k, v, dy = (torch.randn(rows, 12 * axis.parts, *last, generator=gen, dtype=dtype)
                   .transpose(1, 2) for last in ((heads, size), (keys, size), (keys, out),
                                                 (heads, out)))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*whole, is_causal=True, scale=scale, enable_gqa=True)
    want.backward(dy)
    given = [own(x).clone().requires_grad_() for x in (q, k, v)]
    got = ring_attention.RingAttention(axis, scale)(*given)
    got.backward(own(dy))
    pairs = [(got, own(want)), *((a.grad, own(b.grad)) for a, b in zip(given, whole, strict=True))]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


SIZES = [(2, 4, 4, 8, 8), (1, 6, 2, 5, 5), (2, 4, 1, 8, 6)]  # the last has no fused kernel


def claim_attention_is_that_of_one_process() -> None:
    for sizes in SIZES:
        for dtype, most in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            for scale in (None, 0.4):
                assert max(_differences(dtype, sizes, scale)) < most, (sizes, dtype, scale)


def slow_claim_plain_ops_do_it_too_some_queries_at_a_time() -> None:
    plain = ring_attention.Kernel(ring_attention.plain, ring_attention.plain_backward)
    with mock.patch.object(ring_attention, "kernel_for", lambda *_: plain), \
            mock.patch.object(ring_attention, "MOST_SCORES", 100):
        for sizes in SIZES:
            assert max(_differences(torch.float64, sizes, None)) < 1e-10, sizes


def claim_what_is_kept_for_backward_is_cut_too() -> None:
    axis, whole = _axis(), torch.randn(2, 4, 12 * dist.get_world_size(), 8)
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    own = [whole.chunk(axis.parts, 2)[axis.index].clone().requires_grad_() for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = ring_attention.RingAttention(axis, None)(*own)
    each = whole.nbytes // axis.parts
    assert y.requires_grad and sum(sizes.values()) == 4 * each + each // 8, (sizes, each)


def claim_a_gpt_trains_as_in_one_process() -> None:
    if dist.get_world_size() % 2 == 0:  # or its sequence cannot be cut
        _judge(numbers(["nanogpt"], {"tp": dist.get_world_size()}))


def claim_a_block_with_too_many_values_is_not_tried_whole() -> None:
    plan = along_plan("nanogpt", {"tp": dist.get_world_size()})
    for most, tried in ((verify.MOST_KEPT, True), (1000, False)):
        with mock.patch.object(verify, "MOST_KEPT", most), \
                mock.patch.object(verify, "_compared", return_value="") as compared:
            ap.parallelize(zoo.build("nanogpt"), zoo.batch("nanogpt", 2), plan=plan)
        assert compared.called == tried


def test_kernels_of_a_gpu_are_given_what_they_take() -> None:
    """On tensors without data: shapes and precisions."""
    flash = ring_attention.Kernel(ring_attention._flash, ring_attention._flash_backward)
    ring = ring_attention.RingAttention(Axis(None, 4, 1, (0, 1, 2, 3)), None)
    q, k, v = (torch.empty(2, 64, heads, 32, dtype=torch.bfloat16, device="meta")
               for heads in (8, 2, 2))
    with mock.patch.object(ring_attention, "kernel_for", lambda *_: flash), \
            mock.patch.object(ring_attention, "start_messages", lambda *_, **__: []):
        y, sums = ring_attention.attend(ring, q, k, v)
        grads = ring_attention.attend_backward(ring, y, q, k, v, y, sums)
    assert (y.shape, y.dtype, y.device) == (q.shape, q.dtype, q.device)
    assert (sums.shape, sums.dtype) == (q.shape[:3], torch.float32)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, k, v)]


# --- where it is offered and chosen ---------------------------------------------------------------


class Attention(torch.nn.Module):
    def __init__(self, length: int, **options: Any) -> None:
        super().__init__()
        self.length, self.options = length, options
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return F.scaled_dot_product_attention(x, x + 1, x * 2, **self.options).mean()


def _offered(shape: tuple[int, ...], parts: int, **options: Any) -> bool:
    found = trace(Attention(shape[-2], **options), take_apart((torch.randn(shape),), {})[0])
    choices = [c for graph in found.programs.values() for node, own in solve.ways(
        graph, (parts,)).items() if node.name == "scaled_dot_product_attention" for c in own]
    assert choices
    return any(c.around is not None for c in choices)


@pytest.mark.parametrize("shape, parts, options, offered", [
    ((2, 3, 16, 8), 4, {}, True), ((2, 3, 16, 8), 8, {}, True),
    ((2, 3, 12, 8), 4, {}, False),  # a rank's three tokens have no halves
    ((2, 3, 16, 8), 4, {"is_causal": False}, False), ((2, 3, 16, 8), 4, {"dropout_p": 0.1}, False),
    ((2, 16, 8), 4, {}, False),
])
def test_it_is_offered_where_it_is_right(shape: tuple[int, ...], parts: int,
                                         options: dict[str, Any], offered: bool) -> None:
    assert _offered(shape, parts, **{"is_causal": True, **options}) == offered


def test_rows_that_attend_to_each_other_are_never_its_sequence() -> None:
    found = trace(Attention(2, is_causal=True), take_apart((torch.randn(2, 3, 5, 8),), {})[0])
    node, = (n for g in found.programs.values() for n in g.nodes
             if n.name == "scaled_dot_product_attention")
    rows = TensorInfo((3, 5, ROWS, 8), "float32", True)
    assert along_sequence(ShapedOp(node))
    for value in (*node.all_input_nodes, node):
        value.meta["info"] = rows
    assert not along_sequence(ShapedOp(node))


def test_it_waits_for_its_doors_and_for_what_no_computation_hides() -> None:
    """4 ranks, a second a byte: 8 s of forward are 1, 2, 2, 2, 1; backward takes twice as long."""
    link = Link(0.0, 1.0)
    doors = (4 + 4) / 2 + 4 / 2
    ahead, back = around_waits(8.0, 4, (4.0, 4.0, 4.0), 2.0, link, 1.0)
    assert ahead == doors + (4 - 1) + 2 * (4 - 2)
    assert back == doors + (4 - 2) + 2 * (12 - 4) + (8 - 4) + (8 - 2)
    hidden = around_waits(1000.0, 4, (4.0, 4.0, 4.0), 2.0, link, 1.0)
    assert hidden == (doors, doors)
    alone = around_waits(1000.0, 4, (4.0, 4.0, 4.0), 2.0, link, 0.0)
    assert alone == (doors + 3 * 4, doors + 4 + 2 * 12 + 8 + 8)


@pytest.mark.parametrize("heads", [16, 12])
def test_it_is_chosen_for_128k_tokens_on_8_gpus(heads: int) -> None:
    """Heads that 8 devices can share leave little to gain, twelve leave a third of the time."""
    with torch.device("meta"):
        ids = torch.zeros(1, 2**17, dtype=torch.long)
        model = zoo.NanoGPT(32000, 128 * heads, heads, 3, 2**17)
    inputs = {"idx": ids, "targets": ids}
    free, never = (ap.plan(model, inputs, "8xH100", global_batch_size=1, precision="bfloat16",
                           constraints={"rings": rings}) for rings in ("free", "never"))
    assert along(free.plan) and not along(never.plan)
    assert free.step_s < never.step_s * (1.0 if heads == 16 else 0.7)


@pytest.mark.slow
@pytest.mark.parametrize("make, most", [("llama_8b_128k", 1.0), ("qwen_7b_128k", 0.75)])
def test_it_is_chosen_for_a_llama_without_a_mask(make: str, most: float) -> None:
    model, inputs = getattr(big_models, make)()
    free, never = (ap.plan(model, inputs, "8xH100", global_batch_size=1, precision="bfloat16",
                           constraints={"rings": rings}) for rings in ("free", "never"))
    assert along(free.plan) and not along(never.plan)
    assert free.step_s < never.step_s * most


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", claims.names(__name__))
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_on_more_ranks(num_ranks: int, name: str) -> None:
    claims.hold(__name__, name, num_ranks)


def ratio(heads: int) -> float:
    """In a rank: steps with attention along the sequence, by those without; medians in turn."""
    torch.set_num_threads(1)
    ids = torch.randint(512, (1, 4096), generator=torch.Generator().manual_seed(0))
    batch, models, seconds = {"idx": ids, "targets": ids}, [], ([], [])  # type: ignore[var-annotated]
    for goes in (True, False):
        with mock.patch.object(solve, "_allowed", lambda choices, _, goes=goes: [
                c for c in choices if (c.around is not None) == goes] or choices):
            models.append(ap.parallelize(zoo.NanoGPT(512, 192, heads, 4, 4096), batch,
                                         plan=Plan.uniform(tp=2)))
        assert bool(along(models[-1].plan)) == goes
    for _ in range(7):
        for model, own in zip(models, seconds, strict=True):
            dist.barrier()
            start = time.perf_counter()
            oracle.loss_of(model(**batch)).backward()
            dist.barrier()
            own.append(time.perf_counter() - start)
    return median(seconds[0][2:]) / median(seconds[1][2:])


@pytest.mark.slow
def test_three_heads_on_two_ranks_take_less_time_along_the_sequence() -> None:
    assert run_ranks(2, "test_long_sequences:ratio", 3)[0] < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [
    {"tp": 4}, {"tp": 4, "tp_mesh": (2, 2)},
    {"tp": 2, "pp": 2, "num_micro_batches": 2, "schedule": "zero_bubble"},
    {"tp": 2, "pp": 2, "num_micro_batches": 2, "recompute": True},
    {"tp": 2, "dp": 2, "zero": 3, "num_micro_batches": 2},
], ids=oracle.text)
def test_it_goes_with_everything_else_on_4_ranks(degrees: dict[str, Any]) -> None:
    names = ["long_llama", "long_gpt2", "long_qwen3"]
    _judge(run_ranks(4, "test_long_sequences:numbers", names, degrees)[0])
