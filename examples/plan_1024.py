"""A laptop plans for 1,024 GPUs, and writes a page about the plan.

    python examples/plan_1024.py
    python examples/plan_1024.py --cluster 32x8xA100-80 --out report.html
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import gpt

import autopar_torch as ap


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cluster", default="128x8xH100")
    parser.add_argument("--out", help="file for the page")
    args = parser.parse_args(argv)
    model, inputs = gpt.large()
    found = ap.plan(model, inputs, args.cluster, global_batch_size=1024, precision="bfloat16")
    print(found.plan.describe())
    print(f"{found.step_s:.2f} s a step, {found.memory_bytes / 2**30:.1f} GiB per device; "
          f"{found.how_exact}")
    if args.out:
        ap.report(args.out, found, model, inputs, args.cluster, global_batch_size=1024,
                  constraints={"precision": "bfloat16"})
    return [found.step_s]


if __name__ == "__main__":
    main()
