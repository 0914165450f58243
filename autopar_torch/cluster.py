"""Cluster: devices, links, and how they change; every number with its source."""

from __future__ import annotations

from msgspec import Struct


class Link(Struct, frozen=True):
    """A way between devices: seconds before the first byte, bytes per second after it.

    `scatter`: how much slower a reduce-scatter is than an all-gather (Gloo sums on the CPU).
    """

    latency_s: float
    bytes_per_s: float
    scatter: float = 1.0


class Device(Struct, frozen=True):
    """What one device can do."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    source: str = "datasheet"


class Change(Struct, frozen=True):
    """From `at_s` on, what `name` denotes runs at `factor` of its speed (0: gone)."""

    at_s: float
    name: str
    factor: float


class Cluster(Struct, frozen=True):
    """Devices by node, in rank order; links inside a node and between nodes."""

    nodes: tuple[tuple[Device, ...], ...]
    inside: Link
    across: Link
    changes: tuple[Change, ...] = ()

    @property
    def num_devices(self) -> int:
        return sum(len(node) for node in self.nodes)


CPU_CORE = Device("CPU core", 4e10, 5e9, 4 * 2**30, "assumed")
LOOPBACK = Link(1e-3, 1.4e9, 1.6)  # latency: mostly waiting for a rank that shares the cores
GPU = Device("A100-80", 312e12, 2e12, 80 * 2**30)
NVLINK, INFINIBAND = Link(1e-5, 2e11), Link(2e-5, 2.5e10)
