"""How far is every model under every plan from one process, after three AdamW steps?

    python profiling numbers [--ranks 1,2,4,8] [--models gpt2,llama] [--json FILE]

Starts torchrun for each number of ranks; the ranks then run all models and plans of that size.
Ends with one line of figures; exits 0 only if every difference is within the tolerance (1e-5
relative, float32). `--quick` takes four models and 2 ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from pathlib import Path

from start import start_ranks


def run_rank(models: list[str], out: str) -> None:
    """One rank: every model under every plan for this many ranks, padded batches."""
    import logging

    import torch
    import torch.distributed as dist

    import oracle

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    rows = []
    with oracle.traced_once():
        for name, degrees in itertools.product(models, oracle.PLANS[size]):
            shown, worst = oracle.row(name, degrees, pad=True)
            rows.append([name, oracle.text(degrees), shown, worst])
            if rank == 0:
                print(f"{name:9s} {oracle.text(degrees):62s} {shown}", flush=True)
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(ranks: int, models: list[str]) -> list[list[object]]:
    """The rows of one number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "rows.json")
        try:
            start_ranks("numbers", ["--out", out, "--models", ",".join(models)], ranks)
        except SystemExit as ended:
            return [["all", f"{ranks} ranks", f"exit status {ended.code}", float("inf")]]
        return json.loads(Path(out).read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--models", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default="")
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import zoo

    models = options.models.split(",") if options.models else list(zoo.MODELS)
    if options.out:
        run_rank(models, options.out)
        return 0
    if options.quick:
        models, options.ranks = ["gpt2", "llama", "t5", "unet"], "2"
    rows = [row for n in options.ranks.split(",") for row in launch(int(n), models)]
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    worst = max(float(str(row[3])) for row in rows)
    skipped = sum("does not apply" in str(row[2]) for row in rows)
    bad = sum(float(str(row[3])) > 1e-5 for row in rows)
    print(f"{len(rows)} cases, {skipped} do not apply, {bad} above 1e-5, worst {worst:.1e}")
    return 1 if bad else 0
