"""How far are the predicted step time and memory of many plans from the clock?

    python profiling accuracy --quick       # one model, two ranks
    python profiling accuracy --json FILE   # every model, 2 and 4 ranks, three networks

With --json a picture is drawn beside the file.

Each case runs its ranks once. Rounds of measuring the profile alternate with rounds of steps of all
plans, since the speed of a machine drifts; medians of what the slowest rank took are compared. The
profile sees blocks, groups and updates, never a plan.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from clock.scores import draw, figures, show, table
from host import Calm
from start import pin, start_ranks

Plans = dict[str, dict[str, Any]]
PLANS: dict[int, Plans] = {
    2: {
        "tp2": {"tp": 2},
        "tp2 m2 recompute": {"tp": 2, "num_micro_batches": 2, "recompute": True},
        "pp2 m4 gpipe": {"pp": 2, "num_micro_batches": 4, "schedule": "gpipe"},
        "pp2 m8 1f1b": {"pp": 2, "num_micro_batches": 8},
        "pp2 m4 zero_bubble": {"pp": 2, "num_micro_batches": 4, "schedule": "zero_bubble"},
        "pp2 m4 interleaved": {"pp": 2, "num_micro_batches": 4, "schedule": "interleaved",
                               "virtual": 2},
        "dp2": {"dp": 2},
        "dp2 m2 zero1 recompute": {"dp": 2, "num_micro_batches": 2, "zero": 1, "recompute": True},
        "dp2 m2 zero2": {"dp": 2, "num_micro_batches": 2, "zero": 2},
        "dp2 zero3": {"dp": 2, "zero": 3},
    },
    4: {
        "tp4": {"tp": 4},
        "tp2 pp2 m4": {"tp": 2, "pp": 2, "num_micro_batches": 4},
        "tp2 dp2": {"tp": 2, "dp": 2},
        "tp2 dp2 zero2 m2": {"tp": 2, "dp": 2, "zero": 2, "num_micro_batches": 2},
        "pp4 m8 1f1b": {"pp": 4, "num_micro_batches": 8},
        "pp4 m4 gpipe recompute": {"pp": 4, "num_micro_batches": 4, "schedule": "gpipe",
                                   "recompute": True},
        "pp2 dp2 m4": {"pp": 2, "dp": 2, "num_micro_batches": 4},
        "pp2 dp2 m2 zero_bubble zero1": {"pp": 2, "dp": 2, "num_micro_batches": 2, "zero": 1,
                                         "schedule": "zero_bubble"},
        "dp4": {"dp": 4},
        "dp4 zero3": {"dp": 4, "zero": 3},
    },
}
NETWORKS = {"loopback": 0.0, "1 Gbit/s": 1e9, "200 Mbit/s": 2e8}
DRAWS = 15  # of the simulator, where times vary
STEPS = 3  # timed one after another in a round
RECORD_EVERY = 3  # rounds, odd and even ones; recorded steps are not timed


# --- on every rank --------------------------------------------------------------------------


class Side:
    """One plan, ready to step."""

    def __init__(self, make: Any, plan: Any) -> None:
        """`plan`: one, or the degrees of a uniform one."""
        import torch

        import autopar_torch as ap

        model, self.batch = make()
        if isinstance(plan, dict):
            plan = ap.Plan.uniform(**plan)
        self.model = ap.parallelize(model, self.batch, plan=plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.seconds: list[float] = []
        self.computing: list[float] = []

    def step(self) -> None:
        self.model(**self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, steps: int = 1) -> None:
        """More steps, after one that is not timed: in training they follow each other."""
        import torch.distributed as dist

        self.step()
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            self.step()
            self.seconds.append(time.perf_counter() - start)

    def recorded(self) -> None:
        """One more step, watched: how long this rank computes."""
        from autopar_torch.run.record import SILENT, Recorder, joined

        rank = self.model.world.rank
        self.model.recorder = recorder = Recorder(rank)
        self.model(**self.batch).backward()
        with recorder.computing("update"):
            self.optimizer.step()
        self.model.recorder = SILENT
        self.optimizer.zero_grad()
        self.computing.append(joined([recorder.result()]).parts(rank).compute_s)

    def peak_bytes(self) -> int:
        """What lives between steps, and the most that a step adds (a release that was not seen
        makes it less)."""
        from autopar_torch.measure.bytes import TensorBytes

        tensors = [t for h in self.model.store.held.values() for t in (h.tensor, h.leaf)]
        tensors += [v for s in self.optimizer.state.values() for v in s.values()]
        lasting = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        with TensorBytes() as count:
            marks = [count.mark()]
            for _ in range(3):
                self.step()
                marks.append(count.mark())
        return sum(lasting.values()) + max(count.peak(a, b) for a, b in pairwise(marks))


def session_for(sides: dict[str, Side]) -> Any:
    """Everything that the simulator would ask about these plans, ready to be measured."""
    from autopar_torch.find.session import session
    from autopar_torch.trace.call import take_apart

    side = next(iter(sides.values()))
    call, tensors = take_apart((), side.batch)
    traced = side.model.retrace(call, True, ("loss",))
    return session(traced, [s.model.plan for s in sides.values()], call, tensors,
                   dict(side.model.module.named_buffers()), side.model.world,
                   side.model.device)


def rank_main(model: str, rounds: int, out: str, names: list[str]) -> None:
    """One case on one rank; rank 0 writes the rows."""
    import torch.distributed as dist

    from models import MODELS

    pin()
    dist.init_process_group("gloo")
    plans = {n: p for n, p in PLANS[dist.get_world_size()].items() if not names or n in names}
    stepped({name: Side(MODELS[model], degrees) for name, degrees in plans.items()}, rounds, out)


def stepped(sides: dict[str, Side], rounds: int, out: str) -> None:
    """Rounds of measuring and of steps of all plans in turn; rank 0 writes rows and profile."""
    import torch.distributed as dist

    num_rows = next(iter(next(iter(sides.values())).batch.values())).shape[0]
    for side in sides.values():
        side.step()
        side.step()
    measuring = session_for(sides)
    order, world = list(sides), next(iter(sides.values())).model.world
    calmly = Calm(lambda share: max(world.gather(share)))
    for k in range(rounds):
        calmly(measuring.round)
        random.Random(k).shuffle(order)
        for name in order:
            calmly(partial(sides[name].timed, STEPS))
            if k % RECORD_EVERY == 0:
                sides[name].recorded()
    profile = measuring.profile()
    rows = [{"plan": name} | row(side, profile, num_rows) for name, side in sides.items()]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))
        profile.save(Path(out).with_suffix(".profile.json"))
    dist.barrier()
    dist.destroy_process_group()


def row(side: Side, profile: Any, num_rows: int) -> dict[str, Any]:
    """A plan's prediction beside what was measured; all ranks call it."""
    from autopar_torch.find.confirm import slowest
    from autopar_torch.simulate import simulate

    timeline = simulate(side.model.plan, side.model.graph, profile, num_rows, draws=DRAWS)
    own = (side.seconds, statistics.median(side.computing), side.peak_bytes())
    everyone, computing, peaks = zip(*side.model.world.gather(own), strict=True)
    seconds = slowest(everyone)
    rounds = [seconds[k : k + STEPS] for k in range(0, len(seconds), STEPS)]
    halves = [statistics.median(s for round in rounds[i::2] for s in round) for i in (0, 1)]
    parts = [timeline.parts(rank) for rank in range(side.model.world.size)]
    return {
        "predicted_s": timeline.step_s, "measured_s": statistics.median(seconds),
        "samples": seconds, "noise": abs(halves[0] / halves[1] - 1),
        "compute_s": statistics.mean(p.compute_s for p in parts),
        "comm_s": statistics.mean(p.comm_s for p in parts),
        "overlap_s": statistics.mean(p.overlap_s for p in parts),
        "measured_compute_s": statistics.mean(computing),
        "computing_s": [[p.compute_s, own] for p, own in zip(parts, computing, strict=True)],
        "predicted_bytes": [m.peak_bytes for m in timeline.memory], "measured_bytes": peaks,
        "memory": [vars_of(m) for m in timeline.memory],
    }


