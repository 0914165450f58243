"""Longer and longer sequences, the same number of tokens: what has to change to make them fit?

    python examples/long_sequences.py
"""

from __future__ import annotations

from collections.abc import Sequence

import gpt

import autopar_torch as ap
from autopar_torch.errors import SearchError

CLUSTER, TOKENS, LENGTHS = "2x8xH100", 2**19, (2048, 8192, 32768, 131072)


def main(argv: Sequence[str] | None = None) -> list[float]:
    steps = []
    for seq in LENGTHS:
        model, inputs = gpt.small(seq)
        try:
            found = ap.plan(model, inputs, CLUSTER, global_batch_size=TOKENS // seq,
                            precision="bfloat16")
        except SearchError as error:
            print(f"{seq:>6} tokens: {error}")
            continue
        steps.append(found.step_s)
        print(f"{seq:>6} tokens: {found.step_s:.2f} s a step, {found.memory_bytes / 2**30:.1f} GiB,"
              f" {found.plan.describe()}")
    return steps


if __name__ == "__main__":
    main()
