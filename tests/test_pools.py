"""Sailor's mixed pools: its formula gives what it printed, and our plans are never slower by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from autopar_torch.errors import ProfileError
from autopar_torch.model import item_bytes
from autopar_torch.search.common import with_common_borders
from autopar_torch.search.judging import Judge
from autopar_torch.search.pipelines import groupings
from autopar_torch.search.shapes import groups_of
from autopar_torch.search.unequal import search_unequal
from autopar_torch.shard.layout import parse_forms, parts_of
from autopar_torch.simulate import simulate
from problems import unequal
from published import planning, pools, sailor
from slow import slowly

ROWS = pools.NUM_ROWS
POOLS = sailor.own_plans(ROWS)
DATA = planning.read()


@pytest.mark.parametrize("row", POOLS, ids=lambda row: str(row["pool"]))
def test_its_formula_gives_what_sailor_printed_for_its_own_plans(row: dict) -> None:
    assert 1 / sailor.seconds(row["plan"], DATA) == pytest.approx(row["judged_per_s"], abs=5e-5)


@pytest.mark.parametrize("row", POOLS, ids=lambda row: str(row["pool"]))
def test_a_plan_of_sailors_stays_what_it_is_as_one_of_ours(row: dict) -> None:
    (before,), cluster = row["plan"].pipelines, planning.profile(DATA, row["pool"]).cluster
    plan = sailor.as_plan(row["plan"], cluster, ROWS, planning.options(DATA))
    (after,), rows = sailor.of_plan(plan, cluster, ROWS)
    assert (after.layers, after.stages, rows) == (before.layers, before.stages, row["rows"])
    assert sum(after.numbers) * rows == ROWS
    assert max(after.numbers) == before.numbers[0]


@pytest.mark.parametrize("row", [POOLS[0], *slowly(*POOLS[1:])], ids=lambda row: str(row["pool"]))
def test_our_plan_is_never_slower_than_sailors_by_either_simulator(
        row: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "REPEATS", 1)
    pool = pools.Pool(DATA, row["pool"])
    theirs, mine = pool.of_sailor(row["plan"], row["search_s"]), pool.ours()
    assert theirs.fits and mine.fits
    assert mine.sailor_s < theirs.sailor_s
    assert mine.engine_s < theirs.engine_s


def test_devices_hold_as_many_parameters_as_sailor_counts() -> None:
    graph = planning.graph(DATA)
    for option in planning.options(DATA):
        for layer, (block, own) in enumerate(zip(graph.blocks, option.shardings, strict=True)):
            held = sum(
                graph.params[name].num_elements * item_bytes("float32")
                / (parts_of(own.mesh, parse_forms(own.forms[slot]).value) if own else 1)
                for slot, name in block.params.items() if graph.params[name].trainable)
            assert held == 4 * DATA.size(option.degree, layer, "params_floats")


def test_pipelines_with_common_borders_share_out_all_micro_batches() -> None:
    pool = pools.Pool(DATA, POOLS[0]["pool"])
    judge = Judge(pool.graph, pool.options, pool.links, ROWS, pools.LIMITS, 1, True)
    groups = groups_of(pool.profile.cluster, pool.options, pools.LIMITS, judge.measured)
    found = [shared for own in groupings(judge.tables, groups, judge.room_bytes, [4], [0], [False])
             for shared in with_common_borders(own, ROWS // 4, 99)]
    assert {len({group.device for line in one.shape for group in line}) for one in found} == {1, 2}
    for shared in found:
        assert sum(shared.sharing.number) == ROWS // 4
        assert len(set(shared.cuts)) == 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_a_schedule_that_is_pinned_is_searched_with_a_single_micro_batch_too(schedule: str) -> None:
    given = unequal(3, 3)
    limits = replace(given.limits, schedule=schedule, num_micro_batches=1)
    found = search_unequal(*given[:4], limits)
    assert found.best.plan.schedule == schedule or len(found.best.plan.replicas[0].stages) == 1


def test_what_was_not_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="3 rows of layer 1 on 4 x A100-40"):
        DATA.seconds("A100-40", 3, 4, 1)
    with pytest.raises(ProfileError, match=r"no layer_times.json"):
        planning.read(tmp_path)


def test_what_does_not_fit_takes_forever_and_its_memory_is_told() -> None:
    pool = pools.Pool(DATA, POOLS[0]["pool"])
    plan = sailor.as_plan(POOLS[0]["plan"], pool.profile.cluster, ROWS, pool.options)
    whole = simulate(plan, pool.graph, pool.links, ROWS)
    peaks = [float(memory.peak_bytes) for memory in whole.memory]
    assert simulate(plan, pool.graph, pool.links, ROWS, room_bytes=peaks) == whole
    peaks[plan.devices[-1]] -= 1
    tight = simulate(plan, pool.graph, pool.links, ROWS, room_bytes=peaks)
    assert (tight.step_s, tight.memory) == (float("inf"), whole.memory)
