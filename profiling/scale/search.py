"""How long does the search take, what does it find, and how does its time grow?

    python profiling search [--quick] [--json FILE]
    python profiling search --measured [--models gpt,llama,vit] [--worlds 2,4]

Models are traced on meta tensors, prices come from datasheets; the time of a search begins when
both are there and is processor time of one core, the best of several: until the fastest plan is
proven, which is what the targets are for, and with the seven that follow it. `first` is the very
first search of its kind in the process, with nothing remembered. Where looking at every candidate
can finish, its result stands beside. Ends with one line of figures; exits 0 only where the targets
hold and the results are equal.

With `--measured` ranks on this machine are measured for the small models of models.py, and on these
profiles the plans of the search are compared with those of looking at every candidate: with all
memory, and with too little for the plan that is best otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

import big_models as models
from autopar_torch import api
from autopar_torch.errors import SearchError
from autopar_torch.search.best import KEPT, Result, search
from autopar_torch.search.explain import short
from autopar_torch.search.reasons import Case
from autopar_torch.simulate.network import lookup
from models import MODELS

# model, cluster, rows of a step, seconds that the search may take, whether all can be looked at
PAIRS: list[tuple[str, str, int, float, bool]] = [
    ("llama_7b", "1x8xA100-80", 64, 0.0, True),
    ("llama_7b", "8x8xA100-80", 512, 0.010, False),
    ("llama_13b", "16x8xA100-80", 512, 0.0, False),
    ("llama_70b", "32x8xH100", 512, 0.0, False),
    ("gpt3_175b", "128x8xA100-80", 1536, 0.050, False),
    ("llama_405b", "2048x8xH100", 2048, 0.5, False),
]
PEERS = [  # published, or run on machines of this size; each on work and prices of its own
    ("Galvatron-2, 7B on 8", "122 sub-searches", 328.0),
    ("AutoParallel, 7B on (8,), solve only", "one mesh", 3.1),
    ("SimuMax grid, 7B on 8", "80 evaluations", 5.8),
    ("SimuMax grid, 70B on 256", "168 evaluations", 23.4),
    ("SimuMax grid, 175B on 4096", "203 evaluations", 28.8),
    ("Calculon, 13B on 8", "9,278 executions", 248.8),
    ("Aceso, 1.3B on 4", "its time budget", 172.9),
    ("Metis, 1.5B on 16", "362 plans", 2.6),
    ("Sailor, 350M on 128", "one pool", 0.14),
]

LESS = 1 / 1.03  # of the memory of the best plan, so that it does not fit


def case_of(model: str, cluster: str, rows: int, **options: Any) -> Case:
    made = getattr(models, model)(**options)
    return api.case(*made, cluster, global_batch_size=rows, precision="bfloat16")


def timed(case: Case, repeats: int, exhaustive: bool = False,
          kept: int = KEPT) -> tuple[Result, float, float]:
    """The result, the first and the best of the times."""
    seconds = []
    for _ in range(repeats):
        known = lookup(case.profile)
        start = time.process_time()
        found = search(case.graph, case.options, known, case.num_rows, case.limits,
                       exhaustive=exhaustive, kept=kept)
        seconds.append(time.process_time() - start)
    return found, seconds[0], min(seconds)


def race(pairs: list[tuple[str, str, int, float, bool]], repeats: int) -> list[dict[str, Any]]:
    rows = []
    print("model       cluster         rows  first ms  proven ms  target  with seven more  "
          "considered  priced  step ms  plan")
    for model, cluster, batch, target, small in pairs:
        case = case_of(model, cluster, batch)
        found, first, longer = timed(case, repeats)
        one, _, best = timed(case, repeats, kept=1)
        row = {"model": model, "cluster": cluster, "rows": batch, "first_s": first, "best_s": best,
               "with_others_s": longer, "same": one.best == found.best,
               "target_s": target, "considered": found.considered, "priced": found.priced,
               "discarded": found.discarded, "step_s": found.best.step_s,
               "plan": short(found.best.plan)}
        shown = f"{target * 1e3:6.0f}" if target else "     -"
        print(f"{model:10}  {cluster:13} {batch:6}  {first * 1e3:8.1f} {best * 1e3:10.1f}  {shown}"
              f"  {longer * 1e3:15.1f}  {found.considered:10}  {found.priced:6}"
              f"  {found.best.step_s * 1e3:7.0f}  {row['plan']}")
        if small:
            every, _, long = timed(case, 1, exhaustive=True)
            row["equal"] = every.choices == found.choices
            row["exhaustive_s"] = long
            print(f"{'':10}  every one of them: {long:.2f} s, {every.priced} priced, "
                  f"{'equal' if row['equal'] else 'OTHER'} results")
        rows.append(row)
    return rows


def shares(rows: list[dict[str, Any]]) -> None:
    """The part of the candidates of each race that each rule discards."""
    rules = sorted({rule for row in rows for rule in row["discarded"]})
    print("\n" + "discarded by".ljust(24) + "".join(f"{rule:>14}" for rule in [*rules, "none"]))
    for row in rows:
        parts = [row["discarded"].get(rule, 0) for rule in rules]
        parts.append(row["considered"] - sum(parts))
        print(f"{row['model']}@{row['cluster']}".ljust(24)
              + "".join(f"{part / row['considered']:14.2%}" for part in parts))


def growth(quick: bool) -> list[dict[str, Any]]:
    """One thing grows at a time."""
    found = []
    base = {"nodes": 8, "layers": 32, "rows": 512}
    grown = {"nodes": (1, 8, 64) if quick else (1, 4, 16, 64, 256),
             "layers": (16, 64) if quick else (16, 32, 64, 128),
             "rows": (64, 4096) if quick else (64, 512, 4096, 32768)}
    print("\na 7B with one thing grown:   value  considered  proven ms")
    for name, values in grown.items():
        for value in values:
            sizes = {**base, name: value}
            batch = max(sizes["rows"], 8 * sizes["nodes"])
            case = case_of("llama_7b", f"{sizes['nodes']}x8xA100-80", batch, layers=sizes["layers"])
            result, _, best = timed(case, 3, kept=1)
            found.append({"grown": name, "value": value, "best_s": best,
                          "considered": result.considered})
            print(f"{name:>24}  {value:8}  {result.considered:10}  {best * 1e3:7.1f}")
    return found


def peers(rows: list[dict[str, Any]]) -> None:
    print("\nothers, each on its own work and prices:            searched  seconds  a second")
    for name, work, seconds in PEERS:
        count = work.split()[0].replace(",", "")
        rate = f"{int(count) / seconds:8.1f}" if count.isdigit() else "       -"
        print(f"  {name:38} {work:>20}  {seconds:7.2f}  {rate}")
    for row in rows:
        work, rate = f"{row['considered']:,} candidates", row["considered"] / row["best_s"]
        name = f"here, {row['model']} on {row['cluster']}"
        print(f"  {name:38} {work:>20}  {row['best_s']:7.3f}  {rate:8.0f}")


# --- on profiles of this machine ------------------------------------------------------------------


def measured(names: list[str], worlds: list[int], seconds: float) -> bool:
    """Whether the search gives what brute force gives, on a profile of each model and world."""
    print("measured      world  memory MiB  considered  best-first   every one  step ms  plan")
    equal = True
    with tempfile.TemporaryDirectory() as folder:
        for world, name in itertools.product(worlds, names):
            equal &= compare(name, world, measure(name, world, seconds, Path(folder)))
    return equal


def measure(name: str, world: int, seconds: float, folder: Path) -> Case:
    """Ranks of this machine measure themselves for a model."""
    path = folder / f"{name}_{world}.json"
    source = Path(__file__).resolve().parents[1] / "models.py"
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(world)]
    command = [*torchrun, "-m", "autopar_torch", "measure", f"{source}:{name}",
               "--out", str(path), "--seconds", str(seconds)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, env=environment, check=True, timeout=600, stdout=subprocess.DEVNULL)
    return api.case(*MODELS[name](), str(path))


def compare(name: str, world: int, case: Case) -> bool:
    """With all memory, then with ever less than the best plan needs, as long as a plan fits."""
    equal, room = True, 0
    for _ in range(3):
        tight = msgspec.structs.replace(case.limits, memory_bytes=room or None)
        case = dataclasses.replace(case, limits=tight)
        try:
            every, _, long = timed(case, 1, exhaustive=True)
        except SearchError:
            break
        found, _, quick = timed(case, 1)
        same = every.choices == found.choices
        equal = equal and same
        memory = f"{room / 2**20:.1f}" if room else "all"
        print(f"{name:12} {world:6} {memory:>11} {found.considered:11} {found.priced:5} "
              f"{quick:5.3f}s {every.priced:5} {long:5.2f}s {found.best.step_s * 1e3:8.2f}  "
              f"{short(found.best.plan)}{'' if same else '  OTHER: ' + short(every.best.plan)}",
              flush=True)
        room = int(every.best.memory_bytes * LESS)
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--json", default="")
    parser.add_argument("--measured", action="store_true", help="on profiles of this machine")
    parser.add_argument("--models", default="gpt,llama,vit")
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a profile may take")
    options = parser.parse_args()
    if options.measured:
        worlds = [int(world) for world in options.worlds.split(",")]
        equal = measured(options.models.split(","), worlds, options.seconds)
        print("all results equal" if equal else "OTHER results")
        return 0 if equal else 1
    rows = race(PAIRS, 5 if options.quick else 15)
    shares(rows)
    grown = growth(options.quick)
    peers(rows)
    if options.json:
        Path(options.json).write_text(json.dumps({"race": rows, "growth": grown}, indent=1))
    late = [row for row in rows if row["target_s"] and row["best_s"] > row["target_s"]]
    other = [row for row in rows if not (row["same"] and row.get("equal", True))]
    figures = " ".join(f"{row['model']}@{row['cluster']} {row['best_s'] * 1e3:.1f} ms"
                       for row in rows)
    print(f"\n{figures}; late {len(late)}, other results {len(other)}")
    return 1 if late or other else 0
