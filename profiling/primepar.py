"""Linears in rings against collectives: one model, one set of ranks, steps of both in turn.

    torchrun --standalone --nproc-per-node 4 profiling/primepar.py --real
        [--model gpt|llama] [--width 256] [--layers 4] [--rows 8] [--steps 15] [--json FILE]

`rings` runs every linear that can as the spatial-temporal primitive, `collectives` none, `free`
whatever the assumed prices say is cheapest. All live in one process and their steps are
interleaved, so the machine's drift cancels in the paired ratios. A step is forward, backward and
AdamW on a fixed global batch. The exit status is 0 only if all of them gave the same losses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import autopar_torch as ap
from autopar_torch import plan as plans
from autopar_torch.run import shardings, world
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart

sys.path.insert(0, str(Path(__file__).resolve().parent))

from models import gpt, llama

SIDES: dict[str, Literal["always", "never", "free"]] = {
    "rings": "always", "collectives": "never", "free": "free",
}  # fmt: skip
TOLERANCE = 1e-4  # of losses after some steps of AdamW


class Side:
    """The model under one plan, and the time of its steps."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        make = {"gpt": gpt, "llama": llama}[options.model]
        model, self.batch = make(options.width, options.layers, options.rows)
        traced = trace(model, take_apart((), self.batch)[0])
        size = dist.get_world_size()
        plan = plans.fit(ap.Plan.uniform(tp=size, tp_mesh=tuple(options.mesh)), traced.graph)
        plan = shardings.complete(plan, traced, options.rows, spatial=SIDES[name])
        self.model = ap.parallelize(model, self.batch, plan=plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.num_rings = sum("w" in text for s in plan.shardings for text in s.ops.values())
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self) -> None:
        dist.barrier()
        start = time.perf_counter()
        loss = self.model(**self.batch)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def row(name: str, side: Side, base: Side) -> dict[str, Any]:
    """Medians, and quartiles of the ratios of steps that ran one after the other."""
    ratios = [a / b for a, b in zip(side.seconds, base.seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    params = sum(p.numel() * p.element_size() for p in side.model.parameters())
    off = max(abs(a - b) / abs(b) for a, b in zip(side.losses, base.losses, strict=True))
    return {"side": name, "step_s": statistics.median(side.seconds), "ratio": middle,
            "quartiles": [low, high], "param_bytes": params, "rings": side.num_rings,
            "loss_difference": off}  # fmt: skip


def text(r: dict[str, Any]) -> str:
    low, high = r["quartiles"]
    time_s = f"{r['step_s'] * 1e3:8.1f} ms  x{r['ratio']:.2f} ({low:.2f} to {high:.2f})"
    return (f"{r['side']:12} {time_s}  {r['param_bytes'] / 1e6:.2f} MB of parameters on rank 0, "
            f"{r['rings']} linears in rings, losses off {r['loss_difference']:.0e}")  # fmt: skip


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    sides = {name: Side(name, options) for name in SIDES}
    for index in range(options.steps + 2):
        for side in sides.values():
            side.step()
            if index < 2:
                side.seconds.clear()
    return [row(name, side, sides["collectives"]) for name, side in sides.items()]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--real", action="store_true", required=True, help="time the ranks here")
    parser.add_argument("--model", choices=("gpt", "llama"), default="gpt")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--mesh", type=int, nargs="*", default=[], help="e.g. 2 4")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    chosen = options()
    torch.set_num_threads(1)
    rank, _ = world.start()
    rows = measure(chosen)
    if rank == 0:
        for r in rows:
            print(text(r))
        if chosen.json:
            chosen.json.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()
    return int(any(r["loss_difference"] > TOLERANCE for r in rows))


if __name__ == "__main__":
    sys.exit(main())
