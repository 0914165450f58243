"""Starts the ranks of a script, on this machine or on emulated nodes; each comes in by the door.

An emulated node has one core. Where there are more nodes than cores some share one, and are known
to (`measure/detect.py`). Quotas would not make it half a core each: a node that has waited runs at
full speed for a while, and one that has not is stopped for milliseconds. Emulation needs what
tests/netlab needs (Linux, root).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netlab import Node

DOOR = str(Path(__file__).resolve().parent)
LIMIT_S = 3600  # spells in which the host takes the cores are waited out


def start_ranks(
    name: str, options: list[str], num_nodes: int, ranks_per_node: int = 1, bits_per_s: float = 0.0
) -> None:
    """`python profiling NAME` on every rank: on this machine, or where links have a speed on
    emulated nodes. Where a rank fails, this program ends."""
    if bits_per_s:
        from netlab import Node

        cores = sorted(os.sched_getaffinity(0))
        nodes = [Node(name=f"n{i}", cores=(cores[i % len(cores)],), rate_mbps=bits_per_s / 1e6)
                 for i in range(num_nodes)]
        start_on(nodes, name, options, ranks_per_node)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={num_nodes * ranks_per_node}", DOOR, name, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                                "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if status := subprocess.run(command, env=environment, timeout=LIMIT_S).returncode:
        raise SystemExit(status)


def start_on(nodes: Sequence[Node], name: str, options: list[str], ranks_per_node: int = 1) -> None:
    """The same on emulated nodes."""
    from netlab import Lab

    command = [sys.executable, DOOR, name, *options]
    with Lab(nodes, weight=100) as lab:
        ended = lab.run(command, ranks_per_node=ranks_per_node, timeout_s=LIMIT_S)
    for rank, (code, output) in enumerate(ended):
        if code:
            raise SystemExit(f"rank {rank} ended with {code}:\n{output[-3000:]}")


def pin() -> None:
    """One core and one thread per rank, round robin."""
    import torch

    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
