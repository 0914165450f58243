"""Claims about memory while measuring: bounded before anything runs, asked for by all ranks."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar_torch as ap
import zoo
from autopar_torch.errors import ProfileError
from autopar_torch.find import measuring, offline
from autopar_torch.find.session import session
from autopar_torch.measure import session as sessions
from autopar_torch.measure.bytes import TensorBytes, counting
from autopar_torch.measure.room import PART, capped, chain_bytes, chain_of
from autopar_torch.measure.session import Session
from autopar_torch.plan import fit
from autopar_torch.profile import BlockNeed, few
from autopar_torch.search.space import Constraints, candidates
from autopar_torch.trace import Traced, trace
from autopar_torch.trace.call import take_apart

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import big_models

Chains = dict[Any, list[BlockNeed]]


def chains_of(needs: list[BlockNeed]) -> Chains:
    found: Chains = {}
    for need in needs:
        found.setdefault(chain_of(need), []).append(need)
    return found


def test_no_chain_of_70b_on_64_devices_needs_more_than_there_is() -> None:
    model, batch = big_models.llama_70b()
    traced = trace(model, take_apart((), batch)[0], dtype=torch.bfloat16)
    limits = Constraints(precision="bfloat16")
    cluster = offline.place_of("8x8xH100")
    options = offline.known_of(traced, 512, cluster, limits).options
    rows = sorted({c.rows(512) for c in candidates(options, traced.graph, 64, 512, limits)})
    needs = [BlockNeed(block.kind, sharding, count, recompute)
             for option in options for count in few(rows, measuring.PROBED_ROWS)
             for block, sharding in zip(traced.graph.blocks, option.shardings, strict=True)
             for recompute in (False, True)]
    needs = list(dict.fromkeys(needs))
    room_bytes = PART * cluster.nodes[0][0].memory_bytes

    def most(some: list[BlockNeed]) -> float:
        return max(chain_bytes(own, traced) for own in chains_of(some).values())

    assert rows[-1] >= 64 and most(needs) > 10 * room_bytes
    assert most(capped(needs, traced, room_bytes)) <= room_bytes


@pytest.fixture(scope="module")
def nanogpt() -> tuple[Traced, dict[str, torch.Tensor]]:
    batch = zoo.batch("nanogpt", 8)
    return trace(zoo.build("nanogpt"), take_apart((), batch)[0]), batch


def ready(nanogpt: tuple[Traced, dict[str, torch.Tensor]], *plans: ap.Plan) -> Session:
    traced, batch = nanogpt
    call, tensors = take_apart((), batch)
    own = ap.parallelize(zoo.build("nanogpt"), batch, plan=ap.Plan.uniform())
    given = [fit(plan, traced.graph) for plan in plans]
    return session(traced, given, call, tensors, {}, own.world, own.device)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_a_chain_takes_at_most_what_was_said_and_not_much_less(
        recompute: bool, nanogpt: tuple[Traced, dict[str, torch.Tensor]]) -> None:
    found = ready(nanogpt, ap.Plan.uniform(recompute=recompute))
    [(chain, needs)] = found.asked.items()
    lasting = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
               for runner in found.chains[chain].runners for x in runner.args if x is not None}
    with TensorBytes() as count:
        start = count.mark()
        for _ in range(3):
            found.chains[chain].round()
        end = count.mark()
    used = sum(lasting.values()) + count.peak(start, end)
    assert used <= chain_bytes(needs, found.traced) <= 4 * used


def test_on_a_gpu_bytes_are_counted_by_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    now = most = 0

    def hold(size: int) -> None:
        nonlocal now, most
        now, most = now + size, max(most, now + size)

    def forget() -> None:
        nonlocal most
        most = now

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: most)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forget)
    with counting(torch.device("cuda")) as count:
        marks = []
        for sizes in ((5,), (40, -30), (7, -2), (-1,)):
            for size in sizes:
                hold(size)
            marks.append(count.mark())
    assert [count.at(mark) for mark in marks] == [5, 15, 20, 19]
    assert count.peak(marks[0], marks[1]) == 45 and count.peak(marks[1], marks[3]) == 22
    assert isinstance(counting(torch.device("cpu")), TensorBytes)


def test_chains_stand_on_one_ground(
        nanogpt: tuple[Traced, dict[str, torch.Tensor]]) -> None:
    found = ready(nanogpt, *(ap.Plan.uniform(num_micro_batches=m) for m in (1, 2, 4)))
    floats = [arg for chain in found.chains.values() for runner in chain.runners
              for arg in runner.args if arg is not None and arg.requires_grad]
    assert len(found.chains) == 3
    assert {x.untyped_storage().data_ptr() for x in floats} == {
        flat.untyped_storage().data_ptr() for flat in found.ground.flat.values()}


def test_where_there_is_no_room_all_ranks_are_told_before_a_block_is_made(
        nanogpt: tuple[Traced, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "chain_bytes", lambda *_: float(1 << 60))
    monkeypatch.setattr(sessions, "TimedChain", lambda *_: pytest.fail("a block was made"))
    with pytest.raises(ProfileError, match="where is not as much"):
        ready(nanogpt, ap.Plan.uniform())


def test_rows_are_halved_down_to_one(nanogpt: tuple[Traced, dict[str, torch.Tensor]]) -> None:
    traced, _ = nanogpt
    needs = [BlockNeed(kind, None, rows) for kind in traced.graph.kinds for rows in (1, 64)]
    assert set(capped(needs, traced, float("inf"))) == set(needs)
    assert {need.rows for need in capped(needs, traced, 0.0)} == {1}


@pytest.mark.slow
def test_ways_to_split_of_which_no_row_fits_are_left_out_unless_none_would_be_left() -> None:
    model, batch = big_models.llama_405b()
    traced = trace(model, take_apart((), batch)[0], dtype=torch.bfloat16)
    limits = Constraints(precision="bfloat16", rings="never")
    cluster = offline.place_of("1x8xH100")
    options = list(offline.known_of(traced, 8, cluster, limits).options)
    found = measuring._measurable(options, traced, cluster)
    assert {math.prod(o.mesh) for o in options} == {1, 2, 4, 8}
    assert 8 in {math.prod(o.mesh) for o in found} and 1 not in {math.prod(o.mesh) for o in found}
    small = offline.place_of("1x8xT4")
    assert measuring._measurable(options, traced, small) == options
