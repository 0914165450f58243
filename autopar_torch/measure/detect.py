"""What this run was started on: nodes, devices, and which ranks share a core."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable
from pathlib import Path

import torch

from ..cluster import CPU_CORE, INFINIBAND, LOOPBACK, NVLINK, Cluster, Device


def here() -> tuple[str, str, Device]:
    """(node, core, device) of this process."""
    device = _gpu() if torch.cuda.is_available() else _cpu()
    return _node(), _core(), device


def _node() -> str:
    """Two processes with the same text can reach each other without a network."""
    namespace = Path("/proc/self/ns/net")
    inode = namespace.stat().st_ino if namespace.exists() else 0
    return f"{socket.gethostname()}/{inode}"


def _core() -> str:
    """The cores that this process may use, of this machine; a GPU is its own."""
    if torch.cuda.is_available():
        return f"cuda {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return f"{_machine()} core {cores[0]}" if len(cores) == 1 else ""


def _machine() -> str:
    """The machine by its last boot, as its containers may share cores; else the node."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if os.access(boot, os.R_OK) else _node()


def _cpu() -> Device:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = platform.processor() or platform.machine() or "CPU"
    return Device(_model_name() or name, CPU_CORE.flops_per_s, CPU_CORE.memory_bytes_per_s, total,
                  "detected")


def _model_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines
                 if line.startswith("model name")), "")


def _gpu() -> Device:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(properties.name, 312e12, 2e12, properties.total_memory, "detected")


def cluster(gather: Callable[[tuple[str, str, Device]], list[tuple[str, str, Device]]]) -> Cluster:
    """The cluster, from each rank's `here`, in rank order. Ranks of a node must be neighbours."""
    places = gather(here())
    nodes: dict[str, list[Device]] = {}
    for node, _, device in places:
        nodes.setdefault(node, []).append(device)
    devices = tuple(tuple(_part(d, len(own)) for d in own) for own in nodes.values())
    names = [core or str(rank) for rank, (_, core, _) in enumerate(places)]
    order = list(dict.fromkeys(names))
    cores = tuple(order.index(name) for name in names)
    inside = NVLINK if torch.cuda.is_available() else LOOPBACK
    across = INFINIBAND if torch.cuda.is_available() else LOOPBACK
    return Cluster(devices, inside, across, cores=cores)


def _part(device: Device, num_ranks: int) -> Device:
    """The bytes of one rank: CPU ranks share the memory of their node."""
    if torch.cuda.is_available():
        return device
    return Device(device.name, device.flops_per_s, device.memory_bytes_per_s,
                  device.memory_bytes // num_ranks, device.source)
