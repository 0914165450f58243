"""One model on real ranks: the best plans with rings and without, their steps in turn.

Sides: `never`, `always` and `free`, as `parallelize` finds them under that constraint on one tensor
group of all ranks with one micro-batch. All live in one process and their steps are interleaved, so
the machine's drift cancels in the paired ratios. A step is forward, backward and AdamW on a fixed
global batch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar_torch as ap
from autopar_torch.run import world
from autopar_torch.shard.spatial import RankRing
from autopar_torch.timeline import COMM, COMPUTE
from clock import accuracy
from host import Calm
from models import MODELS
from start import start_ranks

SIDES = ("never", "always", "free")
# Of the first losses, before and after one update: AdamW soon drives apart what rounding did (at
# the fifth loss of this OPT data parallelism is 1.4e-4 from one process, at the first 1e-7).
TOLERANCE, COMPARED = 1e-5, 2
WARM = 2
Row = dict[str, Any]


class Side(accuracy.Side):
    """The model under one plan, and the time of its steps."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        model, self.batch = MODELS[options.model](options.width, options.layers, options.rows)
        limits = {"rings": name, "tp": dist.get_world_size(), "num_micro_batches": 1,
                  "schedule": "1f1b", "recompute": False, "zero": 0}
        self.model = ap.parallelize(model, self.batch, constraints=limits)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        used = {i for stage in self.model.plan.replicas[0].stages for i in stage.shardings or ()}
        texts = (self.model.plan.shardings[i].ops.values() for i in used if i >= 0)
        self.num_rings = sum("w" in text for ops in texts for text in ops)
        self.seconds: list[float] = []
        self.core_s: list[float] = []
        self.losses: list[float] = []

    def step(self) -> None:
        dist.barrier()
        core, start = time.process_time(), time.perf_counter()
        loss = self.model(**self.batch)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.core_s.append(time.process_time() - core)
        self.losses.append(loss.item())

    def waiting(self) -> Row:
        """Seconds of a measured step: computing, exchanging, waiting for rings, and waiting for
        them where every message is awaited at once. What is missing in between is hidden."""
        timeline = self.model.measure(**self.batch, steps=3)
        found = {name: sum(s.end_s - s.start_s for s in timeline.spans
                           if s.rank == 0 and s.stream == stream)
                 for name, stream in (("compute_s", COMPUTE), ("comm_s", COMM))}
        with nothing_hidden():
            alone = self.model.measure(**self.batch, steps=3)
        return {**found, "ring_wait_s": ring_waits(timeline), "ring_alone_s": ring_waits(alone)}


def ring_waits(timeline: ap.Timeline) -> float:
    return sum(s.end_s - s.start_s for s in timeline.spans if s.name == "_arrive" and s.rank == 0)


@contextlib.contextmanager
def nothing_hidden() -> Iterator[None]:
    """Blocks of a ring are awaited before the matmul that would hide them."""
    start = RankRing.start

    def at_once(ring: RankRing, blocks: Any, shifts: Any) -> Any:
        came = start(ring, blocks, shifts)()
        return lambda: came

    RankRing.start = at_once  # type: ignore[method-assign]
    try:
        yield
    finally:
        RankRing.start = start  # type: ignore[method-assign]


def row(name: str, side: Side, base: Side, peak: int) -> Row:
    """Medians, and quartiles of the ratios of steps that ran one after the other."""
    ratios = [a / b for a, b in zip(side.seconds, base.seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    pairs = list(zip(side.losses, base.losses, strict=True))[:COMPARED]
    off = max(abs(a - b) / abs(b) for a, b in pairs)
    return {"side": name, "step_s": statistics.median(side.seconds), "ratio": middle,
            "core_s": statistics.median(side.core_s),
            "quartiles": [low, high], "peak_bytes": peak, "rings": side.num_rings,
            "plan": side.model.plan.describe().partition(";")[0],
            "loss_difference": off, **side.waiting()}


def hides(r: Row) -> str:
    if not r["ring_alone_s"]:
        return ""
    wait, alone = r["ring_wait_s"], r["ring_alone_s"]
    return f"awaited {wait * 1e3:.0f} of {alone * 1e3:.0f} ms, "


def text(r: Row) -> str:
    low, high = r["quartiles"]
    waits = r["comm_s"] / (r["comm_s"] + r["compute_s"])
    return (f"  {r['side']:7} {r['step_s'] * 1e3:8.1f} ms  x{r['ratio']:.2f} ({low:.2f} to "
            f"{high:.2f})  {r['peak_bytes'] / 1e6:6.1f} MB  {r['rings']} in rings, "
            f"{hides(r)}waits {waits:.0%}, core {r['core_s'] * 1e3:.0f} ms, "
            f"{r['plan']}")


def measure(options: argparse.Namespace) -> list[Row]:
    sides = {name: Side(name, options) for name in SIDES}
    everyone = sides["never"].model.world
    calmly = Calm(lambda share: max(everyone.gather(share)))

    def in_turn() -> None:
        for side in sides.values():
            side.step()

    for index in range(options.steps + WARM):
        calmly(in_turn)
        for side in sides.values() if index < WARM else ():
            side.seconds.clear()
            side.core_s.clear()
    rows = [row(n, s, sides["never"], 0) for n, s in sides.items()]
    for found, side in zip(rows, sides.values(), strict=True):
        found["peak_bytes"] = side.peak_bytes()
    return rows


def rank_main(options: argparse.Namespace) -> int:
    """On every rank; rank 0 prints and writes."""
    torch.set_num_threads(1)
    logging.getLogger("autopar_torch").setLevel(logging.ERROR)
    rank, _ = world.start()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["AUTOPAR_CACHE"] = cache
        rows = measure(options)
    if rank == 0:
        print("\n".join(map(text, rows)))
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()
    return int(any(r["loss_difference"] > TOLERANCE for r in rows))


# --- on emulated nodes ------------------------------------------------------------------------


def lab_main(options: argparse.Namespace) -> int:
    """Every cell of models, links and nodes; one table."""
    cells: list[Row] = []
    per_node = max(1, options.ranks // options.nodes)
    for model, rate in itertools.product(options.models, options.rates):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "cell.json"
            start_ranks("rings", ["--real", "--model", model, "--json", str(out), *sizes(options)],
                        options.nodes, per_node, rate * 1e6)
            rows = json.loads(out.read_text())
        cells += [{"model": model, "rate_mbps": rate, "nodes": options.nodes,
                   "ranks_per_node": per_node, **r} for r in rows]
        print(f"{model}, {options.nodes} nodes x {per_node}, {rate:g} Mbit/s")
        print("\n".join(map(text, rows)), flush=True)
    if options.json:
        options.json.write_text(json.dumps(cells, indent=1))
    return 0


def sizes(options: argparse.Namespace) -> list[str]:
    names = ("width", "layers", "rows", "steps")
    return [part for n in names for part in (f"--{n}", str(getattr(options, n)))]
