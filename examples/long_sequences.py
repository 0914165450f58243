"""Longer and longer sequences, the same number of tokens: what has to change to make them fit?

    python examples/long_sequences.py

At last a single sequence on eight devices, in a model whose heads eight devices cannot share.
"""

from __future__ import annotations

from collections.abc import Sequence

import gpt

import autopar_torch as ap
from autopar_torch.errors import SearchError

CLUSTER, TOKENS, LENGTHS = "2x8xH100", 2**19, (2048, 8192, 32768, 131072)


def attention(plan: ap.Plan) -> str:
    """How the attention of the layers is split."""
    texts = " ".join(text for sharding in plan.shardings for op, text in sharding.ops.items()
                     if op.startswith("scaled_dot_product"))
    ways = {"S2": "along the sequence", "S1": "by heads"}
    return " and ".join(way for cut, way in ways.items() if cut in texts) or "not split"


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
              f" {found.plan.describe()}; attention {attention(found.plan)}")
    model, inputs = gpt.made(28, 3584, 28, LENGTHS[-1])
    for rings in ("free", "never"):
        found = ap.plan(model, inputs, "8xH100", global_batch_size=1, precision="bfloat16",
                        constraints={"rings": rings})
        print(f"28 heads, rings {rings!r}: {found.step_s:.2f} s a step, "
              f"{found.memory_bytes / 2**30:.1f} GiB, {found.plan.describe()}; "
              f"attention {attention(found.plan)}")
    return steps


if __name__ == "__main__":
    main()
