"""How long the search takes, what it finds, and how it grows.

    python profiling/search_race.py [--quick] [--json FILE]

Models are traced on meta tensors, prices come from datasheets; the time of a search begins when
both are there and is processor time of one core, the best of several. `first` is the very first
search of its kind in the process, with nothing remembered. Where looking at every candidate can
finish, its result stands beside. Ends with one line of figures; exits 0 only where the targets
hold and the results are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import big_models as models

from autopar_torch import api
from autopar_torch.search.best import Result, search
from autopar_torch.search.explain import short
from autopar_torch.search.why import Case
from autopar_torch.simulate.network import lookup

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


def case_of(model: str, cluster: str, rows: int, **options: Any) -> Case:
    made = getattr(models, model)(**options)
    return api.case(*made, cluster, global_batch_size=rows, precision="bfloat16")


def timed(case: Case, repeats: int, exhaustive: bool = False) -> tuple[Result, float, float]:
    """The result, the first and the best of the times."""
    seconds = []
    for _ in range(repeats):
        known = lookup(case.profile)
        start = time.process_time()
        found = search(case.graph, case.options, known, case.num_rows, case.limits,
                       exhaustive=exhaustive)  # fmt: skip
        seconds.append(time.process_time() - start)
    return found, seconds[0], min(seconds)


def race(pairs: list[tuple[str, str, int, float, bool]], repeats: int) -> list[dict[str, Any]]:
    rows = []
    print("model       cluster         rows  first ms  best ms  target  considered  priced  step ms"
          "  plan")  # fmt: skip
    for model, cluster, batch, target, small in pairs:
        case = case_of(model, cluster, batch)
        found, first, best = timed(case, repeats)
        row = {"model": model, "cluster": cluster, "rows": batch, "first_s": first, "best_s": best,
               "target_s": target, "considered": found.considered, "priced": found.priced,
               "discarded": found.discarded, "step_s": found.best.step_s,
               "plan": short(found.best.plan)}  # fmt: skip
        shown = f"{target * 1e3:6.0f}" if target else "     -"
        print(f"{model:10}  {cluster:13} {batch:6}  {first * 1e3:8.1f} {best * 1e3:8.1f}  {shown}"
              f"  {found.considered:10}  {found.priced:6}  {found.best.step_s * 1e3:7.0f}"
              f"  {row['plan']}")  # fmt: skip
        if small:
            every, _, long = timed(case, 1, exhaustive=True)
            row["equal"] = (every.best, every.runners_up) == (found.best, found.runners_up)
            row["exhaustive_s"] = long
            print(f"{'':10}  every one of them: {long:.2f} s, {every.priced} priced, "
                  f"{'equal' if row['equal'] else 'OTHER'} results")  # fmt: skip
        rows.append(row)
    return rows


def shares(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The part of all candidates that each rule discards."""
    total = sum(row["considered"] for row in rows)
    rules = sorted({rule for row in rows for rule in row["discarded"]})
    return {rule: sum(row["discarded"].get(rule, 0) for row in rows) / total for rule in rules}


def growth(quick: bool) -> list[dict[str, Any]]:
    """One thing grows at a time."""
    found = []
    base = {"nodes": 8, "layers": 32, "rows": 512}
    grown = {"nodes": (1, 8, 64) if quick else (1, 4, 16, 64, 256),
             "layers": (16, 64) if quick else (16, 32, 64, 128),
             "rows": (64, 4096) if quick else (64, 512, 4096, 32768)}  # fmt: skip
    print("\na 7B with one thing grown:   value  considered  best ms")
    for name, values in grown.items():
        for value in values:
            sizes = {**base, name: value}
            batch = max(sizes["rows"], 8 * sizes["nodes"])
            case = case_of("llama_7b", f"{sizes['nodes']}x8xA100-80", batch, layers=sizes["layers"])
            result, _, best = timed(case, 3)
            found.append({"grown": name, "value": value, "best_s": best,
                          "considered": result.considered})  # fmt: skip
            print(f"{name:>24}  {value:8}  {result.considered:10}  {best * 1e3:7.1f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    rows = race(PAIRS, 5 if options.quick else 15)
    print("\ndiscarded: " + ", ".join(f"{n} {v:.1%}" for n, v in shares(rows).items()))
    grown = growth(options.quick)
    print("\nothers, each on its own work and prices:            searched  seconds")
    for name, work, seconds in PEERS:
        print(f"  {name:38} {work:>20}  {seconds:7.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps({"race": rows, "growth": grown}, indent=1))
    late = [row for row in rows if row["target_s"] and row["best_s"] > row["target_s"]]
    other = [row for row in rows if not row.get("equal", True)]
    figures = " ".join(f"{row['model']}@{row['cluster']} {row['best_s'] * 1e3:.1f} ms"
                       for row in rows)  # fmt: skip
    print(f"\n{figures}; late {len(late)}, other results {len(other)}")
    return 1 if late or other else 0


if __name__ == "__main__":
    sys.exit(main())
