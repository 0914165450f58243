"""Is the plan that is found faster than the usual ones, built by hand from torch?

    python profiling usual --quick      # one case
    python profiling usual --json FILE  # 2 ranks: plain loopback, 1 Gbit/s and 200 Mbit/s

DDP, `fully_shard`, pure tensor and pure pipeline parallelism step in turn with ours on 2 ranks, in
processes of their own (see native.py); ratios are medians of paired rounds.
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

from clock.accuracy import NETWORKS
from start import pin, start_ranks

USUAL = {"tp2": "pure tensor", "pp2": "pure pipeline", "dp2": "DDP", "zero3": "fully_shard"}
SMALL = {"layers": 4, "width": 128, "heads": 4, "vocab": 512, "seq": 64, "batch": 8}
SIZES = {
    "small": SMALL,
    "wide": SMALL | {"width": 256, "heads": 8, "vocab": 1024, "seq": 128},
    "deep": SMALL | {"layers": 12, "batch": 16},
}


def rank_main(sizes_name: str, rounds: int, out: str) -> None:
    import torch.distributed as dist

    import autopar_torch as ap
    from autopar_torch.search.explain import short
    from clock import native
    from clock.twin import Twin

    pin()
    dist.init_process_group("gloo")
    os.environ["AUTOPAR_CACHE"] = str(Path(out).parent / "cache")
    sizes = native.Sizes(**SIZES[sizes_name])
    own = native.Ours(sizes, ap.parallelize(native.seeded_model(sizes), confirm=5))
    native.alive["ours"] = own
    with Twin() as beside:
        for case in USUAL:
            beside(partial(native.build, case, "native", case, sizes))
        places = {"ours": native.here} | dict.fromkeys(USUAL, beside)
        times = native.in_turn(places, rounds)
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
            start_ranks("usual", ["--rank-main", sizes, str(args.rounds), str(out)], 2,
                        bits_per_s=NETWORKS[network])
            found.append(json.loads(out.read_text()) | {"sizes": sizes, "network": network})
        print(show(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found))
    gains = [speedup(case) for case in found]
    print(f"{len(found)} cases, against the best usual choice: worst x{min(gains):.2f}, "
          f"mean x{statistics.mean(gains):.2f}")
    return 0 if min(gains) >= 0.98 else 1
