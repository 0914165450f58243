"""Two nodes of H100 beside four of A100: who does what, and is it worth it?

    python examples/mixed_cluster.py
"""

from __future__ import annotations

from collections.abc import Sequence

import gpt

import autopar_torch as ap

CLUSTERS, ROWS = ("2x8xH100", "4x8xA100-80", "2x8xH100 + 4x8xA100-80"), 384


def main(argv: Sequence[str] | None = None) -> list[float]:
    model, inputs = gpt.small()
    steps = []
    for cluster in CLUSTERS:
        found = ap.plan(model, inputs, cluster, global_batch_size=ROWS, precision="bfloat16")
        steps.append(found.step_s)
        print(f"{cluster}: {found.step_s:.2f} s a step; a plan could be at most {found.gap:.1%} "
              f"faster\n  {found.plan.describe()}")
    return steps


if __name__ == "__main__":
    main()
