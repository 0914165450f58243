"""Processes in a node: how one gets in, and how several are run to their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import IO, NamedTuple, cast

POLL_S = 0.02
TAIL_LINES = 20

# Joins the node's group, takes its limits and goes on into its namespaces.
JOIN = """
procs=$1 limit=$2 cores=$3; shift 3
echo $$ > "$procs" && ulimit -d "$limit" && exec taskset -c "$cores" "$@"
"""
# In the namespaces but for processes, which only a child can enter: so it waits and ends as the
# child does. The signal that asks a rank where it is (ranks.py) goes to both; it must not end it.
WAIT = """
trap "" USR1
cd "$1"; shift
"$@"
code=$?
if [ $code -gt 128 ]; then kill -$((code - 128)) $$ 2> /dev/null; fi
exit $code
"""


class Ended(NamedTuple):
    """How a rank ended: its exit code (negative: the signal) and all it wrote."""

    code: int
    output: str


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a process with its group, unless it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


class Running:
    """A process whose output is collected, and shown line by line if it has a label."""

    def __init__(self, process: subprocess.Popen[bytes], label: str) -> None:
        self.process, self.label = process, label
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        with cast(IO[bytes], self.process.stdout) as lines:
            for line in lines:
                self.lines.append(line.decode(errors="replace"))
                if self.label:
                    print(f"[{self.label}] {self.lines[-1]}", end="", flush=True)

    def ended(self) -> Ended:
        self.reader.join(timeout=5)
        return Ended(self.process.wait(), "".join(self.lines))


def watch(running: Sequence[Running], timeout_s: float, grace_s: float) -> None:
    """Return when all have ended, or `grace_s` after the first that failed."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while None in (codes := [each.process.poll() for each in running]):
        if any(codes) and not failed:
            failed, deadline = True, min(deadline, time.monotonic() + grace_s)
        if time.monotonic() > deadline:
            if failed:
                return
            raise TimeoutError(_late(running, timeout_s))
        time.sleep(POLL_S)


def _late(running: Sequence[Running], timeout_s: float) -> str:
    late = [rank for rank, each in enumerate(running) if each.process.poll() is None]
    tail = "".join(running[late[0]].lines[-TAIL_LINES:]) if late else ""
    return f"rank(s) {late} had not finished after {timeout_s} s\n{tail}"
