"""How far are predictions from the clock on unequal machines, and plans from the best?

    python profiling unequal --case half --quick     # two emulated nodes, CPU 1 : 0.5
    python profiling unequal --case three            # three, 1 : 0.7 : 0.4
    python profiling unequal --case "half 1 Gbit/s" --json FILE

Plans written by hand are predicted from what was measured of their parts and stepped in turn, as in
`accuracy`. Two plans are compared by what one takes beside the other, predicted and measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clock.accuracy import Side, stepped
from clock.scores import memory_errors
from start import pin, start_on

if TYPE_CHECKING:
    from autopar_torch.plan import Plan, Replica
    from netlab import Node

# A quota hands out time in bursts: a rank that waited is quick for some milliseconds. So what a
# stage does at once takes many times as long.
LAYERS, WIDTH, ROWS = 8, 192, 24  # of the model; rows of a batch
MEDIAN, WORST, RATIO = 0.08, 0.20, 0.10  # most that a prediction may be off
ROUNDS, QUICK_ROUNDS = 10, 3
CHOSEN = "chosen"  # by `parallelize` alone
EVEN = {"pp 4|4", "tp 2", "dp 1:1", "dp 4+4 micro-batches", "pp 3|3|2", "dp 1:1:1",
        "dp 4+4+4 micro-batches"}
BEHIND = 0.05  # the chosen plan beside the best one
AHEAD = {2: 1.3, 3: 1.4}  # times that it is faster than the best even one, by number of nodes


class Case(NamedTuple):
    """Nodes of one rank each, as parts of a core; together they leave some of it to the system."""

    shares: tuple[float, ...]
    cores: tuple[int, ...]
    plans: Callable[[], dict[str, Plan]]
    rate_mbps: float | None = None

    def nodes(self) -> list[Node]:
        from netlab import Node

        there = sorted(os.sched_getaffinity(0))
        return [Node(name=f"n{i}", cores=(there[core % len(there)],), cpu_share=share,
                     rate_mbps=self.rate_mbps)
                for i, (share, core) in enumerate(zip(self.shares, self.cores, strict=True))]


# --- plans ----------------------------------------------------------------------------------


def pipe(layers: Sequence[int], ranks: Sequence[int], micro_batches: int = 1,
         rows: int | None = None) -> Replica:
    """A replica of stages with so many layers; embedding and head go with the outer ones."""
    from autopar_torch.plan import Replica, Stage

    ends = [1 + sum(layers[: k + 1]) + (k + 1 == len(layers)) for k in range(len(layers))]
    stages = (Stage((rank,), span)
              for rank, span in zip(ranks, zip([0, *ends], ends, strict=False), strict=True))
    return Replica(tuple(stages), micro_batches, rows)


def shared(rows: Sequence[int], micro_batches: int = 1, **options: Any) -> Plan:
    """Data parallelism by rows, in step."""
    return plan([pipe([LAYERS], [r], micro_batches, own) for r, own in enumerate(rows)], **options)


def counted(micro_batches: Sequence[int]) -> Plan:
    """Data parallelism by numbers of equal micro-batches."""
    return plan([pipe([LAYERS], [r], count) for r, count in enumerate(micro_batches)])


def plan(replicas: Sequence[Replica], **options: Any) -> Plan:
    from autopar_torch.plan import Plan

    return Plan(tuple(replicas), **options)


def for_two() -> dict[str, Plan]:
    from autopar_torch.plan import Plan

    found = {f"pp {a}|{LAYERS - a}": plan([pipe([a, LAYERS - a], [0, 1], 6)]) for a in (4, 5, 6, 7)}
    return found | {
        "pp 2|6, the slow one first": plan([pipe([2, 6], [1, 0], 6)]),
        "pp 6|2 zero-bubble": plan([pipe([6, 2], [0, 1], 6)], schedule="zero_bubble"),
        "pp 5|3 gpipe": plan([pipe([5, 3], [0, 1], 4)], schedule="gpipe"),
        "tp 2": Plan.uniform(tp=2),
        "dp 1:1": shared((1, 1)), "dp 2:1": shared((2, 1)), "dp 3:1": shared((3, 1)),
        "dp 2:1 in twos": shared((2, 1), 2), "dp 2:1 zero 2": shared((2, 1), 2, zero=2),
        "dp 4+4 micro-batches": counted((4, 4)), "dp 4+2 micro-batches": counted((4, 2)),
        "dp 6+2 micro-batches": counted((6, 2)),
    }


def for_three() -> dict[str, Plan]:
    found = {f"pp {a}|{b}|{c}": plan([pipe([a, b, c], [0, 1, 2], 6)])
             for a, b, c in ((3, 3, 2), (4, 3, 1), (4, 2, 2), (5, 2, 1))}
    return found | {
        "dp 1:1:1": shared((1, 1, 1)), "dp 5:3:2": shared((5, 3, 2)), "dp 2:1:1": shared((2, 1, 1)),
        "dp 5:3:2 in twos": shared((5, 3, 2), 2), "dp 5:3:2 zero 1": shared((5, 3, 2), zero=1),
        "dp 4+4+4 micro-batches": counted((4, 4, 4)), "dp 6+4+2 micro-batches": counted((6, 4, 2)),
        "1 + pp 5|3": plan([pipe([8], [0], 4, 1), pipe([5, 3], [1, 2], 4, 1)]),
        "pp 5|3 + 1": plan([pipe([5, 3], [0, 1], 4, 4), pipe([8], [2], 4, 1)]),
        "1 + pp 5|3 by micro-batches": plan([pipe([8], [0], 4), pipe([5, 3], [1, 2], 4)]),
    }


HALF = Case((1.0, 0.5), (0, 1), for_two)
THREE = Case((0.7, 0.49, 0.28), (0, 1, 1), for_three)  # 1 : 0.7 : 0.4
CASES = {"half": HALF, "three": THREE, "half 1 Gbit/s": HALF._replace(rate_mbps=1000),
         "three 1 Gbit/s": THREE._replace(rate_mbps=1000)}


# --- running them ---------------------------------------------------------------------------


def rank_main(case: str, rounds: int, out: str, names: Sequence[str]) -> None:
    import torch.distributed as dist

    import autopar_torch as ap
    from models import gpt

    pin()
    dist.init_process_group("gloo")
    make = partial(gpt, WIDTH, LAYERS, ROWS)
    plans = {n: p for n, p in CASES[case].plans().items() if not names or n in names}
    if not names or CHOSEN in names:
        model, batch = make()
        plans[CHOSEN] = ap.parallelize(model, batch).plan
        if dist.get_rank() == 0:
            print(f"chosen: {plans[CHOSEN].describe(dist.get_world_size())}", flush=True)
    stepped({name: Side(make, own) for name, own in plans.items()}, rounds, out)


def error(row: dict[str, Any]) -> float:
    return float(row["predicted_s"] / row["measured_s"] - 1)


def chosen_against(rows: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    """How the plan that was found does beside all plans by hand, and beside the even ones."""
    seconds = {row["plan"]: row["measured_s"] for row in rows}
    chosen = seconds.pop(CHOSEN, None)
    even = [s for name, s in seconds.items() if name in EVEN]
    if chosen is None or not even:
        return "", True
    best = min(seconds, key=lambda name: seconds[name])
    behind, ahead = chosen / seconds[best] - 1, min(even) / chosen
    text = f"; chosen {behind:+.1%} beside the best ({best}), {ahead:.2f}x faster than even"
    return text, behind <= BEHIND and ahead >= AHEAD[len(rows[0]["computing_s"])]


def ratio_errors(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Of every pair of plans: how far the predicted ratio is from the measured one."""
    factors = [1 + error(row) for row in rows]
    return [max(a / b, b / a) - 1 for a, b in combinations(factors, 2)]


