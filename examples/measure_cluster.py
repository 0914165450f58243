"""Measure the machines that you have, once, and plan for them anywhere.

    torchrun --standalone --nproc-per-node 2 examples/measure_cluster.py --out known.json
    python examples/measure_cluster.py --known known.json
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from torch import nn

import autopar_torch as ap
from autopar_torch import files

WIDTH, ROWS = 128, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
                                      for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--out", help="file for what is measured")
    how.add_argument("--known", help="file of what was measured")
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args(argv)
    model, inputs = Net(), {"x": torch.zeros(ROWS, WIDTH)}
    if args.out:
        known = ap.measure(model, inputs, seconds=args.seconds)
        if os.environ.get("RANK", "0") == "0":
            files.save(known, args.out)
        return [float(len(known.profile.cells))]
    found = ap.plan(model, inputs, args.known, global_batch_size=ROWS)
    print(f"{found.step_s * 1e3:.2f} ms: {found.plan.describe()}")
    return [found.step_s]


if __name__ == "__main__":
    main()
