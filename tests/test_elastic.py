"""Ranks and nodes that are killed in the middle of training: the rest goes on, none is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jobs

SCRIPT = str(jobs.ROOT / "examples" / "elastic.py")
STEPS = 40
MARK = "ELASTIC_TEST_NODE"  # in the environment of all processes of a node
WAIT_S = 120.0
Line = tuple[int, float, int]  # step, loss, ranks


class Node:
    """`autopar run --elastic` of one node with one rank, and all that it starts."""

    def __init__(self, place: Path, head: str, name: str) -> None:
        self.mark, self.log = f"{name}-{uuid.uuid4().hex}", place / f"{name}.txt"
        command = ["run", "--elastic", "1:2", "--head", head, "--nproc-per-node", "1", SCRIPT,
                   "--folder", str(place / "run"), "--steps", str(STEPS), "--pause", "0.3"]
        path = os.pathsep.join([str(jobs.ROOT), os.environ.get("PYTHONPATH", "")])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "autopar_torch", *command], stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": path,
                                  "AUTOPAR_CACHE": str(place), "GLOO_SOCKET_IFNAME": "lo"})

    def pids(self, only_ranks: bool = False) -> list[int]:
        return [pid for pid, told in jobs.processes()
                if f"{MARK}={self.mark}" in told and ("\0RANK=" in told or not only_ranks)]

    def kill(self, only_ranks: bool = False) -> None:
        for pid in self.pids(only_ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _lines(place: Path) -> list[Line]:
    text = "".join(file.read_text() for file in place.glob("*.txt"))
    found = re.findall(r"^step (\d+) loss (\S+) ranks (\d)$", text, re.MULTILINE)
    return sorted((int(step), float(loss), int(ranks)) for step, loss, ranks in found)


def _until(place: Path, seen: Callable[[list[Line]], bool]) -> float:
    start = time.monotonic()
    while not seen(_lines(place)):
        if time.monotonic() - start > WAIT_S:
            raise AssertionError("".join(f.read_text()[-3000:] for f in place.glob("*.txt")))
        time.sleep(0.1)
    return time.monotonic() - start


@contextlib.contextmanager
def _nodes(place: Path, *names: str) -> Iterator[list[Node]]:
    head = f"127.0.0.1:{jobs.free_port()}"
    nodes: list[Node] = []
    try:
        for name in names:
            nodes.append(Node(place, head, name))
            time.sleep(1.0)  # the first one is the head
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            node.process.wait()


def _as_in_one_process(lines: list[Line]) -> None:
    """Every step was made; what was made again, after the newest checkpoint, gave the same loss."""
    plain = subprocess.run([sys.executable, SCRIPT, "--plain", "--folder", "", "--steps",
                            str(STEPS)], capture_output=True, text=True, check=True, timeout=WAIT_S)
    want = dict(re.findall(r"step (\d+) loss (\S+)", plain.stdout))
    assert {step for step, _, _ in lines} == set(range(STEPS))
    assert len(lines) <= STEPS + 4
    for step, loss, _ in lines:
        assert loss == pytest.approx(float(want[str(step)]), rel=1e-5)


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_goes_on(tmp_path: Path) -> None:
    with _nodes(tmp_path, "head", "other") as (head, other):
        _until(tmp_path, lambda lines: len(lines) > 5)
        before = _lines(tmp_path)[-1][0]
        other.kill(only_ranks=True)
        waited_s = _until(tmp_path, lambda lines: lines[-1][0] > before + 2)
        assert [node.process.wait(WAIT_S) for node in (head, other)] == [0, 0]
        assert not head.pids() and not other.pids()
    _as_in_one_process(_lines(tmp_path))
    print(f"trains again {waited_s:.1f} s after a rank was killed")


@pytest.mark.slow
def test_a_lost_node_is_done_without_and_one_that_returns_is_used(tmp_path: Path) -> None:
    with _nodes(tmp_path, "head", "other") as (head, other):
        _until(tmp_path, lambda lines: bool(lines) and lines[-1][2] == 2 and lines[-1][0] > 5)
        other.kill()
        lost_s = _until(tmp_path, lambda lines: lines[-1][2] == 1)
        again = Node(tmp_path, _head_of(head), "again")
        try:
            back_s = _until(tmp_path, lambda lines: lines[-1][2] == 2)
            assert [node.process.wait(WAIT_S) for node in (head, again)] == [0, 0]
        finally:
            again.kill()
            again.process.wait()
    _as_in_one_process(_lines(tmp_path))
    print(f"trains without a node after {lost_s:.1f} s, with it again after {back_s:.1f} s")


def _head_of(node: Node) -> str:
    arguments: list[str] = list(node.process.args)  # type: ignore[arg-type]
    return arguments[arguments.index("--head") + 1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["rank", "node", "cut"])
def test_three_times_of_three_training_goes_on_between_emulated_nodes(kind: str) -> None:
    """Soon enough, and with the losses of one process."""
    command = [sys.executable, str(jobs.ROOT / "profiling"), "lost", "--kind", kind, "--times", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    if "NotPermitted" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
