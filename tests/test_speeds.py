"""Unequal machines are seen: who is slow, by how much, and what a process may use."""

from __future__ import annotations

import math
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from autopar_torch.cluster import CPU_CORE, LOOPBACK, Cluster
from autopar_torch.find import choose
from autopar_torch.find.session import cluster_of
from autopar_torch.measure import detect, quotas
from autopar_torch.measure.speeds import APART, ERRORS, Timed, classes, of_paces
from netlab import Lab, Node
from quiet import patient
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
FIRST, LAST = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
GIB = 2**30

# --- classes --------------------------------------------------------------------------------


def drawn(chance: random.Random) -> list[Timed]:
    errors = chance.choice([0.0, 0.02, 0.2])
    return [Timed(chance.choice([1.0, 1.04, 1.3, 2.0]) * chance.uniform(0.99, 1.01),
                 errors * chance.random()) for _ in range(chance.randint(1, 12))]


@pytest.mark.parametrize("seed", range(300))
def test_classes_are_runs_of_paces_that_are_about_equal(seed: int) -> None:
    chance = random.Random(seed)
    paces = drawn(chance)
    found = classes(paces)
    order = sorted(range(len(paces)), key=paces.__getitem__)
    numbers = [found[i] for i in order]
    assert numbers == sorted(numbers) and set(numbers) == set(range(max(numbers) + 1))
    for k in range(max(numbers)):
        slower = min(p.seconds for p, own in zip(paces, found, strict=True) if own == k + 1)
        usual = median(p.seconds for p, own in zip(paces, found, strict=True) if own == k)
        assert slower > usual * (1 + APART)
    shuffled = chance.sample(range(len(paces)), len(paces))
    assert classes([paces[i] for i in shuffled]) == [found[i] for i in shuffled]
    assert classes([Timed(3 * p.seconds, p.error) for p in paces]) == found
    speeds = of_paces(paces)
    assert max(speeds) == 1.0 and all(0.4 < speed <= 1.0 for speed in speeds)


@pytest.mark.parametrize("seed", range(100))
def test_differences_that_may_be_chance_or_are_small_make_no_classes(seed: int) -> None:
    chance = random.Random(seed)
    near = [Timed(chance.uniform(1.0, 1.0 + APART)) for _ in range(9)]
    error = 1.0 / ERRORS
    unsure = [Timed(chance.uniform(1.0, 2.0), error) for _ in range(9)]
    assert {*classes(near), *classes(unsure)} == {0}
    assert of_paces(near) == [1.0] * 9


# --- on emulated nodes ----------------------------------------------------------------------


def measured() -> dict[str, Any]:
    """On a rank: the cluster, and seconds of a block on each class."""
    from clock.accuracy import Side, session_for
    from models import gpt

    torch.set_num_threads(1)
    side = Side(lambda: gpt(width=128, layers=2), {"dp": 2})
    cluster = cluster_of(side.model.world, side.model.graph)
    measuring = session_for({"dp": side})
    for _ in range(3):
        measuring.round()
    profile = measuring.profile()
    layer = max(profile.cells, key=lambda cell: cell.pieces[0].backward_s).kind
    seconds = [cell.pieces[0].backward_s for cell in profile.cells if cell.kind == layer]
    return {"speeds": [device.speed for device in cluster.devices],
            "classes": len(profile.cluster.classes), "seconds": seconds,
            "cores": cluster.cores, "rooms": [device.memory_bytes for device in cluster.devices]}


def on_nodes(share: float, memory_bytes: int | None = None) -> dict[str, Any]:
    nodes = [Node(name="a", cores=(FIRST,)),
             Node(name="b", cores=(LAST,), cpu_share=share, memory_bytes=memory_bytes)]
    with Lab(nodes, weight=100) as lab:
        one, other = run_ranks(2, "test_speeds:measured", lab=lab)
    assert one == other, "all ranks know the same"
    return one


@pytest.mark.slow
@patient
def test_a_node_with_half_a_core_is_a_class_of_its_own() -> None:
    found = on_nodes(0.5, memory_bytes=GIB)
    assert found["speeds"][0] == 1.0 and 0.35 <= found["speeds"][1] <= 0.65
    fast, slow = found["seconds"]
    assert 1.4 < slow / fast < 3.2, "what is measured differs about as much"
    large, small = found["rooms"]
    assert small <= 0.8 * GIB < large, "what torch takes is not left for tensors"


