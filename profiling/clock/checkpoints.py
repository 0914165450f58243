"""How long does saving take beside plain torch.distributed.checkpoint?

    python profiling checkpoints [repeats]

A model of 100 MB with AdamW state (300 MB in all) under tensor parallelism of 2, interleaved, each
form into a new folder and over an old one; and what a save in the background costs the steps
beside which it is written. Times of one form vary with the disk: look at the
ratios, and where others use the machine at the seconds of CPU that rank 0 used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ranks import run_ranks

WIDTH, LAYERS, ROWS = 1024, 24, 4


def measured(repeats: int) -> dict[str, list[float]]:
    """In a rank: seconds of every save, by form."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import save as dcp_save

    import autopar_torch as ap

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
            self.layers = torch.nn.Sequential(*layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))  # on all ranks
    model = ap.parallelize(Model(), x, plan=ap.Plan.uniform(tp=dist_size()))
    opt = torch.optim.AdamW(model.parameters())
    model(x).backward()
    opt.step()
    folder = Path(os.environ["CHECKPOINTS"])
    # What DCP writes: the parts of this rank under names of its own; it looks for no doubles.
    rank = dist.get_rank()
    state: dict[str, Any] = {f"{rank}.{n}": p.detach() for n, p in model.named_parameters()}
    for name, param in model.named_parameters():
        state |= {f"{rank}.{name}.{k}": v for k, v in opt.state[param].items()}
    forms = {
        "ours": lambda to: model.save(to, opt),
        "dcp": lambda to: dcp_save(state, checkpoint_id=str(to)),
    }
    batch = x.repeat(BESIDE_ROWS // ROWS, 1)

    def steps(saves: bool) -> None:
        for step in range(BESIDE):
            model(batch).backward()
            opt.step()
            opt.zero_grad()
            if saves and not step:
                model.save(folder / "beside", opt, background=True)

    kinds = [f"{form} {how}{what}" for form in forms for how in HOW for what in ("", " cpu")]
    times: dict[str, list[float]] = {kind: [] for kind in (*kinds, "steps", "steps, saved")}
    for repeat in range(repeats):
        for form in sorted(forms, reverse=repeat % 2 == 1):
            to = folder / f"{form}{repeat}"
            for how in HOW:
                dist.barrier()
                start, busy = time.perf_counter(), time.process_time()
                forms[form](to)
                times[f"{form} {how} cpu"].append(time.process_time() - busy)
                dist.barrier()
                times[f"{form} {how}"].append(time.perf_counter() - start)
            if rank == 0:
                shutil.rmtree(to)
            dist.barrier()
        for saves in (repeat % 2 == 1, repeat % 2 == 0):
            dist.barrier()
            start = time.perf_counter()
            steps(saves)
            dist.barrier()
            times["steps, saved" if saves else "steps"].append(time.perf_counter() - start)
            model._finish_writing()
    return times


HOW = ("new", "over")
BESIDE, BESIDE_ROWS = 20, 256  # steps for one save, and their rows


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("repeats", type=int, nargs="?", default=8)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        os.environ["CHECKPOINTS"] = folder
        times = run_ranks(2, "clock.checkpoints:measured", repeats)[0]
    for what in (*HOW, *(f"{how} cpu" for how in HOW)):
        ours, dcp = times[f"ours {what}"], times[f"dcp {what}"]
        ratios = [a / b for a, b in zip(ours, dcp, strict=True)]
        print(f"{what:8} ours {statistics.median(ours):.3f} s, DCP {statistics.median(dcp):.3f} s,"
              f" ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    plain, saved = times["steps"], times["steps, saved"]
    ratios = [a / b for a, b in zip(saved, plain, strict=True)]
    print(f"one save in the background for {BESIDE} steps: {statistics.median(saved):.2f} s, none "
          f"{statistics.median(plain):.2f} s, ratio {statistics.median(ratios):.3f} "
          f"({min(ratios):.3f} to {max(ratios):.3f})")
