"""On three mixed pools, are plans faster than those of Sailor, by either simulator?

    python profiling pools                       both plans by both simulators
    python profiling pools --quick               on the smallest
    python profiling pools --planning FOLDER     other layer times and links of the same form
    python profiling pools --out FOLDER          write all plans, each in both forms

Both planners know the same seconds of layers, sizes and links. Sailor's plans are what its planner
gave; ours is the fastest by our own simulator. Exits with 0 only where ours is never slower by
Sailor's own formula, fits by it, and is found in less time than Sailor took.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

from autopar_torch.plan import Plan
from autopar_torch.search.explain import short
from autopar_torch.search.space import Constraints
from autopar_torch.search.unequal import search_unequal
from autopar_torch.simulate import simulate
from published import planning, sailor

NUM_ROWS = 1024
# What Sailor's planner does not choose: ZeRO, recompute, other schedules.
LIMITS = Constraints(zero=0, recompute=False, schedule="1f1b")
REPEATS = 3


class Judged(NamedTuple):
    """A plan by both simulators."""

    planner: str
    plan: Plan
    pipelines: sailor.Pipelines
    search_s: float
    sailor_s: float
    engine_s: float
    fits: bool


class Pool:
    """One of the pools, as our search sees it."""

    def __init__(self, data: planning.Data, devices: dict[str, int]) -> None:
        self.data, self.graph, self.options = data, planning.graph(data), planning.options(data)
        self.profile = planning.profile(data, devices)
        self.name = " + ".join(f"{count} {name}" for name, count in devices.items())

    @property
    def links(self) -> planning.Fitted:
        return planning.Fitted(self.profile, self.data)

    def ours(self) -> Judged:
        """Our plan, and the processor seconds of the quickest of several searches."""
        took = []
        for _ in range(REPEATS):
            start = time.process_time()
            found = search_unequal(self.graph, self.options, self.links, NUM_ROWS, LIMITS)
            took.append(time.process_time() - start)
        plan = found.best.plan
        pipelines = sailor.of_plan(plan, self.profile.cluster, NUM_ROWS)
        return self.judged("ours", plan, pipelines, min(took))

    def of_sailor(self, pipelines: sailor.Pipelines, search_s: float) -> Judged:
        plan = sailor.as_plan(pipelines, self.profile.cluster, NUM_ROWS, self.options)
        return self.judged("Sailor", plan, pipelines, search_s)

    def judged(self, planner: str, plan: Plan, pipelines: sailor.Pipelines,
               search_s: float) -> Judged:
        memory = {device.name: device.memory_bytes for device in self.profile.cluster.classes}
        peaks = sailor.peak_bytes(pipelines, self.data)
        step_s = simulate(plan, self.graph, self.links, NUM_ROWS).step_s
        return Judged(planner, plan, pipelines, search_s, sailor.seconds(pipelines, self.data),
                      step_s, all(size <= memory[name] for name, size in peaks.items()))


def main() -> int:
    args = arguments()
    data, holds, gains = planning.read(args.planning), True, list[float]()
    print("by Sailor's formula  by our engine  search  planner, plan")
    for row in list(sailor.own_plans(NUM_ROWS))[: 1 if args.quick else None]:
        pool = Pool(data, row["pool"])
        theirs, mine = pool.of_sailor(row["plan"], row["search_s"]), pool.ours()
        print(pool.name)
        for own in (theirs, mine):
            print(f"{1 / own.sailor_s:11.4f} steps/s {1 / own.engine_s:8.4f} steps/s"
                  f" {own.search_s:6.2f} s  {own.planner}, {short(own.plan)}", flush=True)
            if args.out:
                write(args.out, own, pool)
        holds &= mine.sailor_s <= theirs.sailor_s and mine.fits and mine.search_s < row["search_s"]
        gains.append(theirs.sailor_s / mine.sailor_s)
    print(f"{len(gains)} pools, by Sailor's formula {min(gains):.3f} to {max(gains):.3f} times as "
          "fast as its plans")
    return 0 if holds else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--planning", type=Path, default=planning.HERE, metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="the first pool only")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    return parser.parse_args()


def write(folder: Path, own: Judged, pool: Pool) -> None:
    """A plan in our form, with the profile that it is priced by, and in Sailor's."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{pool.name.replace(' ', '')}.{own.planner}"
    own.plan.save(folder / f"{name}.plan.json")
    pool.profile.save(folder / f"{pool.name.replace(' ', '')}.profile.json")
    text = json.dumps(own.pipelines.written(), indent=1)
    (folder / f"{name}.sailor.json").write_text(text + "\n", encoding="utf-8")
