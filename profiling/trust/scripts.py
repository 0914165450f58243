"""Whole training scripts, as they are found: a nanoGPT train loop, run_clm, MNIST."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from trust.lab import EXACT, Wrap, case, gpt, weights


def get_batch(data: Tensor, num_rows: int = 4, seq: int = 16) -> tuple[Tensor, Tensor]:
    """nanoGPT's: random places of one long tensor, from the global generator."""
    starts = torch.randint(len(data) - seq, (num_rows,)).tolist()
    x = torch.stack([data[i : i + seq] for i in starts])
    return x, torch.stack([data[i + 1 : i + 1 + seq] for i in starts])


def corpus() -> Tensor:
    return torch.randint(64, (2000,), generator=torch.Generator().manual_seed(7))


def cosine(step: int, warm_up: int = 2, steps: int = 8, lr: float = 1e-2) -> float:
    if step < warm_up:
        return lr * (step + 1) / (warm_up + 1)
    ratio = (step - warm_up) / (steps - warm_up)
    return 0.1 * lr + 0.5 * (1 + math.cos(math.pi * ratio)) * 0.9 * lr


@torch.no_grad()
def estimate_loss(model: Any, data: Tensor, take: Any) -> float:
    model.eval()
    losses = [take(model(*get_batch(data))).item() for _ in range(3)]
    model.train()
    return sum(losses) / len(losses)


def nanogpt(model: Any, take: Any) -> list[float]:
    """train.py: evaluation first, gradients accumulated, clipped, the rate set by hand."""
    data, said = corpus(), []
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    x, y = get_batch(data)
    for step in range(6):
        for group in opt.param_groups:
            group["lr"] = cosine(step)
        if step % 3 == 0:
            said.append(estimate_loss(model, data, take))
        for _ in range(2):
            loss = take(model(x, y)) / 2
            x, y = get_batch(data)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        said += [float(norm), loss.item() * 2]
    return said


@case(right=True, tolerance=EXACT)
def nanogpt_train(wrap: Wrap) -> Any:
    return nanogpt(wrap(gpt()), lambda out: out)


@case(right=True, tolerance=EXACT)
def nanogpt_as_it_is(wrap: Wrap) -> Any:
    return nanogpt(wrap(gpt(loss_alone=False)), lambda out: out[1])


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32,
        use_cache=False, **options))


def texts() -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randint(64, (18, 16), generator=draw))


def run_clm(model: Any, take: Any) -> list[float]:
    """Shuffled epochs whose last batch is odd, a schedule, and an evaluation after each."""
    said, train_data = [], DataLoader(texts(), batch_size=4, shuffle=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 5))
    for _ in range(3):
        model.train()
        for (ids,) in train_data:
            loss = take(model(input_ids=ids, labels=ids))
            loss.backward()
            opt.step()
            warm.step()
            opt.zero_grad()
            said.append(loss.item())
        model.eval()
        with torch.no_grad():
            for (ids,) in DataLoader(texts(), batch_size=5):
                said.append(take(model(input_ids=ids, labels=ids)).item())
    return said


def either(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.loss


@case(right=True, tolerance=EXACT)
def run_clm_loop(wrap: Wrap) -> Any:
    model = wrap(llama())
    return run_clm(model, either), weights(model)["lm_head.weight"]


@case(right=True, tolerance=EXACT)
def run_clm_dot_loss(wrap: Wrap) -> Any:
    return run_clm(wrap(llama()), lambda out: out.loss)
