"""Plans whose ranks hold overlapping parts of a parameter: each element counts once."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar_torch as ap
import oracle
import zoo
from autopar_torch.errors import PlanError
from autopar_torch.plan import Plan, Replica, Stage, check, fit
from autopar_torch.run import shardings, world
from autopar_torch.shard.atoms import atoms
from autopar_torch.shard.holdings import Box, all_holdings
from autopar_torch.shard.reduction import boxes_of
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from ranks import run_ranks


@pytest.mark.slow
def test_replicas_and_stages_of_other_shapes_hold_parts_that_overlap() -> None:
    assert run_ranks(3, "test_overlaps:check_overlaps")[0] == {}


UNEVEN = {
    "tp2 beside tp1": Plan((Replica((Stage((0, 1)),)), Replica((Stage((2,)),)))),
    "the same, ZeRO": Plan((Replica((Stage((0, 1)),)), Replica((Stage((2,)),))), zero=1),
    "tp2 then tp1, tied": Plan((Replica((Stage((0, 1)), Stage((2,)))),)),
    "tp1 then tp2, tied": Plan((Replica((Stage((0,)), Stage((1, 2)))),)),
}


def check_overlaps() -> dict[str, Any]:
    """Norms, training, state dicts and checkpoints of plans whose parts overlap; what is wrong."""
    world.start()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, plan in UNEVEN.items():
        found |= {f"{name}: {what}": off for what, off in oracle.compare(
            "nanogpt", plan, True).items() if off > 1e-5}
        found |= {f"{name}: {what}": off for what, off in _saved(plan).items() if off > 1e-5}
    return found


def _saved(plan: Plan) -> dict[str, float]:
    """Saved under a plan, loaded under another: how far model and optimizer are apart."""
    batch, states = zoo.batch("nanogpt", 8), []
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    for own in (plan, Plan.uniform(dp=3, zero=2)):
        model = ap.parallelize(zoo.build("nanogpt"), batch, plan=own)
        opt = oracle.optimizer(model.parameters())
        if own is plan:
            model(**batch).backward()
            opt.step()
            model.save(folder[0], opt)
        else:
            model.load(folder[0], opt)
        values = [state[k] for state in opt.state_dict()["state"].values() for k in sorted(state)]
        states.append(list(model.state_dict().values()) + values)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    apart = [float((a - b).abs().max()) for a, b in zip(*states, strict=True)]
    return {"saved": max(apart)}


def test_stages_on_the_same_devices_have_one_mesh() -> None:
    stages = (Stage((0, 1, 2, 3), (0, 1), (2, 2)), Stage((0, 1, 2, 3), (1, 2), (4,)))
    with pytest.raises(PlanError, match="are a mesh of"):
        check(Plan((Replica(stages),)), 4)


def test_a_fused_weight_is_cut_under_zero_though_its_boxes_lie_side_by_side() -> None:
    call, _ = take_apart((), zoo.batch("gpt2", 4))
    traced = trace(zoo.build("gpt2"), call)
    plan = shardings.complete(fit(Plan.uniform(tp=2, dp=2, zero=1), traced.graph), traced, 2)
    fused = [name for name in traced.graph.params if name.endswith("c_attn.weight")]
    assert fused
    for name in fused:
        held = boxes_of(plan, traced.graph, name, all_holdings(plan, traced.graph)[name])
        cells = [cell for boxes in held.values() for box in boxes for cell in _cells(box)]
        assert [len(boxes) for boxes in held.values()] == [3] * 4
        assert len(cells) == len(set(cells)) == traced.graph.params[name].num_elements


def test_atoms_cover_what_anyone_holds_once() -> None:
    rng = random.Random(0)
    for _ in range(200):
        shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
        held = {rank: _boxes(rng, shape) for rank in range(rng.randint(1, 4))}
        counts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for atom in atoms(held):
            for cell in (cell for box in atom.boxes for cell in _cells(box)):
                counts.setdefault(cell, []).append(atom.holders)
        for cell in _cells(((0,) * len(shape), tuple(shape))):
            holders = tuple(r for r, own in held.items() if any(cell in _cells(b) for b in own))
            assert counts.get(cell, []) == ([holders] if holders else [])


def _boxes(rng: random.Random, shape: list[int]) -> list[Box]:
    """Of one rank, disjoint: a box, or two halves of another."""
    starts = tuple(rng.randint(0, n - 1) for n in shape)
    sizes = tuple(rng.randint(0, n - a) for n, a in zip(shape, starts, strict=True))
    half = sizes[0] // 2
    if rng.random() < 0.5 or not half:
        return [(starts, sizes)]
    return [(starts, (half, *sizes[1:])),
            ((starts[0] + half, *starts[1:]), (sizes[0] - half, *sizes[1:]))]


def _cells(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(a, a + n) for a, n in zip(*box, strict=True))))
