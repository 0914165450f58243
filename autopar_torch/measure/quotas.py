"""What this process may use of its machine: quotas of its control groups, limits of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
LIMITS = {"Max data size": "VmData", "Max address space": "VmSize"}  # and what counts for them


def cores(root: Path = ROOT) -> float:
    """As many cores' time as the control groups of this process may use."""
    found = [math.inf]
    for folder in _groups("cpu", root):
        words = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0] not in ("max", "-1"):
            found.append(float(words[0]) / float(words[1]))
    return min(found)


def group_bytes(root: Path = ROOT) -> float:
    """As much memory as the control groups of this process may use, with all that is in them."""
    words = [word for folder in _groups("memory", root)
             for name in ("memory.max", "memory.limit_in_bytes") for word in _words(folder / name)]
    return min((float(word) for word in words if word != "max"), default=math.inf)


def own_bytes(root: Path = ROOT) -> float:
    """What the limits of this process leave beside what counts for them now."""
    limits = {line[:26].strip(): line[26:].split()[0] for line in _lines(root / "proc/self/limits")}
    left = [float(limits[limit]) - used_bytes(used, root) for limit, used in LIMITS.items()
            if limits.get(limit, "unlimited") != "unlimited"]
    return min(left, default=math.inf)


def used_bytes(name: str = "VmRSS", root: Path = ROOT) -> float:
    """What this process uses now."""
    sizes = [line.split()[1] for line in _lines(root / "proc/self/status")
             if line.startswith(f"{name}:")]
    return 1024.0 * float(sizes[0]) if sizes else 0.0


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of this process's control group and of those above it, of either version."""
    own: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path.lstrip("/"))  # version 2 has only ""
    for line in _lines(root / "proc/self/mounts"):
        _, folder, kind, options, *_ = line.split()
        key = {"cgroup": controller, "cgroup2": ""}.get(kind)
        if key in own and (not key or key in options.split(",")):
            top = root / folder.lstrip("/")
            here = top / own[key]
            yield from (each for each in (here, *here.parents) if each.is_relative_to(top))


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