def show(row: dict[str, Any]) -> str:
    ranks = "  ".join(f"{predicted * 1e3:.0f}/{measured * 1e3:.0f}"
                      for predicted, measured in row["computing_s"])
    return (f"{row['plan']:30} predicted {row['predicted_s'] * 1e3:7.1f} ms  measured "
            f"{row['measured_s'] * 1e3:7.1f}  error {error(row):+6.1%}  noise {row['noise']:5.1%}  "
            f"computing {ranks}  memory error {max(memory_errors(row)):5.1%}")


def figures(case: str, rows: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    """One line, and whether the targets hold."""
    errors, ratios = [abs(error(row)) for row in rows], ratio_errors(rows) or [0.0]
    middle, worst = statistics.median(errors), max(errors)
    text = (f"{case}: {len(rows)} plans, error median {middle:.1%}, worst {worst:.1%}; ratio of "
            f"two plans off by {statistics.median(ratios):.1%} (median), {max(ratios):.1%} (worst),"
            f" {sum(r <= RATIO for r in ratios)} of {len(ratios)} within {RATIO:.0%}; noise "
            f"{statistics.median(row['noise'] for row in rows):.1%}")
    more, good = chosen_against(rows)
    return text + more, good and middle <= MEDIAN and worst <= WORST and max(ratios) <= RATIO


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", action="append", choices=CASES, default=[])
    parser.add_argument("--plan", action="append", default=[], help="only these")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-main", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_main:
        case, rounds, out = args.rank_main
        rank_main(case, int(rounds), out, args.plan)
        return 0
    found, good = {}, True
    for case in args.case or list(CASES):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            rounds = QUICK_ROUNDS if args.quick else ROUNDS
            start_on(CASES[case].nodes(), "unequal",
                     ["--rank-main", case, str(rounds), str(out),
                      *(f"--plan={name}" for name in args.plan)])
            rows = found[case] = json.loads(out.read_text())
            if args.json:
                profile = out.with_suffix(".profile.json").read_bytes()
                args.json.with_suffix(f".{case.split('/')[0]}.profile.json").write_bytes(profile)
        print(*map(show, rows), sep="\n")
        text, held = figures(case, rows)
        print(text, flush=True)
        good = good and held
    if args.json:
        args.json.write_text(json.dumps(found))
    return 0 if good else 1
