"""The plan that `parallelize` finds by itself, beside the usual choices built by hand from torch.

    python profiling/usual.py --quick      # one case, about a minute
    python profiling/usual.py --json FILE  # 2 ranks: plain loopback, 1 Gbit/s and 200 Mbit/s

DDP, `fully_shard`, pure tensor and pure pipeline parallelism step in turn with ours on 2 ranks, in
processes of their own (see bench_native.py); ratios are medians of paired rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "profiling"), str(ROOT)]

from accuracy import NETWORKS, launch  # noqa: E402

USUAL = {"tp2": "pure tensor", "pp2": "pure pipeline", "dp2": "DDP", "zero3": "fully_shard"}
SMALL = {"layers": 4, "width": 128, "heads": 4, "vocab": 512, "seq": 64, "batch": 8}
SIZES = {
    "small": SMALL,
    "wide": SMALL | {"width": 256, "heads": 8, "vocab": 1024, "seq": 128},
    "deep": SMALL | {"layers": 12, "batch": 16},
}


def rank_main(sizes_name: str, rounds: int, out: str) -> None:
    import bench_native as bench
    import torch
    import torch.distributed as dist
    from apart import Twin

    import autopar_torch as ap
    from autopar_torch.search.explain import short

    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    os.environ["AUTOPAR_CACHE"] = str(Path(out).parent / "cache")
    sizes = bench.Sizes(**SIZES[sizes_name])
    own = bench.Ours(sizes, ap.parallelize(bench.seeded_model(sizes), confirm=5))
    bench.alive["ours"] = own
    with Twin() as beside:
        for case in USUAL:
            beside(partial(bench.build, case, "native", case, sizes))
        places = {"ours": bench.here} | dict.fromkeys(USUAL, beside)
        times = bench.in_turn(places, rounds)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"plan": short(own.model.plan), "ms": times}))
    dist.barrier()
    dist.destroy_process_group()


def show(case: dict[str, Any]) -> str:
    ours = case["ms"]["ours"]
    head = f"{case['sizes']:6} {case['network']:10} {case['plan']}"
    lines = [f"{head}: {statistics.median(ours):.1f} ms"]
    for name, label in USUAL.items():
        ratio = statistics.median(b / a for a, b in zip(ours, case["ms"][name], strict=True))
        lines.append(f"    {label:14} {statistics.median(case['ms'][name]):8.1f} ms  x{ratio:.2f}")
    return "\n".join(lines)


def speedup(case: dict[str, Any]) -> float:
    """Of ours over the best usual choice, paired."""
    ours = case["ms"]["ours"]
    return min(statistics.median(b / a for a, b in zip(ours, case["ms"][name], strict=True))
               for name in USUAL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--rank-main", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_main:
        rank_main(args.rank_main[0], int(args.rank_main[1]), args.rank_main[2])
        return 0
    found = []
    cases = [(s, n) for n in NETWORKS for s in SIZES]
    for sizes, network in cases[:1] if args.quick else cases:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "case.json"
            command = [sys.executable, __file__, "--rank-main", sizes, str(args.rounds), str(out)]
            launch(command, 2, NETWORKS[network])
            found.append(json.loads(out.read_text()) | {"sizes": sizes, "network": network})
        print(show(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found))
    gains = [speedup(case) for case in found]
    print(f"{len(found)} cases, against the best usual choice: worst x{min(gains):.2f}, "
          f"mean x{statistics.mean(gains):.2f}")
    return 0 if min(gains) >= 0.98 else 1


if __name__ == "__main__":
    sys.exit(main())
