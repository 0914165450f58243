"""What comes from outside is right or refused: files, numbers, command lines, given plans."""

from __future__ import annotations

import json
import os
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import edits
from autopar_torch import Plan, api, files, load_plan
from autopar_torch.cli import main
from autopar_torch.cluster import Change, Cluster, Device, Link
from autopar_torch.datasheets import named
from autopar_torch.errors import AutoparError, FileError, NounError, PlanError, ShardingError
from autopar_torch.find import measuring
from autopar_torch.plan import check, fit
from autopar_torch.profile import BlockCost, BlockCosts, Curve, Profile
from autopar_torch.run import shardings
from autopar_torch.search.reasons import Case
from autopar_torch.simulate import simulate
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
from slow import slowly
from trust import fuzz

SIGNED = {"added_s", "backward_bytes", "stash_bytes", "input_bytes", "cost_s"}
NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", '"1"', "true", "[]", "{}", "9" * 400)


@cache
def desk() -> fuzz.Desk:
    return fuzz.Desk()


def test_damaged_files_and_odd_command_lines_are_refused_as_they_should_be() -> None:
    assert fuzz.run(300, 30, seed=1) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_damaged_files_and_command_lines_are() -> None:
    assert fuzz.run(5000, 500, seed=2) == []


def test_edited_shardings_are_right_or_refused() -> None:
    found = run_ranks(2, "edits:try_edits", list(range(0, 75, 3)))  # of one model
    for result in found:
        assert result["bad"] == []
        assert "under sharding" in result["caught"] and "is off by" in result["caught"]
        assert result["counts"]["right"] > 3 and result["counts"]["refused"] > 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_edited_shardings_are() -> None:
    found = run_ranks(2, "edits:try_edits", list(range(100, 600)), timeout_s=3000)
    assert [result["bad"] for result in found] == [[], []]


# --- files ----------------------------------------------------------------------------------------


def refused(path: Path, kind: Any, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileError) as told:
        files.load(path, kind)
    assert str(path) in told.value.where
    return told.value.what


@pytest.mark.parametrize("which", ["plan", "cluster", "known"])
def test_a_poisoned_number_is_refused_wherever_it_is(which: str) -> None:
    value = getattr(desk(), which)
    document = json.loads(files.encode(value))
    found = [(place, key) for place, key in fuzz._places(document)
             if type(place[key]) in (int, float)]
    for place, key in random.Random(0).sample(found, min(40, len(found))):
        kept, place[key] = place[key], "HERE"
        signed = key in SIGNED or isinstance(key, int)  # of a list some may be below zero
        for number in (*NUMBERS, *(() if signed else ("-1", "-0.001"))):
            text = json.dumps(document).replace('"HERE"', number)
            with pytest.raises(FileError):
                files.decode(text.encode(), type(value))
        place[key] = kept


def test_an_error_names_the_field_and_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    text = files.encode(named("2x4xH100")).decode()
    what = refused(path, Cluster, text.replace('"latency_s":8e-6', '"latency_s":-1', 1))
    assert "$.inside.latency_s" in what or "$.across.latency_s" in what
    assert ">= 0.0" in what and "it is -1" in what
    assert "unknown field `speed`" in refused(path, Cluster, text[:-1] + ',"speed":1}')
    assert "'cores' is there twice" in refused(path, Cluster, text[:-1] + ',"cores":[]}')


def test_what_json_leaves_open_is_closed(tmp_path: Path) -> None:
    path, text = tmp_path / "plan.json", files.encode(Plan.uniform()).decode()
    refused(path, Plan, text.encode().replace(b"given", b"\xff"))
    for control in ("\\u001b[31m", "\\u202e", "\u202e"):  # what a terminal obeys
        assert "at `$.reason`" in refused(path, Plan, text.replace("given by the user", control))
    for bomb in ("[" * 1_000_000, '{"replicas":' * 100_000, '{"a":' + "[" * 100_000):
        refused(path, Plan, bomb)
    assert "the limit is" in refused(path, Plan, " " * (65 * 2**20))
    path.write_text(text.replace("given by the user", "C:\\\\users\\\\bob"))
    assert load_plan(path).reason == "C:\\users\\bob"  # a backslash is no control character


