"""How long does a large plan take to simulate, and how many a second to search?

    python profiling speed [--quick] [--json FILE]

The full timeline of GPT-3 175B on 1,024 devices (tensor 8, pipeline 16, data 8, 128 micro-batches),
and the search for the fastest plan of the same model there, by the closed formula and its bounds.
Processor time of one core, the median of several; tracing and pricing of blocks come before. Ends
with one line of figures; exits 0 only where the targets hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import autopar_torch as ap
from autopar_torch import api
from autopar_torch.find.offline import profile_for
from autopar_torch.search.space import Constraints
from autopar_torch.simulate import simulate
from big_models import gpt3_175b
from scale.search import case_of, timed

CLUSTER, MICRO_BATCHES, ROWS = "128x8xA100-80", 128, 1536
TIMELINE_S, PLANS_PER_S = 0.5, 100_000


def timeline_s(repeats: int) -> list[float]:
    """Of one replica's micro-batches, each of one row."""
    traced, _ = api._traced(*gpt3_175b(), None, Constraints(precision="bfloat16"), None, 0)
    plan = ap.Plan.uniform(tp=8, pp=16, dp=8, num_micro_batches=MICRO_BATCHES, precision="bfloat16")
    num_rows = MICRO_BATCHES * 8
    whole, profile = profile_for(plan, traced, num_rows, CLUSTER)
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        timeline = simulate(whole, traced.graph, profile, num_rows)
        seconds.append(time.process_time() - start)
    print(
        f"{len(timeline.ranks)} ranks, {len(timeline.spans)} spans that tell of them all: a step "
        f"of {timeline.step_s:.2f} s, {timeline.memory[0].peak_bytes / 2**30:.1f} GiB"
    )
    return seconds


def plans_per_s(repeats: int) -> float:
    found, _, best_s = timed(case_of("gpt3_175b", CLUSTER, ROWS), repeats, kept=1)
    print(f"{found.considered} plans considered in {best_s * 1e3:.1f} ms")
    return found.considered / best_s


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    repeats = 3 if options.quick else 9
    seconds, rate = timeline_s(repeats), plans_per_s(repeats)
    middle = statistics.median(seconds)
    if options.json:
        options.json.write_text(json.dumps({"timeline_s": seconds, "plans_per_s": rate}))
    print(
        f"timeline {middle:.2f} s (target {TIMELINE_S}), first {seconds[0]:.2f} s; "
        f"{rate:,.0f} plans a second (target {PLANS_PER_S:,})"
    )
    return 0 if middle < TIMELINE_S and rate >= PLANS_PER_S else 1
