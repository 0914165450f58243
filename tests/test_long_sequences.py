"""Attention along the sequence: its numbers are those of one process, and it is chosen where it is
cheapest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import claims
import oracle
import zoo
from autopar_torch import files
from autopar_torch.plan import Plan, fit
from autopar_torch.run import shardings, world
from autopar_torch.shard import ring_attention, solve
from autopar_torch.shard.collectives import Axis
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from ranks import run_ranks

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


def claim_plain_ops_do_it_too_some_queries_at_a_time() -> None:
    plain = ring_attention.Kernel(ring_attention.plain, ring_attention.plain_backward)
    with mock.patch.object(ring_attention, "kernel_for", lambda *_: plain), \
            mock.patch.object(ring_attention, "MOST_SCORES", 100):
        for sizes in SIZES:
            assert max(_differences(torch.float64, sizes, None)) < 1e-10, sizes


def claim_a_gpt_trains_as_in_one_process() -> None:
    if dist.get_world_size() % 2 == 0:  # or its sequence cannot be cut
        _judge(numbers(["nanogpt"], {"tp": dist.get_world_size()}))


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", claims.names(__name__))
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_on_more_ranks(num_ranks: int, name: str) -> None:
    claims.hold(__name__, name, num_ranks)


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
