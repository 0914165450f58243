"""Ranks that die, hang or wait elsewhere: the others say who, where and what to do, and end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from msgspec import structs
from torch.distributed import TCPStore

from autopar_torch import Plan, files
from autopar_torch.errors import AutoparError, PlanError, RunError
from autopar_torch.run import lookout, meet
from autopar_torch.run.standing import (
    IN_CODE,
    IN_COLLECTIVE,
    Beat,
    JointCall,
    Member,
    Standing,
    Verdict,
)
from autopar_torch.run.world import World, start
from jobs import Job, free_port
from ranks import run_ranks

LOOPBACK = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
START_S = 120  # several processes that import torch, beside whatever else this machine does


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    left = set(os.listdir("/dev/shm")) - before
    deadline = time.monotonic() + 20.0  # what tests beside this one have there goes with them
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= set(os.listdir("/dev/shm"))
    assert not left


@pytest.fixture
def plan(tmp_path: Path) -> str:
    files.save(Plan.uniform(dp=2), tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def headline(job: Job, about: str) -> str:
    """What was said first, with where and what to do."""
    text = job.text()
    found = text[text.index("TOLD", text.index("FAULT")) :]
    assert about in found.splitlines()[0], text
    assert "\n  where: rank " in found and "\n  fix:   " in found
    return found


def expect_nothing_left(job: Job, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while job.left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not job.left(), job.text()


# --- in the course of training --------------------------------------------------------------------


def test_a_rank_that_is_killed_is_named_by_all_others() -> None:
    with Job(3, {"fault": "kill"}) as job:
        (code,) = job.wait(START_S)
        told = headline(job, "rank 2 (pid ")
        assert {said.rank for said in job.said("TOLD") if "rank 2" in said.text} == {0, 1}, (
            job.text()
        )
        assert code == 1 and "is gone: it was killed, or crashed outside of Python" in told
        assert "in forward (call 6)" in told  # where the survivors were
        assert job.after("FAULT", "TOLD", "rank 2") < 5
        assert all("rank 2" in said.text for said in job.said("CAUGHT"))
        expect_nothing_left(job)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "why"), [
    ("stop", "its process is stopped (SIGSTOP)"), ("hold", "its Python does not run"),
])
def test_a_rank_that_stands_still_is_named_after_the_limit(fault: str, why: str) -> None:
    with Job(2, {"fault": fault}, how="hand", limit_s=5) as job:
        job.until("CAUGHT", START_S)
        told = headline(job, "rank 1 (pid ")
        assert why in told
        assert "shard/collectives.py" in told and "faulty.py" in told  # stacks
        assert 4 < job.after("FAULT", "CAUGHT", "rank 1") < 9


@pytest.mark.slow
def test_long_work_is_warned_of_and_a_call_of_one_rank_alone_is_named() -> None:
    with Job(2, {"fault": "late, then state_dict"}, how="hand", limit_s=3) as job:
        codes = job.wait(START_S)
        fault_s = job.said("FAULT")[0].at_s
        warning = next(s for s in job.said("TOLD") if s.at_s > fault_s + 1)
        assert warning.rank == 0 and "waits: nothing has come for" in warning.text
        assert "is in your code after forward" in warning.text and "faulty.py:" in warning.text
        assert warning.at_s < job.said("LATE")[0].at_s
        assert codes == [1, 1] and job.after("LATE", "CAUGHT") < 8
        assert {s.rank for s in job.said("CAUGHT")} == {0, 1}
        for said in job.said("CAUGHT"):
            assert "different calls" in said.text
            assert "is in state_dict (call 6)" in said.text
            assert "is in forward (call 6)" in said.text
            assert "call 6 is forward and state_dict" in said.text
        expect_nothing_left(job)


@pytest.mark.slow
def test_one_node_listens_to_itself_alone_and_ends_with_its_launcher(plan: str) -> None:
    """Children that are ended as soon as they are there (`with Pool()`) end no rank."""
    with Job(2, {"steps": 1000, "pause_s": 0.2, "fault": "fork"}, how="autopar",
             launcher=["--plan", plan]) as job:
        job.until("FORKED", START_S)
        time.sleep(1)
        listeners = job.listeners()
        assert len(listeners) >= 3, listeners  # the store, and both ranks
        assert all(place.startswith(LOOPBACK) for place in listeners), listeners
        assert len(job.ranks()) == 2
        os.kill(job.processes[0].pid, signal.SIGKILL)
        killed = time.monotonic()
        while job.alive() and time.monotonic() - killed < 10:
            time.sleep(0.05)
        assert not job.alive() and time.monotonic() - killed < 5, job.text()
        assert not job.listeners()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_autopar_run_leave_nothing(plan: str, signum: int) -> None:
    with Job(2, {"steps": 1000, "pause_s": 0.2, "fault": "mark"}, how="autopar",
             launcher=["--plan", plan]) as job:
        job.until("FAULT", START_S)
        os.kill(job.processes[0].pid, signum)
        assert job.wait(35) == [128 + signum], job.text()
        expect_nothing_left(job)


@pytest.mark.slow
def test_an_exception_of_one_rank_is_what_the_others_tell(plan: str) -> None:
    with Job(2, {"fault": "raise"}, how="autopar", launcher=["--plan", plan]) as job:
        assert job.wait(START_S) == [6]
        headline(job, "stopped: ValueError: the data ended")
        assert job.after("FAULT", "TOLD", "rank 1") < 5
        root = job.text().rpartition("Root Cause")[2]
        assert "ValueError: the data ended" in root  # in torchrun's summary too
        expect_nothing_left(job)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "told"), [
    ("crash", "crashed outside of Python"), ("abort", "crashed outside of Python"),
    ("leave", "has come to the end of its script"),
])
def test_a_crash_in_c_and_an_early_end_are_named(fault: str, told: str) -> None:
    with Job(2, {"fault": fault}) as job:
        assert job.wait(START_S) == [1]
        assert told in headline(job, "rank 1 (pid ")
        assert job.after("FAULT", "TOLD", "rank 1") < 5
        expect_nothing_left(job)


@pytest.mark.slow
def test_plain_torchrun_restarts(tmp_path: Path) -> None:
    """T6: weights are those of a run that nobody disturbed, bit by bit."""
    (tmp_path / "whole").mkdir()
    with Job(2, {"folder": str(tmp_path / "whole")}) as job:
        assert job.wait(START_S) == [0], job.text()
        whole = {said.text.split()[0] for said in job.said("DONE")}
    for i in range(3):
        (tmp_path / str(i)).mkdir()
        options = {"fault": "kill", "folder": str(tmp_path / str(i))}
        with Job(2, options, launcher=["--max-restarts=2"]) as job:
            assert job.wait(2 * START_S) == [0], job.text()
            assert {said.text for said in job.said("DONE")} == {f"{w} from 4" for w in whole}
            expect_nothing_left(job)


# --- who is the cause -----------------------------------------------------------------------------


def standing(
    own: JointCall, others: dict[int, Beat], ends: dict[int, str] | None = None
) -> Standing:
    members = tuple(Member(r, "here", f"machine {r}", 100 + r) for r in range(3))
    beats = {r: structs.replace(b, end=(ends or {}).get(r)) for r, b in others.items()}
    return Standing(members, members[0], Beat(9, own, own.name, 7, ""), beats)


def test_calls_that_differ_are_named_though_one_rank_has_gone_on() -> None:
    own = JointCall(5, "forward", "clip_grad_norm_")
    other = Beat(9, JointCall(6, "forward", "evaluation"), "forward", 7, "")

    def found(other: Beat, **before: Any) -> Verdict | None:
        earlier = structs.replace(other, **{"count": 7, **before})
        return standing(own, {1: other}).elsewhere({1: earlier}, 3)

    named = found(other)
    assert named and "call 5 is evaluation and forward" in named.what
    ahead = structs.replace(other, call=JointCall(6, "forward", "forward"))
    assert found(ahead) is None  # it may be that only this rank is late
    assert found(structs.replace(other, since_s=1)) is None
    assert found(structs.replace(other, action=IN_CODE)) is None
    assert found(structs.replace(other, call=JointCall(9, "forward", "evaluation"))) is None
    waits = structs.replace(other, call=JointCall(4, "state_dict"), action=IN_COLLECTIVE)
    assert found(waits) and found(waits, line="train.py:1 in main") is None  # it has gone on since
    assert found(waits, count=9) is None  # its word may be of long ago: this machine stood still


def test_an_exception_is_told_before_an_end_and_an_end_only_of_who_did_less() -> None:
    call = JointCall(5, "forward", "forward")
    same, less = (Beat(9, c, IN_CODE, 1, "") for c in (call, JointCall(4, "forward", "forward")))
    assert standing(call, {1: same}, {1: ""}).gone() is None
    found = standing(call, {1: less, 2: same}, {1: "", 2: "ValueError: no"}).gone()
    assert found and "rank 2 (pid 102 on host here) stopped: ValueError: no" in found.what
    found = standing(call, {1: less}, {1: ""}).gone()
    assert found and "has come to the end of its script" in found.what


def test_a_call_that_another_rank_has_left_with_an_error_is_not_waited_for() -> None:
    call = JointCall(4, "forward", "backward")
    gone = Beat(9, call.failing(ValueError("no\n  rows")), IN_CODE, 1, "")
    found = standing(call, {1: gone}).left()
    assert found and "left forward (call 4) with an error" in found.what
    assert "ValueError: no rows" in found.what
    ahead = structs.replace(gone, call=gone.call.then("forward"), action="forward")
    assert standing(call, {1: ahead}).left()
    assert standing(call.then("forward"), {1: gone}).left() is None


def test_silence_is_that_no_beat_has_come() -> None:
    call = JointCall(5, "forward", "forward")
    one, two = (Beat(count, call, "forward", 1, "train.py:7") for count in (1, 2))
    assert standing(call, {1: two, 2: two}).silent({1: one, 2: one}, 60) is None
    found = standing(call, {1: two, 2: one}).silent({1: one, 2: one}, 60)
    assert found and "rank 2" in found.what and "train.py:7" in found.what


def refuse_on_one() -> str:
    rank, size = start()
    world = World(rank, size)

    def refuse() -> None:
        if rank == 1:
            raise PlanError("this plan is no good")

    try:
        world.jointly(refuse)
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_one_rank_refuses_is_told_by_all() -> None:
    first, second = run_ranks(2, "test_faults:refuse_on_one")
    assert second == "PlanError: this plan is no good"
    assert first.startswith("PlanError: rank 1 refused to go on: this plan is no good")


def wait_in_a_collective_of_the_script() -> str:
    """Rank 0 has given up, and no connection breaks: as with NCCL."""
    os.environ["AUTOPAR_TIMEOUT_S"] = "16"
    rank, size = start()
    watch = World(rank, size).watch
    try:
        if rank == 0:
            watch.board.publish(Verdict("rank 0 gave up", "mend it"))
            time.sleep(8)
        else:
            dist.barrier()
    except RunError as error:
        return str(error)
    return "nothing"


def test_a_rank_in_a_collective_of_the_script_hears_that_another_gave_up() -> None:
    told = run_ranks(2, "test_faults:wait_in_a_collective_of_the_script")[1]
    assert told.startswith("rank 0 gave up") and "fix:   mend it" in told


# --- where ranks meet -----------------------------------------------------------------------------


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> int:
    """A port where ranks are to meet, within a second."""
    port = free_port()
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("AUTOPAR_START_S", "1")
    return port


def met(ranks: list[int], size: int) -> dict[int, Any]:
    """Rank -> its store, or the error."""
    found: dict[int, Any] = {}

    def come(rank: int) -> None:
        try:
            found[rank] = meet.meet(rank, size)
        except RunError as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_that_do_not_come_are_named_by_those_that_did(place: int) -> None:
    begin = time.monotonic()
    found = met([0, 2], 4)
    assert time.monotonic() - begin < 4
    for rank in (0, 2):
        assert f"rank(s) 1, 3 of 4 did not come to 127.0.0.1:{place}" in str(found[rank])


def test_where_ranks_cannot_meet_the_address_and_the_cause_are_named(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = met([1], 2)
    assert f"the ranks cannot meet at 127.0.0.1:{place}: " in str(found[1])
    assert "refused" in str(found[1]) and "fix:" in str(found[1])
    with meet.listen(place):
        for local in ("1", "2"):  # several nodes, one
            monkeypatch.setenv("WORLD_SIZE", "2")
            monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
            with pytest.raises(RunError, match=f"cannot meet at 127.0.0.1:{place}: .*in use"):
                meet.meet(0, 2)


def test_attempts_that_share_a_store_do_not_see_each_other(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = TCPStore("127.0.0.1", place, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert isinstance(met([1], 2)[1], RunError)  # of an attempt without rank 0: asked in vain
    first, second = met([0, 1], 2), met([0, 1], 2)
    first[0].set("address", "old")
    assert first[1].get("address") == b"old"
    assert not second[1].check(["address"])
    assert agent.num_keys() > 0


def test_bad_settings_are_refused(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv("AUTOPAR_START_S", text)
        with pytest.raises(RunError, match="AUTOPAR_START_S"):
            meet.meet(0, 2)
        monkeypatch.setenv("AUTOPAR_TIMEOUT_S", text)
        with pytest.raises(RunError, match="AUTOPAR_TIMEOUT_S"):
            lookout.watching(0, 1, 60)
