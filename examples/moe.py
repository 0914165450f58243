"""Train a small mixture of experts. Routing and experts are plain torch; nothing says how to split.

    python examples/moe.py
    torchrun --standalone --nproc-per-node 2 examples/moe.py

Both print the same losses.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import autopar_torch as ap

WIDTH, HIDDEN, EXPERTS, ROWS = 32, 64, 4, 16


class Experts(nn.Module):
    """Every row goes to the two experts that its router prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
        parts = torch.zeros_like(self.router(x)).scatter(-1, chosen, weights)
        hidden = torch.relu(torch.einsum("rw,ewh->erh", x, self.up))
        return x + torch.einsum("erh,ehw,re->rw", hidden, self.down, parts)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Experts(), Experts(), nn.Linear(WIDTH, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), y)


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plain", action="store_true", help="without the library")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model: nn.Module = Net()
    model = model if args.plain else ap.parallelize(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(args.steps):
        source = torch.Generator().manual_seed(step % 2)
        x = torch.randn(ROWS, WIDTH, generator=source)
        loss = model(x=x, y=x[:, :8].argmax(-1))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
        if os.environ.get("RANK", "0") == "0":
            print(f"{step:3} {losses[-1]:.6f}")
    return losses


if __name__ == "__main__":
    main()
