"""Pin a part of a plan: what does each wish cost?

    python examples/constraints.py

In training it is the same dict: `ap.parallelize(model, constraints={"zero": 3})`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gpt

import autopar_torch as ap

CLUSTER, ROWS = "2x8xA100-80", 128
WISHES: list[dict[str, Any]] = [{}, {"tp": 1}, {"tp": 8}, {"pp": 1}, {"zero": 3},
                                {"recompute": True}, {"schedule": "gpipe"},
                                {"memory_bytes": 40 * 2**30}]


def main(argv: Sequence[str] | None = None) -> list[float]:
    model, inputs = gpt.small()
    steps: list[float] = []
    for wish in WISHES:
        found = ap.plan(model, inputs, CLUSTER, global_batch_size=ROWS, precision="bfloat16",
                        constraints={"precision": "bfloat16", **wish})
        steps.append(found.step_s)
        print(f"{wish or 'free'!s:>28}  {found.step_s * 1e3:8.1f} ms "
              f"({found.step_s / steps[0] - 1:+.1%})  {found.memory_bytes / 2**30:5.1f} GiB  "
              f"{found.plan.describe().split(' (')[0]}")
    return steps


if __name__ == "__main__":
    main()
