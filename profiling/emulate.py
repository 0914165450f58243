"""Run a command on emulated nodes: a core each, links of a given speed.

Where there are more nodes than cores some share one, and are known to (`measure/detect.py`). Quotas
would not make it half a core each: they let who has waited run at full speed for a while, and stop
who has not for milliseconds. Needs what tests/netlab needs (Linux, root).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from netlab import Lab, Node

TIMEOUT_S = 3600


def nodes(count: int, rate_mbps: float) -> list[Node]:
    """As many nodes as asked for."""
    cores = sorted(os.sched_getaffinity(0))
    return [Node(name=f"n{i}", cores=(cores[i % len(cores)],), rate_mbps=rate_mbps)
            for i in range(count)]


def run_in_lab(command: Sequence[str], count: int, bits_per_s: float,
               ranks_per_node: int = 1) -> None:
    """The command once per rank; an error says which rank failed and how it ended."""
    with Lab(nodes(count, bits_per_s / 1e6), weight=100) as lab:
        ended = lab.run(list(command), ranks_per_node=ranks_per_node, timeout_s=TIMEOUT_S)
    for rank, (code, output) in enumerate(ended):
        if code:
            raise SystemExit(f"rank {rank} ended with {code}:\n{output[-3000:]}")
