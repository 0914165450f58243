"""run: a script under torchrun."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

MOST_RESTARTS = "20"  # of one node, unless told otherwise; a script that fails fails each time


def run(options: argparse.Namespace) -> int:
    """torchrun, a process per device of the plan (`parallelize` reads AUTOPAR_PLAN), or one that
    starts the ranks again whenever one of them or a node goes or comes."""
    rest = options.rest[options.rest[:1] == ["--"] :]
    start, told = _elastic(options) if options.elastic else _planned(options, rest)
    shown = " ".join(f"{name}={value}" for name, value in told.items())
    print(f"{shown} torchrun {shlex.join([*start, *rest])}", file=sys.stderr)
    if options.print:
        return 0
    from ..run import launcher

    os.environ.update(told)
    launcher.launch([*start, *rest])
    return 0


Start = tuple[list[str], dict[str, str]]  # options of torchrun, and the environment


def _planned(options: argparse.Namespace, rest: list[str]) -> Start:
    from ..plan import load_plan

    count = load_plan(options.plan).devices[-1] + 1
    own = any("nproc" in a or "nnodes" in a for a in rest)
    return ([] if own else ["--standalone", "--nproc-per-node", str(count)],
            {"AUTOPAR_PLAN": str(Path(options.plan).resolve())})


def _elastic(options: argparse.Namespace) -> Start:
    """A node counts as lost after some seconds without a sign; one that comes is taken in."""
    waits = "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=3"
    start = ["--nnodes", options.elastic, "--rdzv-backend", "c10d", "--rdzv-endpoint", options.head,
             "--rdzv-id", "autopar", "--rdzv-conf", waits, "--max-restarts", MOST_RESTARTS]
    # A node that joins later would look for the ranks' store where the first attempt had it.
    return start, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
