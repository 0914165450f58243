"""Does a run that follows its machines end sooner than the best plan that stays?

    python profiling live --case link         # 1 Gbit/s, in between 100 Mbit/s
    python profiling live --case straggler    # one of two nodes falls to a third of its speed
    python profiling live --case flap         # a link that falls and returns again and again
    python profiling live --case busy         # other work comes and goes on both nodes: no move
    python profiling live --case brief        # the same, for a fifth of the steps
    python profiling live --case link --losses    # beside those of a run that stays: twice as long

Two emulated nodes of one rank train a GPT of 8 layers. After the run every plan that it was in, and
some by hand, are stepped in both states of the machines. From these times follows how long the run
would have taken under each plan that stays, and under the best one at every moment with free moves.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from start import DOOR, LIMIT_S, pin

if TYPE_CHECKING:
    import torch

    from autopar_torch.plan import Plan
    from autopar_torch.run.model import ParallelModel
    from netlab import Lab

WIDTH, LAYERS, ROWS = 192, 8, 8
FAST, SLOW = "as usual", "slow"
APART = 1e-5  # losses, relatively
AHEAD, BEHIND = 1.3, 1.15  # of the best plan that stays, of the best one at every moment
TRIED, WARM = 7, 2  # steps of each plan in each state


def unet() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Whatever cuts it in two carries large values over the border, so pipelines do not help."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.GroupNorm(8, a), nn.SiLU(), nn.Conv2d(a, b, 3, padding=1))

    class UNet(nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            self.begin, self.end = (nn.Conv2d(*ends, 3, padding=1) for ends in ((3, c), (c, 3)))
            self.down1, self.down2, self.mid = block(c, 2 * c), block(2 * c, 4 * c), block(
                4 * c, 4 * c)
            self.up2, self.up1 = block(8 * c, 2 * c), block(4 * c, c)

        def forward(self, image: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
            a = self.down1(self.begin(image + noise))
            b = self.down2(F.avg_pool2d(a, 2))
            y = F.interpolate(self.mid(F.avg_pool2d(b, 2)), scale_factor=2.0)
            y = F.interpolate(self.up2(torch.cat([y, b], 1)), scale_factor=2.0)
            return F.mse_loss(self.end(self.up1(torch.cat([y, a], 1))), noise)

    torch.manual_seed(0)
    return UNet(32), {"image": torch.randn(16, 3, 32, 32), "noise": torch.randn(16, 3, 32, 32)}


def gpt() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    import models

    return models.gpt(WIDTH, LAYERS, ROWS)


class Case(NamedTuple):
    """Spells of so many steps, in each of which machines are in one state."""

    spells: tuple[tuple[int, str], ...]
    change: Callable[[Lab, str], None]
    rate_mbps: float | None = 1000
    model: Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]] = gpt

    @property
    def num_steps(self) -> int:
        return sum(count for count, _ in self.spells)

    def state_of(self, step: int) -> str:
        for count, state in self.spells:
            if step < count:
                return state
            step -= count
        return FAST


def link(lab: Lab, state: str) -> None:
    lab.set_rate("n1", rate_mbps=100 if state == SLOW else 1000)


def straggler(lab: Lab, state: str) -> None:
    lab.set_cpu_share("n1", 1 / 3 if state == SLOW else 1.0)


class Others:
    """Other work on both cores, which ends with its file."""

    file: Path

    def __call__(self, lab: Lab, state: str) -> None:
        if state == SLOW:
            with tempfile.NamedTemporaryFile(delete=False) as made:
                self.file = Path(made.name)
            code = f"import os\nwhile os.path.exists({made.name!r}): sum(range(10**6))"
            for name in ("n0", "n1"):
                lab.popen(name, [sys.executable, "-c", code])
        elif hasattr(self, "file"):
            self.file.unlink(missing_ok=True)


CASES = {
    "link": Case(((500, FAST), (400, SLOW), (500, FAST)), link, model=unet),
    "straggler": Case(((450, FAST), (250, SLOW), (450, FAST)), straggler, None),
    "flap": Case(((120, FAST), *((20, SLOW), (20, FAST)) * 6), link),
    "busy": Case(((120, FAST), *((60, SLOW), (60, FAST)) * 4), Others(), None),
    "brief": Case(((40, FAST), *((20, SLOW), (20, FAST)) * 2), Others(), None),
}


# --- one rank -----------------------------------------------------------------------------------


def rank_main(name: str, folder: Path, changes: str) -> None:
    import torch
    import torch.distributed as dist

    import autopar_torch as ap
    pin()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    dist.init_process_group("gloo")
    case = CASES[name]
    model, batch = case.model()
    parallel = ap.parallelize(model, batch, changes=changes)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    plans, seconds, losses = [parallel.plan], [], []
    state = FAST
    for step in range(case.num_steps):
        if case.state_of(step) != state:
            state = case.state_of(step)
            ask(folder, state)
        start = time.perf_counter()
        losses.append(one_step(parallel, optimizer, batch))
        seconds.append(time.perf_counter() - start)
        if parallel.plan is not plans[-1]:
            plans.append(parallel.plan)
    ask(folder, FAST)
    found = {"seconds": seconds, "losses": losses, "used": [p.describe(2) for p in plans],
             "table": table(parallel, optimizer, batch, plans, folder)}
    if dist.get_rank() == 0:
        (folder / f"{changes}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def one_step(model: ParallelModel, optimizer: torch.optim.Optimizer,
             batch: dict[str, torch.Tensor]) -> float:
    loss = model(**batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def by_hand(num_blocks: int, batch_statistics: bool) -> dict[str, Plan]:
    from autopar_torch.plan import Plan, Replica, Stage

    most = 1 if batch_statistics else 4
    cut = 3 * num_blocks // 4

    def shared(*rows: int) -> Plan:
        return Plan(tuple(Replica((Stage((r,), (0, num_blocks)),), 1, own)
                          for r, own in enumerate(rows)))

    return {"dp 2": Plan.uniform(dp=2), "tp 2": Plan.uniform(tp=2),
            "pp 2": Plan.uniform(pp=2, num_micro_batches=most), "one alone": shared(1),
            "dp 3:1": shared(3, 1), "dp 2:1": shared(2, 1),
            "pp 3:1": Plan((Replica(
                (Stage((0,), (0, cut)), Stage((1,), (cut, num_blocks))), most),))}


def table(model: ParallelModel, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor],
          plans: Sequence[Plan], folder: Path) -> dict[str, dict[str, float]]:
    """Seconds of a step of each plan in each state, in which nobody follows anything."""
    from autopar_torch.find.replan import name_of

    model.between = lambda settle: None
    statistics_of_batches = any(kind.couples_rows for kind in model.graph.kinds.values())
    known = {f"used {i}": plan for i, plan in enumerate({name_of(p): p for p in plans}.values())}
    known |= by_hand(len(model.graph.blocks), statistics_of_batches)
    found: dict[str, dict[str, float]] = {}
    for state in (FAST, SLOW):
        ask(folder, state)
        for name, plan in known.items():
            model.move(plan)
            times = []
            for _ in range(WARM + TRIED):
                start = time.perf_counter()
                one_step(model, optimizer, batch)
                times.append(time.perf_counter() - start)
            found.setdefault(name, {})[state] = statistics.median(times[WARM:])
    ask(folder, FAST)
    return found


def ask(folder: Path, state: str) -> None:
    """Have machines brought into a state, and wait until they are."""
    import torch.distributed as dist

    mark = folder / "asked"
    if dist.get_rank() == 0:
        (folder / "new").write_text(state)
        (folder / "new").rename(mark)
        while mark.exists():
            time.sleep(0.002)
    dist.barrier()


# --- all of them --------------------------------------------------------------------------------


def run(name: str, changes: str, folder: Path) -> tuple[dict[str, Any], str]:
    """What was measured, and what rank 0 said."""
    from netlab import Lab, Node

    case, done = CASES[name], threading.Event()
    cores = sorted(os.sched_getaffinity(0))
    nodes = [Node(name=f"n{i}", cores=(cores[i % len(cores)],), rate_mbps=case.rate_mbps)
             for i in range(2)]
    with Lab(nodes, weight=100) as lab:
        def serve() -> None:
            while not done.wait(0.002):
                if (folder / "asked").exists():
                    case.change(lab, (folder / "asked").read_text())
                    (folder / "asked").unlink()

        server = threading.Thread(target=serve)
        server.start()
        try:
            ended = lab.run([sys.executable, DOOR, "live", "--rank-main", name, str(folder),
                             changes], timeout_s=LIMIT_S)
        finally:
            done.set()
            server.join()
    for rank, (code, output) in enumerate(ended):
        if code:
            raise SystemExit(f"rank {rank} ended with {code}:\n{output[-3000:]}")
    return json.loads((folder / f"{changes}.json").read_text()), ended[0][1]


def figures(name: str, found: dict[str, Any]) -> tuple[str, bool]:
    """The run beside plans that stay, and the best one at every moment."""
    steps = [CASES[name].state_of(step) for step in range(CASES[name].num_steps)]
    rows = found["table"]
    stays = {plan: sum(own[state] for state in steps) for plan, own in rows.items()}
    best = min(stays, key=lambda plan: stays[plan])
    free_s = sum(min(own[state] for own in rows.values()) for state in steps)
    took_s = sum(found["seconds"])
    text = (f"{name}: {took_s:.1f} s in {len(found['used'])} plan(s); the best that stays "
            f"({best}) {stays[best]:.1f} s: {stays[best] / took_s:.2f}x; the best at every moment "
            f"with free moves {free_s:.1f} s: {took_s / free_s:.2f}x of it")
    if name in ("busy", "brief"):
        return text, len(found["used"]) == 1
    return text, stays[best] / took_s >= AHEAD and took_s / free_s <= BEHIND


def main() -> int:
    parser = argparse.ArgumentParser("profiling live", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", default=[])
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-main", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_main:
        name, folder, changes = options.rank_main
        rank_main(name, Path(folder), changes)
        return 0
    good, everything = True, {}
    for name in options.case or CASES:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["AUTOPAR_CACHE"] = folder
            found, said = run(name, "follow", Path(folder))
            if options.losses:
                stays = run(name, "off", Path(folder))[0]["losses"]
                apart = max(abs(a / b - 1) for a, b in zip(found["losses"], stays, strict=True))
                print(f"losses beside those of a run that stays: apart by {apart:.1e} at most")
                good = good and apart <= APART
        everything[name] = found
        print(*(line for line in said.splitlines() if re.match(r"\d+ ", line)), sep="\n")
        for plan, own in found["table"].items():
            print(f"  {plan:10} {own[FAST] * 1e3:8.1f} ms as usual {own[SLOW] * 1e3:8.1f} ms slow")
        print(*found["used"], sep="\n")
        text, held = figures(name, found)
        print(text, flush=True)
        good = good and held
    if options.json:
        options.json.write_text(json.dumps(everything))
    return int(not good)
