"""Emulated clusters: a lab is as fast as it says, closed to the outside, and leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from netlab import Lab, Layout, Link, Node, NotPermitted
from netlab.groups import homes
from quiet import patient
from ranks import run_ranks
from slow import slowly

PORT, BLOCK = 5201, bytes(1 << 18)
BYTES_PER_MBIT = 1_000_000 // 8
TESTS = Path(__file__).parent
FIRST, LAST = 0, max(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    nodes = [
        Node(name="a", cores=(FIRST,), rate_mbps=500),
        Node(name="b", cores=(LAST,), memory_bytes=500 << 20),
    ]
    with Lab(nodes, weight=50) as built:
        yield built


# ---- what the ranks do


def stream(num_mbit: float, repeats: int, mark: str = "", server: str = "b") -> list[float]:
    """Mbit/s from rank 0 to rank 1, one for each repeat; a file tells when half are done, and the
    rest waits until it is gone."""
    sender = os.environ["RANK"] == "0"
    rates = []
    with connected(server, sender) as line:
        for repeat in range(repeats):
            rates.append(one_stream(line, sender, int(num_mbit * BYTES_PER_MBIT)))
            if mark and sender and repeat == repeats // 2:
                Path(mark).touch()
                while Path(mark).exists():
                    time.sleep(0.01)
    return rates


def connected(server: str, sender: bool) -> socket.socket:
    if not sender:
        with socket.create_server(("", PORT)) as listener:
            return listener.accept()[0]
    while True:  # until the other listens; the time limit of the ranks ends it
        try:
            return socket.create_connection((server, PORT))
        except OSError:
            time.sleep(0.02)


def one_stream(line: socket.socket, sender: bool, num_bytes: int) -> float:
    start_s = time.perf_counter()
    left = num_bytes
    while left:
        left -= line.send(BLOCK[:left]) if sender else len(line.recv(min(left, 1 << 20)))
    line.recv(1) if sender else line.send(b"+")
    return num_bytes / BYTES_PER_MBIT / (time.perf_counter() - start_s)


def all_reduce(num_mbit: float, repeats: int = 5) -> list[float]:
    """Mbit/s of Gloo between two ranks: each sends and receives as much as it reduces."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    values = torch.ones(int(num_mbit * BYTES_PER_MBIT / 4))
    rates = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        dist.all_reduce(values)
        rates.append(num_mbit / (time.perf_counter() - start_s))
    return rates[1:]


