"""Training that outlives its ranks: when one dies, or a node goes or comes, all start again, find a
plan for those that are there, and go on from the newest checkpoint.

    autopar run --elastic 1:4 examples/elastic.py --folder out/run      # on each node

The data of a step follow from its number, so none is seen twice and none is left out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import autopar_torch as ap


class Net(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU())
                                    for _ in range(4)), nn.Linear(width, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), y)


def batch(step: int, rows: int = 32, width: int = 128) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    x = torch.randn(rows, width, generator=numbers)
    return x, x[:, :10].argmax(1)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, help="for checkpoints, the same on all nodes")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--plain", action="store_true", help="without the library")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = Net()
    if not options.plain:
        model = ap.parallelize(model, example_inputs=batch(0))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = None if options.plain else model.resume(options.folder, opt)
    losses = []
    for step in range(0 if done is None else done + 1, options.steps):
        loss = model(*batch(step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        if not options.plain:
            model.save(options.folder, opt, step=step, keep=2, background=True)
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step} loss {losses[-1]:.9f} ranks {os.environ.get('WORLD_SIZE', '1')}",
                  flush=True)
        time.sleep(options.pause)
    return losses


if __name__ == "__main__":
    main()
