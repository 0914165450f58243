"""A loop in the style of transformers' run_clm_no_trainer.py, with accelerate, a tiny random Llama
and made-up data. What is needed is one line:

    -from accelerate import Accelerator
    +from autopar_torch.integrations.accelerate import Accelerator

    python examples/run_clm.py --plain
    torchrun --standalone --nproc-per-node 2 examples/run_clm.py

Both print the same numbers. Loaders give every process the global batch.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from hf_trainer import llama, rows
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_scheduler, set_seed


def main(given: Sequence[str] | None = None) -> list[float]:
    """Every loss, and the perplexity after each epoch."""
    parser = argparse.ArgumentParser(description="run_clm_no_trainer.py with made-up data.")
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir(), "run_clm")))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on after the first epoch")
    parser.add_argument("--plain", action="store_true", help="one process, without the library")
    args = parser.parse_args(given)
    if args.plain:
        from accelerate import Accelerator
    else:
        from autopar_torch.integrations.accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate,
                              cpu=not torch.cuda.is_available())
    set_seed(5)
    train_loader = DataLoader(rows(44, 0), shuffle=True, collate_fn=default_data_collator,
                              batch_size=8)
    eval_loader = DataLoader(rows(20, 1), collate_fn=default_data_collator, batch_size=8)
    model = llama()
    no_decay = ["bias", "layer_norm.weight"]
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)],
         "weight_decay": 0.1},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ], lr=5e-3)
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=12)
    model, optimizer, train_loader, eval_loader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, lr_scheduler)

    found: list[float] = []
    if args.resume:
        accelerator.load_state(os.path.join(args.folder, "epoch_0"))
    for epoch in range(int(args.resume), args.epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                found.append(loss.detach().float().item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        losses = []
        for batch in eval_loader:
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(len(batch["labels"]))))
        perplexity = math.exp(torch.mean(torch.cat(losses)).item())
        accelerator.print(f"epoch {epoch}: perplexity {perplexity:.6f}")
        found.append(perplexity)
        accelerator.save_state(os.path.join(args.folder, f"epoch_{epoch}"))

    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        args.folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model))
    return found


if __name__ == "__main__":
    print([round(number, 6) for number in main()])
