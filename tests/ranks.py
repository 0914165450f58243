"""Starts ranks: a function of a test module, run by several processes that know their places.

    results = run_ranks(2, "test_ranks:describe", 3)      # one JSON value per rank
    with Lab([Node(name="a"), Node(name="b")]) as lab:    # tests/netlab: in an emulated cluster
        results = run_ranks(2, "test_ranks:describe", 3, lab=lab)

Ranks are forked from a server that has imported torch once (warm.py). In a lab each is a process of
its own, `python -m ranks module:function arguments folder`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from netlab import Lab

ROOT = Path(__file__).resolve().parent.parent
TAIL_LINES = 40
POLL_S = 0.02
HANG_S = 800  # nothing takes that long, even where most of the cores is stolen
GRACE_S = 0.5  # after a failure: time for the others to say what they saw
DUMP = signal.SIGUSR1  # a rank that hangs is asked where it is


class RankFailed(AssertionError):
    """A rank crashed or hung."""


class Rank(Protocol):
    """What is asked of a process, however it was started."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self) -> Any: ...
    def kill(self) -> None: ...


class Forked:
    """A rank that was forked from the server."""

    def __init__(self, environment: dict[str, str], log: Path, arguments: list[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", "warm"])
        with pytest.MonkeyPatch.context() as patch:  # of the server, which starts with the first
            for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
                patch.setenv(name, environment[name])
            forkserver.ensure_running()
        self.process = context.Process(target=_be_forked, args=(environment, str(log), arguments))
        self.process.start()
        self.pid: int = self.process.pid or 0
        self.wait, self.kill = self.process.join, self.process.kill

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode


def _be_forked(environment: dict[str, str], log: str, arguments: list[str]) -> None:
    """As if it had been started by itself."""
    os.setsid()
    sys.path[:] = sys.modules["warm"].PATH
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _main(arguments)


def run_ranks(
    num_ranks: int, target: str, *args: Any, timeout_s: float = HANG_S, lab: Lab | None = None
) -> list[Any]:
    """What `target` ("module:function") returned on each rank.

    Arguments and results travel as JSON. If a rank fails or time runs out, every rank is killed and
    RankFailed carries the end of the guilty rank's output. Ranks fill the nodes of a lab in
    order.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        port = _free_port()
        ranks: list[Rank] = []
        try:
            for rank in range(num_ranks):
                ranks.append(_start(rank, num_ranks, port, target, args, folder, lab))
            _watch(ranks, target, timeout_s, folder)
        finally:
            for process in ranks:
                _kill(process)
        return [json.loads(_result_file(folder, r).read_bytes()) for r in range(num_ranks)]


def _start(
    rank: int, num_ranks: int, port: int, target: str, args: tuple[Any, ...], folder: Path,
    lab: Lab | None,
) -> Rank:
    old_path = os.environ.get("PYTHONPATH", "")
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), old_path])),
    }
    arguments = [target, json.dumps(args), str(folder)]
    if lab is None:
        return Forked(environment, _log_file(folder, rank), arguments)
    environment |= lab.environment(rank, num_ranks)
    with _log_file(folder, rank).open("wb") as log:
        return lab.popen(
            lab.node_of(rank, num_ranks), [sys.executable, "-m", "ranks", *arguments],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _watch(
    ranks: list[Rank], target: str, timeout_s: float, folder: Path
) -> None:
    """Return when all have finished well; raise at the first that has not, or at the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            time.sleep(GRACE_S)
            late = [r for r, process in enumerate(ranks) if process.poll() and r not in failed]
            raise RankFailed(_failure(ranks, target, failed + late, folder))
        if None not in codes:
            return
        if time.monotonic() > deadline:
            hanging = _unfinished(folder, len(ranks))
            for rank in hanging:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(ranks[rank].pid, DUMP)  # in a lab the rank is a child of this one
            time.sleep(GRACE_S)
            raise RankFailed(
                f"{target}: rank(s) {hanging} had not finished after {timeout_s} s\n"
                + _tail(folder, hanging[0] if hanging else 0)
            )
        time.sleep(POLL_S)


def _failure(
    ranks: list[Rank], target: str, failed: list[int], folder: Path
) -> str:
    first, *others = failed
    lines = [f"{target}: rank {first} exited with {ranks[first].returncode}", _tail(folder, first)]
    lines += [f"then rank {r}: {_tail(folder, r, 1)}" for r in others]
    return "\n".join(lines)


def _unfinished(folder: Path, num_ranks: int) -> list[int]:
    return [rank for rank in range(num_ranks) if not _result_file(folder, rank).exists()]


def _tail(folder: Path, rank: int, num_lines: int = TAIL_LINES) -> str:
    lines = _log_file(folder, rank).read_text(errors="replace").splitlines()
    return "\n".join(lines[-num_lines:])


def _kill(process: Rank) -> None:
    """End the rank with everything it started, and wait for it; nothing if it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # it may not have had a group yet
    process.wait()


def _log_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(arguments: list[str]) -> None:
    """Be one rank. Nobody leaves before all have finished, so nobody's peer vanishes early."""
    faulthandler.register(DUMP, all_threads=True)
    target, given, name = arguments
    folder, rank = Path(name), int(os.environ["RANK"])
    module, _, function = target.partition(":")
    result = getattr(importlib.import_module(module), function)(*json.loads(given))
    draft = folder / f"{rank}.draft"
    draft.write_text(json.dumps(result))
    draft.rename(_result_file(folder, rank))
    while _unfinished(folder, int(os.environ["WORLD_SIZE"])):
        time.sleep(POLL_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1:])
