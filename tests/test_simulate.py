"""The simulator against what can be known without it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

import autopar_torch as ap
from autopar_torch import schedule as schedules
from autopar_torch.cluster import Change
from autopar_torch.datasheets import named
from autopar_torch.errors import ScheduleError
from autopar_torch.find.offline import profile_for
from autopar_torch.profile import Jitter
from autopar_torch.report.perfetto import export
from autopar_torch.schedule import Action, Op
from autopar_torch.shard.parts import copy_rows
from autopar_torch.simulate import memory, simulate
from autopar_torch.simulate.costs import Costs
from autopar_torch.simulate.equal_ranks import equal_groups, representatives
from autopar_torch.simulate.fluid import Capacity, Task, run
from autopar_torch.simulate.jitter import sampled_steps
from autopar_torch.simulate.network import lookup
from autopar_torch.timeline import COMM, COMPUTE, Memory, Span, Timeline
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from slow import slowly
from zoo import NanoGPT

CORE = {"core": 1.0}


def ends(*tasks: Task, changes: tuple[Capacity, ...] = ()) -> list[float]:
    return [round(end, 9) for _, end in run(tasks, changes)]


def test_two_tasks_on_one_core_take_twice_as_long() -> None:
    assert ends(Task("a", 1.0, CORE), Task("b", 1.0, CORE)) == [2.0, 2.0]


def test_who_needs_little_gets_it_and_the_other_gets_the_rest() -> None:
    light, heavy = Task("message", 1.0, {"core": 0.25}), Task("matmul", 1.0, CORE)
    assert ends(light, heavy) == [1.0, 1.25]


def test_a_message_is_slower_while_its_core_computes_and_takes_less_of_it() -> None:
    message = Task("message", 1.0, {"core": 0.2}, stream=COMM, beside=0.5)
    assert ends(message) == [1.0]
    computed = 1 / 0.9
    both = [computed + 1 - computed / 2, computed]
    assert ends(message, Task("matmul", 1.0, CORE)) == [round(end, 9) for end in both]


def test_when_one_ends_the_other_speeds_up() -> None:
    assert ends(Task("a", 1.0, CORE), Task("b", 2.0, CORE)) == [2.0, 3.0]


def test_a_task_waits_for_those_before_it() -> None:
    assert ends(Task("a", 1.0, CORE), Task("b", 1.0, {"link": 1.0}, after=(0,))) == [1.0, 2.0]


def test_a_link_that_slows_down_halfway_takes_longer() -> None:
    change = (Capacity(1.0, "link", 0.5),)
    assert ends(Task("a", 2.0, {"link": 1.0}), changes=change) == [3.0]


def test_late_in_a_long_step_what_shares_a_core_still_ends() -> None:
    """Where clocks are coarser than what counts as done."""
    first = Task("long", 20_000.0, CORE)
    rest = [Task(str(i), 0.1 * (i + 1) / 3, CORE, after=(0,)) for i in range(40)]
    assert max(end for _, end in run([first, *rest])) == pytest.approx(20_000 + 0.1 * 820 / 3)


def test_a_dead_link_is_an_error_that_names_who_is_stuck() -> None:
    with pytest.raises(ScheduleError, match="exchange"):
        run([Task("exchange", 2.0, {"link": 1.0})], [Capacity(1.0, "link", 0.0)])


def test_tasks_that_wait_for_each_other_are_an_error() -> None:
    with pytest.raises(ScheduleError, match="never start"):
        run([Task("a", 1.0, CORE, after=(1,)), Task("b", 1.0, CORE, after=(0,))])


graphs = st.lists(
    st.tuples(st.floats(0, 5), st.lists(st.integers(0, 30), max_size=3)), min_size=1, max_size=20
)


@given(graphs)
@settings(deadline=None)
def test_without_sharing_every_end_is_the_longest_way_there(
    graph: list[tuple[float, list[int]]],
) -> None:
    tasks, longest = [], []
    for i, (seconds, before) in enumerate(graph):
        after = tuple({b % i for b in before}) if i else ()
        tasks.append(Task(str(i), seconds, {f"own {i}": 1.0}, after))
        longest.append(max((longest[b] for b in after), default=0.0) + seconds)
    assert [end for _, end in run(tasks)] == pytest.approx(longest, abs=1e-6)


@given(graphs)
@settings(deadline=None)
def test_sharing_never_makes_anything_end_sooner(graph: list[tuple[float, list[int]]]) -> None:
    """The bound that lets the search prune for the engine."""
    alone, shared = [], []
    for i, (seconds, before) in enumerate(graph):
        after = tuple({b % i for b in before}) if i else ()
        alone.append(Task(str(i), seconds, {}, after))
        shared.append(Task(str(i), seconds, {f"core {i % 2}": 1.0}, after))
    pairs = zip(run(alone), run(shared), strict=True)
    assert all(end <= later + 1e-6 for (_, end), (_, later) in pairs)


def test_what_has_arrived_may_be_let_go_and_nothing_else() -> None:
    lists = schedules.build("1f1b", range(3), 4)
    known = lists.acknowledged
    assert Action(0, Op.SEND_F, 0) in known[Action(0, Op.RECV_B, 0)]
    for receive, sent in known.items():
        channel = lists.actions[lists.position_of[receive.stage]]
        assert all(channel.index(action) < channel.index(receive) for action in sent)


def a_timeline() -> Timeline:
    spans = (
        Span(0, COMPUTE, "0F0", 0.0, 2.0),
        Span(0, COMM, "0SEND_F0", 1.5, 3.0),
        Span(1, COMM, "0SEND_F0", 1.5, 3.0),
        Span(1, COMPUTE, "1F0", 3.0, 4.0),
    )
    return Timeline(spans, 4.0, (Memory(params=2**20), Memory(grads=2**20)))


def test_a_step_is_decoupled_into_computing_exchanging_and_both() -> None:
    parts = a_timeline().parts(0)
    assert (parts.compute_s, parts.comm_s, parts.overlap_s, parts.idle_s) == (2.0, 1.5, 0.5, 1.0)


def test_a_timeline_becomes_a_perfetto_file_with_an_arrow_per_message(tmp_path: Path) -> None:
    export({"predicted": a_timeline(), "measured": a_timeline()}, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    phases = [event["ph"] for event in events]
    assert (phases.count("X"), phases.count("s"), phases.count("f"), phases.count("C")) == (
        8,
        2,
        2,
        4,
    )
    assert {e["pid"] for e in events if e["ph"] == "X"} == {0, 1, 1000, 1001}


def test_gradients_that_leave_before_the_last_one_is_there_end_the_step_sooner() -> None:
    batch = {name: torch.zeros(64, 64, dtype=torch.int64) for name in ("idx", "targets")}
    model = NanoGPT(256, 512, 8, 6, 64)
    whole, parts = (
        ap.simulate(ap.Plan.uniform(dp=2, bucket_bytes=size), model, batch, "2x1xA100-80").step_s
        for size in (2**30, 2**22)
    )
    assert parts < 0.95 * whole


def longest_sum_s(degrees: dict[str, int], cluster: str, changes: tuple[Change, ...] = ()) -> float:
    model = NanoGPT(256, 512, 8, 2, 64)
    call, _ = take_apart((), {n: torch.zeros(8, 64, dtype=torch.int64) for n in ("idx", "targets")})
    plan = ap.Plan.uniform(**degrees, bucket_bytes=2**30)  # type: ignore[arg-type]
    whole, profile = profile_for(plan, traced := trace(model, call), 8, cluster)
    changed = replace(profile, cluster=replace(profile.cluster, changes=changes))
    spans = simulate(whole, traced.graph, changed, 8).spans
    return max(span.end_s - span.start_s for span in spans if span.name == "reduce")


def test_on_datasheets_every_device_of_a_node_sends_by_a_card_of_its_own() -> None:
    alone = longest_sum_s({"dp": 2}, "2x1xA100-80")
    together = longest_sum_s({"tp": 4, "dp": 2}, "2x4xA100-80")
    assert together < 0.5 * alone, "each has a quarter of the bytes"


def test_a_slower_link_of_a_node_slows_the_cards_of_all_its_devices() -> None:
    usual, slow = (
        longest_sum_s({"tp": 4, "dp": 2}, "2x4xA100-80", changes)
        for changes in ((), (Change(0.0, "link 1", 0.5),))
    )
    assert slow == pytest.approx(2 * usual, rel=0.05)


@pytest.mark.parametrize("zero", [1, *slowly(2, 3)])
@pytest.mark.parametrize("schedule", ["1f1b", *slowly("gpipe", "interleaved", "zero_bubble")])
def test_parameters_of_two_stages_are_summed_once_whatever_the_schedule(
    schedule: str, zero: int
) -> None:
    """Their embedding is tied: its team spans both stages, which come to it in different turns."""
    batch = {name: torch.zeros(4, 16, dtype=torch.int64) for name in ("idx", "targets")}
    virtual = {"virtual": 2} if schedule == "interleaved" else {}
    steps = []
    for count in (2, 4):
        plan = ap.Plan.uniform(pp=2, dp=2, zero=zero, schedule=schedule, num_micro_batches=count,
                               **virtual)  # type: ignore[arg-type]
        steps.append(ap.simulate(plan, NanoGPT(64, 32, 2, 4, 16), batch, "1x4xA100-80",
                                 global_batch_size=4 * count).step_s)
    assert steps[0] < steps[1] < 3 * steps[0]
    assert steps[1] < 0.1, "so small a model is done in a blink: these are not seconds"


@pytest.mark.parametrize(("zero", "part"), [(1, 1.0), (2, 0.5)])
def test_zero_2_adds_to_its_own_part_of_gradients_and_to_all_of_a_tied_one(
    zero: int, part: float
) -> None:
    model = NanoGPT(64, 32, 2, 4, 16)
    call, _ = take_apart((), {n: torch.zeros(4, 16, dtype=torch.int64) for n in ("idx", "targets")})
    plan = ap.Plan.uniform(pp=2, dp=2, zero=zero, num_micro_batches=4)
    whole, profile = profile_for(plan, traced := trace(model, call), 16, "1x4xA100-80")
    rank = Costs(whole, traced.graph, lookup(profile)).stage(0, 0, 2).ranks[0]
    tied_bytes = 4 * model.tok.weight.numel()
    assert rank.added_bytes == part * (rank.grad_bytes - tied_bytes) + tied_bytes


def test_a_micro_batch_is_made_ready_once_for_all_stages_of_a_rank() -> None:
    model = NanoGPT(64, 32, 2, 4, 16)
    call, _ = take_apart((), {n: torch.zeros(4, 16, dtype=torch.int64) for n in ("idx", "targets")})
    plan = ap.Plan.uniform(pp=2, schedule="interleaved", virtual=2, num_micro_batches=4)
    whole, profile = profile_for(plan, traced := trace(model, call), 16, "1x2xA100-80")
    more = replace(profile, overheads=(replace(profile.overheads[0], micro_batch_s=1.0),))
    steps = [simulate(whole, traced.graph, p, 16) for p in (profile, more)]
    for rank in whole.devices:
        without, with_it = (step.parts(rank).compute_s for step in steps)
        assert with_it - without == pytest.approx(4.0, rel=1e-3)


ALIKE: list[tuple[dict[str, Any], str]] = [
    ({"tp": 2, "pp": 2, "dp": 2, "num_micro_batches": 4}, "1x8xA100-80"),
    ({"tp": 2, "pp": 4, "dp": 2, "num_micro_batches": 8, "schedule": "zero_bubble"}, "4x4xA100-80"),
    ({"pp": 2, "dp": 4, "num_micro_batches": 4, "zero": 1}, "8x1xA100-80"),
    ({"tp": 2, "pp": 2, "dp": 2, "num_micro_batches": 4, "zero": 3}, "2x4xA100-80"),
    ({"tp": 2, "pp": 2, "dp": 2, "num_micro_batches": 4, "zero": 2, "schedule": "gpipe"},
     "4x2xA100-80"),
    ({"pp": 2, "dp": 2, "num_micro_batches": 4, "virtual": 2, "schedule": "interleaved"},
     "2x2xA100-80"),
]


@pytest.mark.parametrize(("degrees", "cluster"), ALIKE)
def test_a_rank_that_stands_for_others_tells_what_each_would(
    degrees: dict[str, Any], cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = NanoGPT(64, 32, 2, 8, 16)
    call, _ = take_apart((), {n: torch.zeros(4, 16, dtype=torch.int64) for n in ("idx", "targets")})
    plan = ap.Plan.uniform(**degrees)
    whole, profile = profile_for(plan, traced := trace(model, call), 128, cluster)
    few = simulate(whole, traced.graph, profile, 128)
    monkeypatch.setattr(
        sys.modules["autopar_torch.simulate"],
        "representatives",
        lambda plan, profile, rows: {rank: rank for rank in plan.devices},
    )
    all_ = simulate(whole, traced.graph, profile, 128)
    assert len(few.spans) < len(all_.spans)
    assert few.step_s == pytest.approx(all_.step_s, rel=1e-9)
    assert few.memory == all_.memory and few.ranks == all_.ranks
    for rank in whole.devices:
        pairs = list(zip(in_order(few.of(rank)), in_order(all_.of(rank)), strict=True))
        assert all((a.rank, a.name, a.stream) == (b.rank, b.name, b.stream) for a, b in pairs)
        assert [a.end_s for a, _ in pairs] == pytest.approx([b.end_s for _, b in pairs])


def in_order(spans: list[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.name, span.stream, span.start_s))


def test_who_differs_from_others_speaks_for_itself_alone() -> None:
    model = NanoGPT(64, 32, 2, 8, 16)
    call, _ = take_apart((), {n: torch.zeros(4, 16, dtype=torch.int64) for n in ("idx", "targets")})
    plan = ap.Plan.uniform(tp=2, dp=2)
    whole, profile = profile_for(plan, trace(model, call), 4, "2x2xA100-80")
    assert equal_groups(representatives(whole, profile, 4)) == ((0, 1, 2, 3),)
    assert equal_groups(representatives(whole, profile, 5)) == ((0, 1), (2, 3)), (
        "one replica has a row more")
    changing = replace(profile.cluster, changes=(Change(1.0, "link 0", 0.5),))
    assert equal_groups(representatives(whole, replace(profile, cluster=changing), 4)) == ()
    crowded = replace(profile.cluster, cores=(0, 0, 1, 1))
    assert equal_groups(representatives(whole, replace(profile, cluster=crowded), 4)) == ()
    measured = replace(profile, assumed=False)
    assert equal_groups(representatives(whole, measured, 4)) == ()
    crossed = ap.Plan.uniform(tp=4, tp_mesh=(2, 2), dp=2)
    assert equal_groups(representatives(crossed, replace(profile, cluster=named("2x4xA100-80")), 4))
    assert not equal_groups(
        representatives(replace(crossed, zero=1), replace(profile, cluster=named("2x4xA100-80")), 4)
    )


def test_what_lies_ready_for_messages_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = NanoGPT(64, 32, 2, 4, 16)
    call, _ = take_apart((), {n: torch.zeros(4, 16, dtype=torch.int64) for n in ("idx", "targets")})
    plan = ap.Plan.uniform(pp=2, num_micro_batches=4)
    whole, profile = profile_for(plan, traced := trace(model, call), 16, "1x2xA100-80")
    counted = simulate(whole, traced.graph, profile, 16).memory[0].peak_bytes
    monkeypatch.setattr(memory, "AHEAD", 1)
    without = simulate(whole, traced.graph, profile, 16).memory[0].peak_bytes
    message = Costs(whole, traced.graph, lookup(profile)).stage(0, 0, 4).send_bytes
    assert counted - without == 2 * message, "the two gradients that follow the second backward"


def test_ranks_of_a_tensor_group_vary_together_and_replicas_each_for_itself() -> None:
    wanted = (0.5, 0.8, 1.0, 1.2, 1.5)
    draws = sampled_steps(ap.Plan.uniform(tp=2, dp=2), lambda _: Jitter(rank=wanted), 5)
    assert all(d.slowdown[0] == d.slowdown[1] and d.slowdown[2] == d.slowdown[3] for d in draws)
    assert [tuple(sorted(d.slowdown[rank] for d in draws)) for rank in (0, 2)] == [wanted] * 2
    assert any(d.slowdown[0] != d.slowdown[2] for d in draws)


@pytest.mark.parametrize("jitter", [Jitter(rank=(0.6, 0.8, 1.0, 1.2, 1.4)),
                                    Jitter(block=(0.1, 0.1, 0.1, 3.7))])
@pytest.mark.parametrize(("degrees", "waits"), [({"tp": 2}, False), ({"dp": 2}, True)])
def test_what_varies_makes_those_wait_whose_waiting_was_not_measured(
    degrees: dict[str, int], waits: bool, jitter: Jitter
) -> None:
    """Inside a tensor group it was, with what its ranks exchange."""
    model = NanoGPT(64, 32, 2, 4, 16)
    call, _ = take_apart((), {n: torch.zeros(4, 16, dtype=torch.int64) for n in ("idx", "targets")})
    plan = ap.Plan.uniform(**degrees)  # type: ignore[arg-type]
    whole, profile = profile_for(plan, traced := trace(model, call), 16, "1x2xA100-80")
    shaky = replace(profile, jitter=(jitter,))
    usual, varied = (simulate(whole, traced.graph, p, 16, draws=15).step_s
                     for p in (profile, shaky))
    assert (varied > 1.02 * usual) == waits


def test_an_empty_parameter_is_cut_into_rows_of_nothing() -> None:
    rows = torch.ones(2, 0)
    copy_rows(rows, torch.ones(0), 0)
    assert rows.numel() == 0
