"""Histories, the files they come from, and policies replayed on them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import autopar_torch as ap
from autopar_torch import api, files
from autopar_torch.cli import main
from autopar_torch.errors import AutoparError, FileError, PlanError
from autopar_torch.history import GONE, History, Incident
from autopar_torch.search.replay import Course, replayed
from autopar_torch.search.unequal import fastest
from autopar_torch.simulate.network import lookup
from nets import refused
from zoo import NanoGPT, batch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))

from changing import traces


def test_states_follow_events_and_a_node_returns_as_it_was() -> None:
    events = (Incident(1, 0, "link", 0.5), Incident(2, 0, "lost"), Incident(3, 0, "back"))
    found = History(2, 9, events).states()
    assert [(at, own[0]) for at, own in found] == [
        (0, (1.0, 1.0)), (1, (0.5, 1.0)), (2, GONE), (3, (0.5, 1.0))]


LOST = Incident(1, 0, "lost")
WRONG = {
    "no such node": [Incident(1, 5, "lost")], "back, but there": [Incident(1, 0, "back")],
    "lost twice": [LOST, LOST], "out of order": [Incident(2, 1, "lost"), LOST],
    "after the end": [Incident(11, 0, "lost")],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_history_that_contradicts_itself_is_refused(wrong: str) -> None:
    with pytest.raises(AutoparError):
        History(2, 10, tuple(WRONG[wrong]))


FORMS = {
    "bamboo": ("0,add,a\n0,add,b\n60000,remove,a\n120000,add,c\n", [2, 1, 2]),
    "gcloud": ("2021-12-11, 11:00:00, 5\n2021-12-11, 11:01:00, 3\n2021-12-12, 11:00:00, 4\n",
               [5, 3, 4]),
    "parcae": ('[0, "add", {"nodes": ["a", "b"]}]\n[60000, "no-op", {"nodes": []}]\n'
               '[120000, "remove", {"nodes": ["b"]}]\n', [2, 1]),
    "sailor": ('[{"Time": 0.0, "GPUs": 4}, {"Time": 60.0, "GPUs": 2}]', [4, 2]),
    "stepfun": ('[' + ",".join(
        f'{{"node_id": "a", "event_time": {t}, "event_type": "fault_{e}", "fault_type": {{"Desc": '
        f'"Fan"}}}}' for t, e in [(1, "start"), (2, "start"), (3, "end"), (4, "end")]) + "]",
        [1, 0, 1]),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_published_form_is_read(form: str, tmp_path: Path) -> None:
    text, there = FORMS[form]
    (tmp_path / form).write_text(text)
    states = traces.read(tmp_path / form).states()
    assert [sum(own != GONE for own in state) for _, state in states] == there


@pytest.mark.parametrize("text", ["", "hello", "[", "[1]", "0,add", "0,remove,a\n"])
def test_a_file_of_no_known_form_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(FileError, match="of no known form"):
        traces.read(tmp_path / "x")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_policy_trains_more_than_the_oracle(data: st.DataObject) -> None:
    plans, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    draw = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    speeds = draw.choice([0.0, 0.2, 0.5, 0.9, 1.0], (plans, count), p=[0.1, 0.2, 0.2, 0.2, 0.3])
    speeds[0, 0] = 1.0
    starts = np.array([0.0, *np.cumsum(draw.exponential(60.0, count))])
    prices = draw.uniform(5.0, 40.0)
    course = Course(starts, speeds, speeds.argmax(axis=0), lambda k: np.where(
        speeds[:, k] > 0, np.full((plans, plans), prices), np.inf), 8, 20.0)
    *policies, oracle = replayed(course)
    assert oracle.share <= 1 + 1e-9
    assert all(own.samples <= oracle.samples * (1 + 1e-9) for own in policies)


def test_regret_moves_when_it_has_lost_the_price() -> None:
    speeds = np.array([[1.0, 0.5], [0.4, 1.0]])
    course = Course(np.array([0.0, 100.0, 200.0]), speeds, np.array([0, 1]),
                    lambda k: np.full((2, 2), 10.0), 1, 60.0)
    by_name = {own.policy: own for own in replayed(course)}
    assert by_name["regret"].samples == pytest.approx(100 + 20 * 0.5 + 70)
    assert by_name["oracle"].samples == pytest.approx(190)
    assert by_name["stay"].moves == 0 and by_name["at once"].moves == 1


def test_work_since_the_last_checkpoint_is_lost_with_a_node() -> None:
    speeds = np.array([[1.0, 0.0], [0.5, 0.5]])
    course = Course(np.array([0.0, 100.0, 200.0]), speeds, np.array([0, 1]),
                    lambda k: np.full((2, 2), 10.0), 1, 60.0)
    stays = replayed(course)[0]
    assert (stays.lost_s, stays.downtime_s, stays.moves) == (40.0, 10.0, 1)
    assert stays.samples == pytest.approx(60 + 45)


def tiny() -> tuple[NanoGPT, dict]:
    return NanoGPT(64, 32, 2, 4, 16), batch("nanogpt", 1)


LOSS = History(4, 4e4, (Incident(1e4, 3, "lost"), Incident(2e4, 0, "link", 0.3),
                        Incident(3e4, 3, "back")), 2)


def test_a_run_is_replayed_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.save(LOSS, tmp_path / "trace.json")
    command = ["simulate", f"{__file__}:tiny", "--cluster", "4x2xA100-80", "--trace",
               str(tmp_path / "trace.json")]
    assert main([*command, "--global-batch-size", "48", "--out", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("stay", "at once", "threshold", "regret", "oracle"))
    assert main(["simulate", "plan.json", *command[1:]]) == 4


def test_a_run_begins_when_the_first_nodes_are_there() -> None:
    late = History(2, 100, (*(Incident(0, n, "lost") for n in (0, 1)), Incident(60, 0, "back")))
    found = ap.simulate(None, *tiny(), "2x1xA100-80", changes=late, global_batch_size=8)
    assert [own.share for own in found.outcomes] == pytest.approx([1.0] * 5)
    assert found.num_segments == 1


def test_what_cannot_be_replayed_is_refused() -> None:
    small = lambda: ap.simulate(None, *tiny(), "2x2xA100-80", changes=LOSS)  # noqa: E731
    with pytest.raises(PlanError, match="history is of 4 nodes"):
        small()
    assert "equal nodes" in refused(lambda: ap.simulate(
        None, *tiny(), "2x2xA100-80 + 2x2xH100", changes=LOSS))


def test_a_search_that_is_cut_short_finds_a_plan_and_tells_a_gap() -> None:
    case = api.case(*tiny(), "2x4xA100-80 + 1x4xH100", global_batch_size=24)
    short, whole = (fastest(case.graph, case.options, lookup(case.profile), 24, case.limits,
                            time_limit_s=limit) for limit in (1e-9, 0.0))
    assert short.step_s >= whole.step_s and short.gap >= whole.gap
    assert short.considered < whole.considered
