"""What this run was started on: nodes, devices, what they may use, and which ranks share a core."""

from __future__ import annotations

import logging
import math
import os
import platform
import socket
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace

from .. import datasheets
from ..cluster import CPU_CORE, GPU, INFINIBAND, LOOPBACK, NVLINK, Cluster, Device
from . import quotas

log = logging.getLogger("autopar_torch")
LEAST_STEP = 2**26


class Site(NamedTuple):
    """Where a process runs, and on what."""

    node: str
    cores: str  # those that it may use, of which machine; ranks with the same text share them
    num_cores: int
    share: float  # cores' time that its node may use
    device: Device  # with the memory of the node, if it is a CPU
    used_bytes: float = 0.0  # what the process has taken by now
    left_bytes: float = math.inf  # what its own limits leave it beside that


@cache
def here() -> Site:
    """The site of this process, as it was when it was first asked for: memory in use changes."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        free_bytes = torch.cuda.mem_get_info()[0]
        return Site(_node(), f"cuda {gpu.uuid}", 1, math.inf, _gpu(),
                    torch.cuda.memory_reserved(), free_bytes)
    found = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    number = len(found) or os.cpu_count() or 1
    return Site(_node(), f"{_machine()} cores {found or number}", number, quotas.cores(), _cpu(),
                 quotas.used_bytes(), quotas.own_bytes())


def _node() -> str:
    """Two processes with the same text can reach each other without a network."""
    namespace = Path("/proc/self/ns/net")
    inode = namespace.stat().st_ino if namespace.exists() else 0
    return f"{socket.gethostname()}/{inode}"


def _machine() -> str:
    """The machine by its last boot, as its containers may share cores; else the node."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if os.access(boot, os.R_OK) else _node()


def _cpu() -> Device:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = platform.processor() or platform.machine() or "CPU"
    return Device(_model_name() or name, CPU_CORE.flops_per_s, CPU_CORE.memory_bytes_per_s,
                  int(min(total, quotas.group_bytes())), "detected")


def _model_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines
                 if line.startswith("model name")), "")


def _gpu() -> Device:
    """By its datasheet, with the memory that the driver sees; an A100 where there is none."""
    own = torch.cuda.get_device_properties(torch.cuda.current_device())
    sheet = datasheets.of_product(own.name, own.total_memory)
    if sheet is None:
        log.warning("no datasheet of %s: it is planned with as if it were an A100", own.name)
        return Device(own.name, GPU.flops_per_s, GPU.memory_bytes_per_s, own.total_memory,
                      "detected")
    return replace(sheet.device, memory_bytes=own.total_memory)


def crowds(sites: Sequence[Site]) -> list[float]:
    """Per rank: how many times as much of its cores as there is the ranks on them want; 1 where
    there is enough for all. A quota of half a core wants no more than that."""
    ranks = Counter(site.node for site in sites)
    wanted: dict[str, float] = {}
    for site in sites:
        own = min(1.0, site.share / ranks[site.node])
        wanted[site.cores] = wanted.get(site.cores, 0.0) + own
    return [max(1.0, wanted[site.cores] / site.num_cores) for site in sites]


def cluster(sites: Sequence[Site], speeds: Sequence[float] = (), held_bytes: int = 0) -> Cluster:
    """The cluster, from each rank's site, in rank order. Ranks of a node must be neighbours.
    `held_bytes`: of the model, which each of them holds already."""
    ranks = Counter(site.node for site in sites)
    rooms = _alike([_room(site, ranks[site.node], held_bytes) for site in sites])
    nodes: dict[str, list[Device]] = {}
    for site, room, speed in zip(sites, rooms, speeds or [1.0] * len(sites), strict=True):
        device = replace(site.device, memory_bytes=room, speed=speed)
        nodes.setdefault(site.node, []).append(device)
    shared = [site.num_cores == 1 and crowd > 1
              for site, crowd in zip(sites, crowds(sites), strict=True)]
    names = [sites[r].cores if shared[r] else str(r) for r in range(len(sites))]
    order = list(dict.fromkeys(names))
    cores = tuple(order.index(name) for name in names)
    inside = NVLINK if torch.cuda.is_available() else LOOPBACK
    across = INFINIBAND if torch.cuda.is_available() else LOOPBACK
    return Cluster(tuple(map(tuple, nodes.values())), inside, across, cores=cores)


def _room(site: Site, num_ranks: int, held_bytes: int) -> int:
    """Bytes for the tensors of one rank, rounded down: the ranks of a node share its memory."""
    if torch.cuda.is_available():
        return int(min(site.device.memory_bytes, site.used_bytes + site.left_bytes))
    share = site.device.memory_bytes // num_ranks
    room = min(share, share - site.used_bytes + held_bytes, site.left_bytes + held_bytes)
    step = _step(max(0.0, room))
    return max(step, int(room // step * step))


def _step(room: float) -> int:
    """By so much what a process has left may differ between runs, and between equal machines."""
    return max(LEAST_STEP, 2 ** (int(room).bit_length() - 6))


def _alike(rooms: Sequence[int]) -> list[int]:
    """As much as the least of those that have about as much: equal machines stay equal."""
    levels: list[int] = []
    for room in sorted(rooms):
        if not levels or room > levels[-1] + _step(room):
            levels.append(room)
    return [max(level for level in levels if level <= room) for room in rooms]