def vars_of(noun: Any) -> dict[str, Any]:
    return {name: getattr(noun, name) for name in noun.__struct_fields__}


# --- the cases ------------------------------------------------------------------------------


def run_case(model: str, world: int, network: str, rounds: int, names: list[str],
             out: Path) -> list[dict[str, Any]]:
    options = ["--rank-main", model, "--rounds", str(rounds), "--out", str(out),
               *(f"--plan={name}" for name in names)]
    start_ranks("accuracy", options, world, bits_per_s=NETWORKS[network])
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    for row in rows:
        row |= {"model": model, "world": world, "network": network,
                "accuracy": 1 - abs(row["predicted_s"] / row["measured_s"] - 1)}
    return rows


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default="gpt,llama,vit")
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rank-main", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--plan", action="append", default=[])
    return parser.parse_args()


def main() -> int:
    args = options()
    if args.rank_main:
        rank_main(args.rank_main, args.rounds, args.out, args.plan)
        return 0
    if args.quick:
        args.models, args.worlds, args.networks = "gpt", "2", "loopback"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for network in args.networks.split(","):
            for world in map(int, args.worlds.split(",")):
                for model in args.models.split(","):
                    names = [n for n in args.plan if n in PLANS[world]]
                    found = run_case(model, world, network, args.rounds, names,
                                     Path(folder) / "case.json")
                    rows += found
                    for row in found:
                        print(show(row), flush=True)
    text, good = figures(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
        draw(rows, args.json.with_suffix(".svg"))
    print(table(rows), text, sep="\n")
    return 0 if good else 1