@pytest.mark.slow
@patient
def test_equal_nodes_are_one_class() -> None:
    found = on_nodes(1.0)
    assert found["speeds"] == [1.0, 1.0] and found["classes"] == 1


@pytest.mark.slow
def test_ranks_on_the_cores_of_one_node_are_equal_whoever_waits() -> None:
    for each in run_ranks(2, "test_speeds:measured"):
        assert each["speeds"] == [1.0, 1.0] and each["classes"] == 1


# --- quotas and limits ----------------------------------------------------------------------


def a_machine(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """As it would look from inside: files of the kernel below a folder."""
    files = {"proc/self/cgroup": groups, "proc/self/mounts": mounts, **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_quotas_of_control_groups_are_read_of_both_versions(tmp_path: Path) -> None:
    old = a_machine(
        tmp_path / "1", "4:memory:/a/b\n3:cpu,cpuacct:/a/b\n",
        "c /sys/cpu cgroup rw,cpu,cpuacct 0 0\nc /sys/memory cgroup rw,memory 0 0\n",
        {"sys/cpu/a/b/cpu.cfs_quota_us": "-1", "sys/cpu/a/b/cpu.cfs_period_us": "100000",
         "sys/cpu/a/cpu.cfs_quota_us": "150000", "sys/cpu/a/cpu.cfs_period_us": "100000",
         "sys/memory/a/memory.limit_in_bytes": str(3 * GIB)})
    assert (quotas.cores(old), quotas.group_bytes(old)) == (1.5, 3 * GIB)
    new = a_machine(
        tmp_path / "2", "0::/a\n", "c /sys/all cgroup2 rw 0 0\n",
        {"sys/all/a/cpu.max": "50000 100000", "sys/all/a/memory.max": str(GIB),
         "sys/all/cpu.max": "max 100000", "sys/all/memory.max": "max"})
    assert (quotas.cores(new), quotas.group_bytes(new)) == (0.5, GIB)
    free = tmp_path / "3"
    assert quotas.cores(free) == quotas.group_bytes(free) == quotas.own_bytes(free) == math.inf


@pytest.mark.parametrize("limit", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_a_limit_of_the_process_leaves_less_than_it_says(limit: str) -> None:
    asked = (f"import resource; resource.setrlimit(resource.{limit}, ({4 * GIB}, {8 * GIB}))\n"
             "from autopar_torch.measure import quotas; print(quotas.own_bytes())")
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < 4 * GIB
    assert resource.getrlimit(getattr(resource, limit))[0] != 4 * GIB, "only there"


def site(memory_bytes: int, **more: Any) -> detect.Site:
    device = replace(CPU_CORE, memory_bytes=memory_bytes)
    return detect.Site(more.pop("node", "a"), "m [0, 1]", 2, math.inf, device, **more)


def rooms(*sites: detect.Site) -> list[float]:
    return [device.memory_bytes / GIB for device in detect.cluster(sites).devices]


def test_a_rank_has_its_share_of_the_node_or_what_its_limits_leave() -> None:
    assert rooms(site(8 * GIB), site(8 * GIB)) == [4, 4]
    assert rooms(site(8 * GIB, used_bytes=GIB), site(8 * GIB, left_bytes=GIB)) == [3, 1]


def test_machines_with_about_as_much_memory_are_equal() -> None:
    some = [site(16 * GIB + k * 2**24, node=str(k)) for k in (-2, 3, 0)]
    assert len(detect.cluster([*some, site(8 * GIB, node="b")]).classes) == 2


# --- profiles that were kept ----------------------------------------------------------------


def of_speeds(*speeds: float) -> Cluster:
    return Cluster(tuple((replace(CPU_CORE, speed=s),) for s in speeds), LOOPBACK, LOOPBACK)


def test_a_node_that_became_slow_does_not_use_its_old_profile() -> None:
    then = of_speeds(1.0, 0.5, 0.5)
    assert choose._as_fast(then, of_speeds(1.0, 0.45, 0.45)), "nothing is the same twice"
    for now in ((1.0, 0.5, 0.3), (1.0, 0.3, 0.3), (1.0, 1.0, 1.0), (0.5, 1.0, 1.0)):
        assert not choose._as_fast(then, of_speeds(*now))
