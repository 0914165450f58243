"""Does a run that follows its machines end sooner than the best plan that stays?

    python profiling live --case link         # 1 Gbit/s, in between 100 Mbit/s
    python profiling live --case straggler    # one of two nodes falls to a third of its speed
    python profiling live --case flap         # a link that falls and returns again and again
    python profiling live --case busy         # other work comes and goes on both nodes: no move

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
import subprocess
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
AHEAD, BEHIND = 1.3, 1.15  # of the best plan that stays, of the best one at every moment
TRIED, WARM = 7, 2  # steps of each plan in each state


class Case(NamedTuple):
    """Spells of so many steps, in each of which machines are in one state."""

    spells: tuple[tuple[int, str], ...]
    change: Callable[[Lab, str], None]
    rate_mbps: float | None = 1000
    rows: int = ROWS

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
    """Other work on both cores, which ends with it."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, lab: Lab, state: str) -> None:
        while self.processes:
            process = self.processes.pop()
            process.kill()
            process.wait()
        if state == SLOW:
            self.processes = [lab.popen(name, [sys.executable, "-c", "while True: pass"])
                              for name in ("n0", "n1")]


CASES = {
    "link": Case(((300, FAST), (100, SLOW), (300, FAST)), link),
    "straggler": Case(((300, FAST), (150, SLOW), (300, FAST)), straggler, None),
    "flap": Case(((120, FAST), *((20, SLOW), (20, FAST)) * 6), link),
    "busy": Case(((120, FAST), *((60, SLOW), (60, FAST)) * 4), Others(), None),
}


# --- one rank -----------------------------------------------------------------------------------


def rank_main(name: str, folder: Path, changes: str) -> None:
    import torch
    import torch.distributed as dist

    import autopar_torch as ap
    from models import gpt

    pin()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    dist.init_process_group("gloo")
    case = CASES[name]
    model, batch = gpt(WIDTH, LAYERS, case.rows)
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


def by_hand() -> dict[str, Plan]:
    from autopar_torch.plan import Plan
    from clock.unequal import pipe, plan

    return {"dp 2": Plan.uniform(dp=2), "tp 2": Plan.uniform(tp=2),
            "pp 2": Plan.uniform(pp=2, num_micro_batches=4),
            "dp 3:1": plan([pipe([LAYERS], [r], 1, own) for r, own in enumerate((3, 1))]),
            "dp 2:1": plan([pipe([LAYERS], [r], 1, own) for r, own in enumerate((2, 1))]),
            "pp 6|2": plan([pipe([6, 2], [0, 1], 4)])}


def table(model: ParallelModel, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor],
          plans: Sequence[Plan], folder: Path) -> dict[str, dict[str, float]]:
    """Seconds of a step of each plan in each state, in which nobody follows anything."""
    model.between = lambda settle: None
    known = {f"used {i}": plan for i, plan in enumerate(dict.fromkeys(
        map(_hashable, plans)))}
    found: dict[str, dict[str, float]] = {}
    for state in (FAST, SLOW):
        ask(folder, state)
        for name, plan in {**{k: plans[list(map(_hashable, plans)).index(v)]
                              for k, v in known.items()}, **by_hand()}.items():
            model.move(plan)
            times = []
            for _ in range(WARM + TRIED):
                start = time.perf_counter()
                one_step(model, optimizer, batch)
                times.append(time.perf_counter() - start)
            found.setdefault(name, {})[state] = statistics.median(times[WARM:])
    ask(folder, FAST)
    return found


def _hashable(plan: Plan) -> str:
    return plan.describe(2)


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
    if name == "busy":
        return text, len(found["used"]) == 1
    return text, stays[best] / took_s >= AHEAD and took_s / free_s <= BEHIND


def main() -> int:
    parser = argparse.ArgumentParser("profiling live", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", default=[])
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