def spin(seconds: float) -> float:
    """The part of the time in which this rank had a core."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    while time.perf_counter() < start_s + seconds:
        pass
    return (time.process_time() - start_cpu_s) / (time.perf_counter() - start_s)


def surroundings() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "place": [int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")],
        "cores": sorted(os.sched_getaffinity(0)),
        "routes": subprocess.check_output(["ip", "route"], text=True).splitlines(),
    }


def fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank one has had enough")
    time.sleep(600)


def hang_on_one() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(600)


# ---- rates

# Of a rate or a share: nothing makes it larger, but a busy machine makes it smaller.
at_least = pytest.mark.parametrize("least", [0.0, *slowly(0.8)])


def rate_mbps(lab: Lab, num_mbit: float, target: str = "stream", repeats: int = 3) -> float:
    """The best of some: a busy machine makes a rate worse, nothing makes it better."""
    return max(run_ranks(2, f"test_netlab:{target}", num_mbit, repeats, lab=lab)[0])


@at_least
@patient
def test_a_card_has_the_rate_that_is_set(lab: Lab, least: float) -> None:
    lab.set_rate("a", rate_mbps=500)
    assert 1.1 * least * 500 < rate_mbps(lab, 100) < 510


@at_least
@patient
def test_a_new_rate_holds_for_a_connection_that_is_there(
    lab: Lab, tmp_path: Path, least: float
) -> None:
    def slow_down() -> None:
        while not mark.exists():
            time.sleep(0.01)
        lab.set_rate("a", rate_mbps=50)
        mark.unlink()

    mark = tmp_path / "half"
    mark.unlink(missing_ok=True)
    lab.set_rate("a", rate_mbps=500)
    thread = threading.Thread(target=slow_down, daemon=True)
    thread.start()
    rates = run_ranks(2, "test_netlab:stream", 10, 9, str(mark), lab=lab)[0]
    thread.join(timeout=100)
    lab.set_rate("a", rate_mbps=500)
    assert max(rates[:5]) > least * 500
    assert 1.1 * least * 50 < max(rates[6:]) < 54


@at_least
@patient
def test_trunks_and_pairs_limit_what_cards_do_not(least: float) -> None:
    nodes = [Node(name="a", rate_mbps=300), Node(name="b"), Node(name="c", switch="s1")]
    with Lab(nodes, [Link("a", "b", 100), Link("s0", "s1", 40)], weight=50) as built:
        assert least * 100 < between(built, "a", "b") < 108
        assert least * 40 < between(built, "b", "c") < 44
        built.set_rate("s0", "s1", rate_mbps=None)
        built.set_rate("b", "a", rate_mbps=200)
        assert least * 200 < between(built, "a", "b") < 215
        assert least * 290 < between(built, "a", "c") < 320


def between(lab: Lab, sender: str, receiver: str) -> float:
    """Mbit/s from one node of several to another."""
    code = "import sys, test_netlab as t; print(max(t.stream(20, 3, server=sys.argv[1])))"
    ranks = [
        lab.popen(name, [sys.executable, "-c", code, receiver], stdout=subprocess.PIPE,
                  env=os.environ | {"RANK": str(rank), "PYTHONPATH": str(Path(__file__).parent)})
        for rank, name in enumerate((sender, receiver))
    ]
    rates = [rank.communicate(timeout=300)[0] for rank in ranks]
    return float(rates[0])


@pytest.mark.slow
@pytest.mark.parametrize("rate", [100, 1000])
@patient
def test_gloo_gets_the_rate_too(lab: Lab, rate: float) -> None:
    lab.set_rate("a", rate_mbps=rate)
    assert 0.8 * rate < rate_mbps(lab, rate / 4, "all_reduce", repeats=16) < 1.02 * rate
    lab.set_rate("a", rate_mbps=500)


# ---- shares, limits, failures


@pytest.mark.slow
@at_least
@patient
def test_a_share_of_a_core_is_what_is_set_and_can_change(lab: Lab, least: float) -> None:
    for shares in ((0.6, 0.3), (0.3, 0.5)):
        for name, share in zip("ab", shares, strict=True):
            lab.set_cpu_share(name, share)
        found = run_ranks(2, "test_netlab:spin", 0.7, lab=lab)
        for share, had in zip(shares, found, strict=True):
            assert least * share < had < 1.05 * share
    for name in "ab":
        lab.set_cpu_share(name, 1)


def test_memory_over_the_limit_of_a_node_is_refused_there_only(lab: Lab) -> None:
    ended = lab.run([sys.executable, "-c", "bytearray(600 << 20)"], timeout_s=300)
    assert [each.code for each in ended] == [0, 1]
    assert "MemoryError" in ended[1].output


def test_a_node_can_be_killed_and_paused(lab: Lab) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    asleep, awake = (lab.popen(name, ["cat"], **pipes) for name in "ab")
    lab.pause("a")
    assert awake.communicate(b"awake", timeout=100) == (b"awake", None)
    with pytest.raises(subprocess.TimeoutExpired):
        asleep.communicate(b"awake", timeout=0.3)
    lab.resume("a")
    assert asleep.communicate(timeout=100) == (b"awake", None)
    lost = lab.popen("a", ["sleep", "600"])
    lab.kill("a")
    assert lost.wait(timeout=100) == -signal.SIGKILL


# ---- ranks


def test_ranks_fill_the_nodes_and_no_route_leads_out(lab: Lab) -> None:
    found = run_ranks(4, "test_netlab:surroundings", lab=lab)
    assert [each["host"] for each in found] == ["a", "a", "b", "b"]
    assert [each["place"] for each in found] == [[0, 0, 2], [1, 1, 2], [2, 0, 2], [3, 1, 2]]
    assert [each["cores"] for each in found] == [[FIRST], [FIRST], [LAST], [LAST]]
    for each in found:
        assert [route.split()[0] for route in each["routes"]] == ["198.18.0.0/24"]


@pytest.mark.slow
def test_ranks_in_a_lab_fail_and_hang_as_others_do(lab: Lab) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 exited with 1(.|\n)*rank one has had enough"):
        run_ranks(2, "test_netlab:fail_on_one", lab=lab)
    with pytest.raises(AssertionError, match=r"had not finished after 5 s(.|\n)*in hang_on_one"):
        run_ranks(2, "test_netlab:hang_on_one", lab=lab, timeout_s=5)


def test_a_command_is_run_until_the_time_limit(lab: Lab) -> None:
    ended = lab.run(["sh", "-c", "echo $RANK; exit $LOCAL_RANK"], ranks_per_node=2, timeout_s=300)
    assert ended == [(0, "0\n"), (1, "1\n"), (0, "2\n"), (1, "3\n")]
    with pytest.raises(TimeoutError, match=r"rank\(s\) \[0, 1\] had not finished after 0.5 s"):
        lab.run(["sleep", "600"], timeout_s=0.5)


def test_the_command_line_runs_a_layout(tmp_path: Path) -> None:
    layout = tmp_path / "lab.json"
    layout.write_bytes(msgspec.json.encode(Layout((Node(name="a"), Node(name="b")))))
    command = [sys.executable, "-m", "netlab", "run", str(layout), "--", "sh", "-c", "echo $RANK"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300)
    if done.returncode == 77:
        raise NotPermitted(done.stderr)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0 a] 0", "[1 b] 1"])


# ---- what cannot be, and what stays


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ([Link("a", "s0", 1)], "two nodes or two switches"),
        ([Link("a", "b"), Link("b", "a")], "given twice"),
        ([Link("s0", "s1"), Link("s1", "s2"), Link("s2", "s0")], "in a tree"),
        ([Link("s1", "s2")], "in a tree"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(links: list[Link], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Lab([Node(name="a"), Node(name="b")], links)


def test_where_a_lab_is_not_permitted_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotPermitted, match="needs root"), Lab([Node(name="a")]):
        pass


HOLD = """
import time
from netlab import Lab, Node
with Lab([Node(name="a"), Node(name="b")]) as lab:
    lab.popen("a", ["sleep", "86399.{pid}"])
    lab.popen("b", ["setsid", "sleep", "86399.{pid}"])
    lab.pause("b")
    print("built", flush=True)
    {then}
"""


@pytest.mark.parametrize("way", ["exception", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_however_the_program_ends(lab: Lab, way: str) -> None:
    then = "1 / 0" if way == "exception" else "time.sleep(600)"
    code = HOLD.format(pid=os.getpid(), then=then)
    program = subprocess.Popen(
        [sys.executable, "-c", code], cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert program.stdout and program.stdout.readline() == b"built\n"
    if way != "exception":
        program.send_signal(signal.Signals[way])
    program.communicate(timeout=300)
    deadline = time.monotonic() + 60
    while left := what_is_left(program.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def what_is_left(pid: int) -> list[str]:
    """Groups of the program's lab, and sleepers (their number is this process's)."""
    groups = [str(top) for home, _ in homes() for top in home.glob(f"netlab-{pid}-*")]
    sleepers = subprocess.run(
        ["pgrep", "--full", f"sleep 86399.{os.getpid()}"], capture_output=True, text=True
    )
    return groups + sleepers.stdout.split()
