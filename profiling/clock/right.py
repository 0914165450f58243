"""Is the recommended plan the fastest of all that fit, each of them run?

    python profiling right --quick          # one combination, half a dozen plans
    python profiling right --json FILE      # all of them

In each combination of model, batch, ranks and network `parallelize(model, confirm=8)` recommends,
then every candidate of the search that fits is stepped in turn. Who is far behind after some rounds
stops; the rest goes on, so the end is decided among the best. Regret: how much slower the
recommended plan's step is than the best one's, median of the rounds and 95 % of resampled ones.
With `--quick` only those are run whose predicted step is shortest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from clock.accuracy import NETWORKS, Side
from clock.scores import interval
from start import pin, start_ranks

CASES = [  # model, rows, ranks, network
    ("gpt", 8, 2, "loopback"), ("gpt", 8, 2, "200 Mbit/s"), ("llama", 4, 2, "1 Gbit/s"),
    ("vit", 8, 2, "200 Mbit/s"), ("gpt", 4, 4, "loopback"), ("llama", 4, 4, "1 Gbit/s"),
    ("vit", 4, 4, "200 Mbit/s"), ("gpt", 4, 4, "200 Mbit/s"),
]
CUTOFFS = ((2, 1.5), (6, 1.15), (14, 1.06), (40, 1.03), (120, 1.0))  # see `race`
LIMIT, FEW, ALL = 0.02, 6, 100_000


def feasible(traced: Any, known: Any, rows: int, most: int) -> list[Any]:
    """Candidates of the search that fit, each with its best borders; at most so many, the quickest
    by prediction."""
    from autopar_torch.profile import Lookup
    from autopar_torch.search.best import search

    result = search(traced.graph, known.options, Lookup(known.profile), rows, exhaustive=True,
                    kept=most)
    return [choice.plan for choice in result.choices]


def rank_main(model: str, rows: int, most: int, out: str) -> None:
    import torch.distributed as dist

    import autopar_torch as ap
    from autopar_torch import files
    from autopar_torch.find import choose
    from autopar_torch.find.confirm import race
    from autopar_torch.find.session import cluster_of
    from autopar_torch.search.explain import short
    from autopar_torch.search.space import Constraints
    from autopar_torch.trace.call import take_apart
    from models import MODELS

    pin()
    dist.init_process_group("gloo")
    os.environ["AUTOPAR_CACHE"] = str(Path(out).parent / "cache")
    make = MODELS[model]
    net, batch = make(rows=rows)
    chosen = ap.parallelize(net, batch, confirm=8)
    call, tensors = take_apart((), batch)
    traced = chosen.retrace(call, True, ("loss",))
    cluster = cluster_of(chosen.world, traced.graph)
    known = choose.recall(traced, call, tensors, {}, chosen.world, chosen.device, cluster,
                          Constraints())
    plans = feasible(traced, known, rows, most)
    plans = files.decode(chosen.world.agree(files.encode(plans)), list[ap.Plan])
    plans = [chosen.plan, *(plan for plan in plans if not same(plan, chosen.plan))]
    runners = [Side(partial(make, rows=rows), plan) for plan in plans]
    cutoffs = CUTOFFS[:3] if most == FEW else CUTOFFS
    rounds_s = race(runners, cutoffs, chosen.world, stays=(0,))
    if dist.get_rank() == 0:
        rows_out = [{"plan": short(runner.model.plan), "seconds": seconds}
                    for runner, seconds in zip(runners, rounds_s, strict=True)]
        Path(out).write_text(json.dumps(rows_out))
    dist.barrier()
    dist.destroy_process_group()


def same(one: Any, other: Any) -> bool:
    """Plans that differ in nothing that runs."""
    from msgspec.structs import replace

    return bool(replace(one, reason="") == replace(other, reason=""))


def regret(rows: list[dict[str, Any]]) -> tuple[list[float], dict[str, Any]]:
    """Of the first row against the best of those that ran as often, round by round.

    Who is best is decided in every other round and by how much in the rounds between: the quickest
    of several equal plans is so by luck, which does not last.
    """
    first = rows[0]
    last = [r for r in rows if len(r["seconds"]) == len(first["seconds"])]
    best = min(last, key=lambda r: statistics.median(ratios(r, first, 0)))
    return [ratio - 1 for ratio in ratios(first, best, 1)], best


def ratios(one: dict[str, Any], other: dict[str, Any], start: int) -> list[float]:
    """In every other round: a machine may be quick in one and slow in the next."""
    pairs = zip(one["seconds"][start::2], other["seconds"][start::2], strict=True)
    return [a / b for a, b in pairs]


def show(row: dict[str, Any], best: dict[str, Any]) -> str:
    def line(plan: dict[str, Any]) -> str:
        return f"{statistics.median(plan['seconds']) * 1e3:8.1f} ms  {plan['plan']}"

    low, high = row["interval"]
    return (f"{row['model']:6} {row['rows']} rows, {row['world']} ranks, {row['network']:10} "
            f"{row['num_plans']:4} plans, regret {row['regret']:+6.1%} [{low:+.1%}, {high:+.1%}]\n"
            f"    recommended {line(row['plans'][0])}\n    best        {line(best)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", type=int, action="append", default=[])
    parser.add_argument("--rank-main", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_main:
        model, rows, most, out = args.rank_main
        rank_main(model, int(rows), int(most), out)
        return 0
    most = str(FEW if args.quick else ALL)
    picked = [CASES[i] for i in args.case] or (CASES[:1] if args.quick else CASES)
    found = []
    for model, rows, world, network in picked:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            start_ranks("right", ["--rank-main", model, str(rows), most, str(out)], world,
                        bits_per_s=NETWORKS[network])
            measured = json.loads(out.read_text())
        slower, best = regret(measured)
        middle = statistics.median(slower)
        row = {"model": model, "rows": rows, "world": world, "network": network,
               "regret": middle, "interval": interval(slower, statistics.median),
               "num_plans": len(measured) - 1, "plans": measured}
        found.append(row)
        print(show(row, best), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found))
    worst = max(row["regret"] for row in found)
    mean = statistics.mean(row["regret"] for row in found)
    print(f"{len(found)} combinations, regret mean {mean:+.1%}, worst {worst:+.1%}")
    return 0 if worst <= LIMIT else 1
