"""Shares of the CPU: one cgroup per node, of either version, removed however this process ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from netlab.refusal import NotPermitted

# Who waits runs at full speed afterwards, for up to a period's share: long periods make a half core
# faster than half. Below the kernel's tick (4 ms) the share itself comes out wrong.
PERIOD_US = 5_000

# Waits for the end of its standard input, then removes the lab's groups and what is still in them.
SWEEP = """
cat > /dev/null
for try in $(seq 200); do
    kill -KILL $(cat "$1"/*/cgroup.procs) 2> /dev/null
    rmdir "$1"/*/ "$1" 2> /dev/null
    if [ ! -d "$1" ]; then exit 0; fi
    sleep 0.05
done
exit 1
"""


class Groups:
    """The lab's group and its nodes' below it; `version` is the cgroups', 1 or 2."""

    def __init__(self, top: Path, version: int) -> None:
        self.top, self.version = top, version

    def procs(self, name: str) -> Path:
        """The file into which a process writes its number to join."""
        return self.top / name / "cgroup.procs"

    def members(self, name: str) -> list[int]:
        return [int(pid) for pid in self.procs(name).read_text().split()]

    def set_share(self, name: str, share: float, num_cores: int) -> None:
        quota_us = round(share * num_cores * PERIOD_US)
        folder = self.top / name
        if self.version == 2:
            (folder / "cpu.max").write_text(f"{quota_us if share < 1 else 'max'} {PERIOD_US}")
            return
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us if share < 1 else -1))

    def set_weight(self, weight: int) -> None:
        """How much the lab counts against the machine's other work."""
        file, unit = ("cpu.weight", 100) if self.version == 2 else ("cpu.shares", 1024)
        (self.top / file).write_text(str(weight * unit))


@contextlib.contextmanager
def groups(names: Sequence[str]) -> Iterator[Groups]:
    top, version = _make(f"netlab-{os.getpid()}-{secrets.token_hex(3)}")
    sweeper = subprocess.Popen(
        ["sh", "-c", SWEEP, "sh", str(top)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        for name in names:
            (top / name).mkdir()
        yield Groups(top, version)
    finally:
        sweeper.communicate(timeout=120)
        if sweeper.returncode:
            raise RuntimeError(f"the cgroup {top} could not be removed")


def _make(name: str) -> tuple[Path, int]:
    refusals = []
    for home, version in homes():
        top = home / name
        try:
            top.mkdir()
            if version == 2:
                for folder in (home, top):
                    (folder / "cgroup.subtree_control").write_text("+cpu")
            return top, version
        except OSError as error:
            refusals.append(str(error))
            if top.is_dir():
                top.rmdir()
    raise NotPermitted(f"no cgroup for CPU shares: {'; '.join(refusals) or 'none is mounted'}")


def homes() -> Iterator[tuple[Path, int]]:
    """Where a group for the CPU might be made: below this process's own, else at the top."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)  # version 2 has the controller ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            key, version = "cpu", 1
        elif kind == "cgroup2" and "cpu" in (Path(folder) / "cgroup.controllers").read_text():
            key, version = "", 2
        else:
            continue
        yield Path(folder + own.get(key, "/")), version
        yield Path(folder), version
