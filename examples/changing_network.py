"""Follow a network that changes: what does it cost to stay, and when is another plan worth a move?

    python examples/changing_network.py

The link of a node drops to a tenth for two hours of a day. Nothing is run: it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import gpt

import autopar_torch as ap
from autopar_torch.history import History, Incident
from autopar_torch.search.replay import table

HOUR = 3600.0
DAY = History(num_nodes=4, devices_per_node=8, end_s=24 * HOUR, events=(
    Incident(6 * HOUR, 2, "link", 0.1), Incident(8 * HOUR, 2, "link", 1.0),
    Incident(15 * HOUR, 1, "lost"), Incident(16 * HOUR, 1, "back")))


def main(argv: Sequence[str] | None = None) -> list[float]:
    model, inputs = gpt.small()
    found = ap.simulate(None, model, inputs, "4x8xA100-80", changes=DAY, global_batch_size=256,
                        precision="bfloat16")
    print("\n".join(table(found.outcomes)))
    return [outcome.share for outcome in found.outcomes]


if __name__ == "__main__":
    main()