def test_only_files_are_read_and_written_over(tmp_path: Path) -> None:
    plan, path = Plan.uniform(dp=2), tmp_path / "plan.json"
    plan.save(path)
    (tmp_path / "link.json").symlink_to(path)
    os.mkfifo(tmp_path / "pipe.json")
    for place in ("/dev/null", tmp_path, tmp_path / "link.json", tmp_path / "pipe.json"):
        with pytest.raises(FileError):
            plan.save(place)
    for place in ("/dev/zero", tmp_path, tmp_path / "pipe.json", tmp_path / "absent.json", "a\0b"):
        with pytest.raises(FileError):
            load_plan(place)
    assert Path("/dev/null").is_char_device() and (tmp_path / "link.json").is_symlink()
    with pytest.raises(FileError):
        files.save(msgspec.structs.replace(plan, zero=7), path)  # nobody could read it
    assert load_plan(path) == plan
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "pipe.json", "plan.json"]


def test_a_count_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    text = files.encode(Plan.uniform(num_micro_batches=7)).decode()
    huge = text.replace('"num_micro_batches":7', '"num_micro_batches":2147483648')
    assert "<= 65536" in refused(tmp_path / "plan.json", Plan, huge)


# --- nouns ----------------------------------------------------------------------------------------


def test_nouns_that_contradict_themselves_are_not_made() -> None:
    device, link = Device("d", 1e12, 1e11, 2**30), Link(1e-5, 1e9)
    two = ((device, device),)
    for wrong in (
        lambda: Cluster((), link, link), lambda: Cluster(((),), link, link),
        lambda: Cluster(two, link, link, cores=(0,)),
        lambda: Cluster(two, link, link, (Change(0.0, "link 1", 0.5),)),
        lambda: Cluster(two, link, link, (Change(0.0, "core 2", 0.5),)),
        lambda: Cluster(two, link, link, (Change(0.0, "network", 0.5),)),
        lambda: Change(0.0, "link 0", 1e-300),
        lambda: Device("d", 1e12, 1e11, 2**30, efficiency=((2.0, 0.5), (1.0, 0.5))),
        lambda: BlockCosts("k", "", (BlockCost(2, 1.0, 1.0), BlockCost(1, 1.0, 1.0))),
        lambda: BlockCosts("k", "", (BlockCost(2, 1.0, 1.0, added_s=-2.0),)),
        lambda: Curve("sum", "2 on 2", ((2.0, 1.0), (1.0, 1.0))),
        lambda: Profile(Cluster(two, link, link), (BlockCosts("k", "", ()),) * 2),
    ):
        with pytest.raises(NounError):
            wrong()
    Cluster(two, link, link, (Change(0.0, "link 0", 0.5), Change(1.0, "core 1", 0.0)))


@pytest.mark.parametrize("wrong", [
    {"tp": float("nan")}, {"tp": 0}, {"tp": True}, {"tp": "2"}, {"precision": "int4"},
    {"memory_bytes": 0}, {"memory_bytes": float("inf")}, {"zero": 4}, {"max_virtual": 0},
    {"pipes": 2}, {1: 2}, {"tp": object()}, {"tp": 2**80},
])
def test_constraints_that_make_no_sense_are_refused(wrong: dict[Any, Any]) -> None:
    with pytest.raises(AutoparError):
        api.plan(*fuzz.made(), "8xH100", constraints=wrong)


def test_arguments_that_make_no_sense_are_refused() -> None:
    model, inputs = fuzz.made()
    for rows in (0, -5, 2.5, float("nan"), "8", True, 2**40):
        with pytest.raises(AutoparError):
            api.plan(model, inputs, "8xH100", global_batch_size=rows)  # type: ignore[arg-type]
    for precision in ("int4", 16):
        with pytest.raises(AutoparError):
            api.plan(model, inputs, "8xH100", precision=precision)  # type: ignore[arg-type]
    with pytest.raises(PlanError):
        api.plan(
            model, inputs, "8xH100", precision="float32", constraints={"precision": "bfloat16"}
        )
    for plan in (None, 5, b"x", object(), msgspec.structs.replace(Plan.uniform(), zero=-1)):
        with pytest.raises(AutoparError):
            api.simulate(plan, model, inputs, "1xH100")  # type: ignore[arg-type]
    for cluster in (None, 8, Cluster(((Device("d", -1.0, 1.0, 1),),), Link(0, 1), Link(0, 1))):
        with pytest.raises(AutoparError):
            api.plan(model, inputs, cluster)  # type: ignore[arg-type]
    with pytest.raises(PlanError):
        api.plan("model", inputs, "8xH100")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="axes of at least two"):
        check(Plan.uniform(tp=2, tp_mesh=(1, 2)), 2)


