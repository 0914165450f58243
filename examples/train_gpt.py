"""Train a small GPT, written in plain torch, on however many processes there are.

    python examples/train_gpt.py
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --tp 2 --pp 2

Both print the same losses. With several processes rank 0 also trains an untouched copy beside it
and the exit status is 1 if the two part (--no-check leaves the copy out).
"""

from __future__ import annotations

import argparse
import copy
import logging
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap

VOCAB, SEQ, WIDTH, HEADS, LAYERS = 64, 32, 64, 4, 4
STEPS, ROWS, LEARNING_RATE = 20, 16, 3e-3
TOLERANCE = 1e-5  # float32: other sums in another order


class Layer(nn.Module):
    """Causal self-attention, then a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, width = x.shape
        h = self.norm_1(x)
        q, k, v = (
            part(h).view(rows, seq, HEADS, width // HEADS).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(rows, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Token ids and the ids that follow them -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))


def global_batch(step: int) -> dict[str, Tensor]:
    """Counting with a random start and stride; the same on every rank, because the seed is."""
    source = torch.Generator().manual_seed(step)
    start = torch.randint(VOCAB, (ROWS, 1), generator=source)
    stride = torch.randint(1, 4, (ROWS, 1), generator=source)
    tokens = (start + stride * torch.arange(SEQ + 1)) % VOCAB
    return {"ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def plan_of(args: argparse.Namespace, world_size: int) -> ap.Plan | None:
    """What the flags say, the rest goes to replicas; without flags the fastest plan is searched."""
    if args.tp is None and args.pp is None and args.dp is None:
        return None
    tp, pp = args.tp or 1, args.pp or 1
    dp = args.dp or max(1, world_size // (tp * pp))
    num_micro_batches = args.micro_batches or (2 * pp if pp > 1 else 1)
    return ap.Plan.uniform(
        tp=tp, pp=pp, dp=dp, num_micro_batches=num_micro_batches, schedule=args.schedule,
        zero=args.zero,
    )


def reference_step(model: nn.Module, opt: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    """The same step, in one process, without the library."""
    loss = model(**batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.item()


def train(args: argparse.Namespace) -> float:
    """Largest relative difference to the untouched copy, 0 where there is none."""
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    original = GPT()
    check = rank == 0 and (world_size > 1 if args.check is None else args.check)
    reference = copy.deepcopy(original)
    reference_opt = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE)

    model = ap.parallelize(original, global_batch(0), plan=plan_of(args, world_size))
    opt = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    if rank == 0:
        print(model.plan.describe())
        print("step      loss" + ("   one process" if check else ""))
    worst = 0.0
    for step in range(STEPS):
        batch = global_batch(step)
        loss = model(**batch)
        loss.backward()
        model.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
        line = f"{step:4d}  {loss.item():.6f}"
        if check:
            expected = reference_step(reference, reference_opt, batch)
            difference = abs(loss.item() - expected) / abs(expected)
            worst = worst if difference <= worst else difference  # so that NaN stays
            line += f"      {expected:.6f}"
        if rank == 0:
            print(line)
    if check:
        print(f"largest relative difference {worst:.1e}, tolerance {TOLERANCE:.0e}")
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small GPT under a given plan.")
    parser.add_argument("--tp", type=int, help="tensor degree")
    parser.add_argument("--pp", type=int, help="pipeline stages")
    parser.add_argument("--dp", type=int, help="replicas")
    parser.add_argument("--micro-batches", type=int, help="per replica; default 2 x pp, 1 if pp=1")
    parser.add_argument("--schedule", default="1f1b", choices=["gpipe", "1f1b", "zero_bubble"])
    parser.add_argument("--zero", type=int, default=0, choices=[0, 1, 2, 3], help="ZeRO stage")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=None,
                        help="train an untouched copy beside it (default: with several processes)",
                        )
    if os.environ.get("RANK", "0") == "0":
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    worst = train(parser.parse_args())
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
