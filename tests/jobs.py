"""Starts whole jobs that are to fail, reads what they say and when, and sees that nothing is left.

with Job(2, {"fault": "kill"}, how="torchrun") as job:
    job.wait(60)
job.after("FAULT", "TOLD")       # seconds from the fault to the first message that followed
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = str(ROOT / "tests" / "faulty.py")
MARK = "AUTOPAR_TEST_JOB"  # in the environment of every process of a job
POLL_S = 0.05


class Said(NamedTuple):
    at_s: float
    rank: int
    text: str


class Job:
    """Ranks by hand, by torchrun, or by `autopar run` (a plan is then needed)."""

    def __init__(
        self, num_ranks: int, options: dict[str, Any], how: str = "torchrun",
        launcher: Sequence[str] = (), limit_s: float = 60.0,
    ) -> None:
        self.kept = ""
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="job-"))
        self.environment = os.environ | {
            MARK: self.mark, "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1", "AUTOPAR_TIMEOUT_S": str(limit_s),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self.environment.pop("GLOO_SOCKET_IFNAME", None)
        script = [SCRIPT, json.dumps(options)]
        if how == "torchrun":
            start = ["-m", "torch.distributed.run", "--standalone"]
            commands = [[*start, f"--nproc-per-node={num_ranks}", *launcher, *script]]
        elif how == "autopar":
            commands = [["-m", "autopar_torch", "run", *launcher, *script]]
        else:
            commands = [script] * num_ranks
        by_hand = [self._place(r, num_ranks) for r in range(num_ranks)] if how == "hand" else [{}]
        self.log = (self.folder / "log").open("wb")
        self.processes = [
            subprocess.Popen([sys.executable, *command], env=self.environment | place,
                             stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT,
                             start_new_session=True)
            for command, place in zip(commands, by_hand, strict=True)
        ]

    def _place(self, rank: int, num_ranks: int) -> dict[str, str]:
        if rank == 0:
            self.port = free_port()
        size = str(num_ranks)
        return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port)}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.log.close()
        self.kept = self.text()
        shutil.rmtree(self.folder)

    # --- what it does -----------------------------------------------------------------------

    def wait(self, timeout_s: float) -> list[int]:
        """Exit codes of what was started."""
        deadline = time.monotonic() + timeout_s
        return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]

    def until(self, word: str, timeout_s: float, times: int = 1) -> None:
        """Wait until so many ranks have said the word."""
        deadline = time.monotonic() + timeout_s
        while len(self.said(word)) < times:
            if time.monotonic() > deadline:
                raise AssertionError(f"nobody said {word} in {timeout_s} s:\n{self.text()}")
            time.sleep(POLL_S)

    def text(self) -> str:
        return self.kept or (self.folder / "log").read_text(errors="replace")

    def said(self, word: str) -> list[Said]:
        """(When, rank, what) of the lines that begin with a word, in the order of time."""
        found = re.findall(rf"{word} (\d+\.\d+) (\d+) (.*)", self.text())
        return sorted(Said(float(at), int(rank), text) for at, rank, text in found)

    def after(self, first: str, then: str, about: str = "") -> float:
        """Seconds from one word to the first other one (about something) that followed."""
        begin = self.said(first)[0].at_s
        later = [s.at_s for s in self.said(then) if s.at_s >= begin and about in s.text]
        if not later:
            raise AssertionError(f"nobody said {then} {about}:\n{self.text()}")
        return later[0] - begin

    def alive(self) -> list[int]:
        """Processes of this job that have not ended."""
        return [pid for pid, environment in processes() if f"{MARK}={self.mark}" in environment]

    def ranks(self) -> list[int]:
        """Processes of ranks."""
        return [pid for pid, environment in processes()
                if f"{MARK}={self.mark}" in environment and "\0RANK=" in environment]

    def listeners(self) -> list[str]:
        """Addresses (as /proc has them) at which processes of this job listen."""
        own = {inode for pid in self.alive() for inode in _sockets(pid)}
        return [address for address, inode in _listening() if inode in own]

    def left(self) -> list[str]:
        """What the job has left of its own."""
        files = [str(path) for path in self.folder.glob("autopar-*")]
        return [f"process {pid}" for pid in self.alive()] + self.listeners() + files


def processes() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                yield int(folder.name), (folder / "environ").read_text(errors="replace")


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                    yield found[1]


def _listening() -> Iterator[tuple[str, str]]:
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                yield fields[1], fields[9]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