def test_a_pinned_precision_is_the_one_that_is_planned_for() -> None:
    found = api.plan(*fuzz.made(), "2xH100", constraints={"precision": "bfloat16"})
    assert found.plan.precision == "bfloat16"


def test_help_says_that_code_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "it is run" in capsys.readouterr().out


def test_what_was_measured_long_ago_or_with_another_torch_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = desk().known
    measuring.tell_stale(known)
    assert not caplog.text
    old = msgspec.structs.replace(known, made_with={"torch": "1.0", "day": "2020-01-01"})
    measuring.tell_stale(old)
    assert "torch was 1.0" in caplog.text and "2020-01-01" in caplog.text


# --- shardings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nanogpt", "resnet", *slowly("unet", "mlp")])
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_the_rules_allow_what_the_solver_finds(name: str, mesh: tuple[int, ...]) -> None:
    traced = edits.traced(name)
    for pp, rings in ((1, "free"), (2, "free"), (1, "always")):
        bare = Plan.uniform(tp=4 if mesh != (2,) else 2, tp_mesh=mesh, pp=pp)
        plan = shardings.complete(fit(bare, traced.graph), traced, 4, spatial=rings)  # type: ignore[arg-type]
        shardings.check(plan, traced)


def test_neighbours_have_to_agree_on_what_they_share() -> None:
    traced = edits.traced("nanogpt")
    plan = shardings.complete(fit(Plan.uniform(tp=2), traced.graph), traced, 4)
    stage = plan.replicas[0].stages[0]
    numbers = (*(stage.shardings or ())[:-1], -1)  # the last block whole, its tied weight is not
    stages = (msgspec.structs.replace(stage, shardings=numbers),)
    replica = msgspec.structs.replace(plan.replicas[0], stages=stages)
    with pytest.raises(ShardingError, match="for others that share it"):
        shardings.check(msgspec.structs.replace(plan, replicas=(replica,)), traced)


# --- prices ---------------------------------------------------------------------------------------


def asked(cluster: str, rows: int, **limits: Any) -> Case:
    return api.case(*fuzz.made(), cluster, global_batch_size=rows, constraints=limits)


@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_do_not_divide_are_priced_as_replicas_get_them(count: int) -> None:
    """64 rows on 24 devices: of 24 replicas some get 3 rows and some 2, as the engine knows."""
    limits = {"tp": 1, "pp": 1, "zero": 0, "num_micro_batches": count, "recompute": False}
    case = asked("3x8xA100-80", 64, **limits)
    found = case.best().best
    timeline = simulate(found.plan, case.graph, case.profile, 64)
    assert timeline.step_s == pytest.approx(found.step_s, rel=1e-6)
    fullest = max(memory.peak_bytes for memory in timeline.memory)
    assert fullest == pytest.approx(found.memory_bytes, rel=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_rows_left_over_cost_as_much_as_if_everyone_had_one(tp: int) -> None:
    limits = {"tp": tp, "pp": 1, "num_micro_batches": 1}
    some, all_ = (asked("3x8xA100-80", rows, **limits).best().best.step_s for rows in (64, 72))
    assert some == all_


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_formula_and_the_engine_agree_about_zero(zero: int, precision: str) -> None:
    case = asked("1x8xA100-80", 64, dp=8, zero=zero, precision=precision)
    found = case.best().best
    timeline = simulate(found.plan, case.graph, case.profile, 64)
    assert found.plan.zero == zero
    assert timeline.step_s == pytest.approx(found.step_s, rel=1e-6)
    assert max(m.peak_bytes for m in timeline.memory) == pytest.approx(found.memory_bytes, rel=1e-6)
