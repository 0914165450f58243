"""A loop in the style of nanoGPT's train.py, with made-up data. What is needed is one line:

     model.to(device)
    +model = ap.parallelize(model)
     optimizer = model.configure_optimizers(...)

    python examples/nanogpt.py --plain
    torchrun --standalone --nproc-per-node 2 examples/nanogpt.py

Both print the same numbers. There is no DDP, no seed per rank and no division of the accumulation
steps by the number of processes: every process draws the same global batch.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap

VOCAB, BLOCK, WIDTH, HEADS, LAYERS = 64, 32, 32, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (one.view(b, t, HEADS, c // HEADS).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight  # tied

    def forward(self, idx: Tensor,
                targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    def configure_optimizers(self, weight_decay: float, lr: float) -> torch.optim.AdamW:
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
                  {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-6)


def get_lr(step: int, most: float, steps: int) -> float:
    if step < 2:
        return most * (step + 1) / 3
    return most * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2) / max(1, steps - 2))))


def main(given: Sequence[str] | None = None) -> list[float]:
    """Every loss and norm of gradients, and what was estimated between."""
    parser = argparse.ArgumentParser(description="nanoGPT's train.py with made-up data.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="one process, without the library")
    args = parser.parse_args(given)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(1337)
    text = (torch.arange(4000) * 7 // 3 + torch.randint(3, (4000,))) % VOCAB
    data = {"train": text[:3600], "val": text[3600:]}

    def get_batch(split: str) -> tuple[Tensor, Tensor]:
        ix = torch.randint(len(data[split]) - BLOCK, (args.batch_size,)).tolist()
        x = torch.stack([data[split][i : i + BLOCK] for i in ix])
        y = torch.stack([data[split][i + 1 : i + 1 + BLOCK] for i in ix])
        return x.to(device), y.to(device)

    gpt = GPT()
    gpt.to(device)
    model = gpt if args.plain else ap.parallelize(gpt)
    optimizer = model.configure_optimizers(weight_decay=0.1, lr=3e-3)

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        out = {}
        model.eval()
        for split in ("train", "val"):
            losses = torch.zeros(2)
            for k in range(2):
                _, loss = model(*get_batch(split))
                losses[k] = loss.item()
            out[split] = losses.mean().item()
        model.train()
        return out

    found: list[float] = []
    x, y = get_batch("train")
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, 3e-3, args.steps)
        if step % 5 == 0:
            losses = estimate_loss()
            if os.environ.get("RANK", "0") == "0":
                print(f"step {step}: train {losses['train']:.6f}, val {losses['val']:.6f}")
            found += losses.values()
        for _ in range(args.accumulate):
            _, loss = model(x, y)
            loss = loss / args.accumulate
            x, y = get_batch("train")
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found += [loss.item() * args.accumulate, float(norm)]
    return found


if __name__ == "__main__":
    print([round(number, 6) for number in main()])
