"""transformers.Trainer with a tiny random Llama and made-up data. What is needed is one line:

    -from transformers import Trainer
    +from autopar_torch.integrations.transformers import Trainer

    python examples/hf_trainer.py --plain
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py

Both print the same numbers. `per_device_train_batch_size` is the size of the global batch.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB, SEQ = 96, 16


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Counting from a random start; some labels are left out."""
    source = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCAB, (count,), generator=source).tolist()
    found = []
    for number, start in enumerate(starts):
        ids = (start + torch.arange(SEQ)) % VOCAB
        labels = ids.clone()
        labels[: number % 5] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def llama() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64))


def accuracy(found: Any) -> dict[str, float]:
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    seen = found.label_ids[:, 1:] != -100
    right = (logits[:, :-1].argmax(-1) == found.label_ids[:, 1:]) & seen
    return {"accuracy": float(right.sum() / seen.sum())}


def main(given: Sequence[str] | None = None) -> list[float]:
    """Losses, norms of gradients and accuracies, of a run and of a resumed one."""
    parser = argparse.ArgumentParser(description="transformers.Trainer with a tiny Llama.")
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir(), "hf_trainer")))
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="one process, without the library")
    args = parser.parse_args(given)
    if args.plain:
        from transformers import Trainer
    else:
        from autopar_torch.integrations.transformers import Trainer

    def trained(checkpoint: str | None = None) -> tuple[Any, list[float]]:
        settings = transformers.TrainingArguments(
            args.folder, per_device_train_batch_size=8, per_device_eval_batch_size=8,
            gradient_accumulation_steps=args.accumulate, max_steps=6, warmup_steps=2,
            learning_rate=5e-3, weight_decay=0.1, max_grad_norm=0.5, seed=3, logging_steps=1,
            eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
            save_total_limit=2, load_best_model_at_end=True, report_to=[], disable_tqdm=True,
            use_cpu=not torch.cuda.is_available())
        trainer = Trainer(llama(), settings, train_dataset=rows(45, 0), eval_dataset=rows(21, 1),
                          compute_metrics=accuracy)
        trainer.train(resume_from_checkpoint=checkpoint)
        kept = ("loss", "grad_norm", "eval_loss", "eval_accuracy")
        history = trainer.state.log_history
        found = [float(entry[key]) for entry in history for key in kept if key in entry]
        return trainer, [*found, float(trainer.evaluate()["eval_loss"])]

    transformers.logging.set_verbosity_error()
    trainer, found = trained()
    last = os.path.join(args.folder, "checkpoint-4")
    _, again = trained(last)
    whole = sum(float(t.double().abs().sum()) for t in trainer.model.state_dict().values())
    return [*found, *again, whole]


if __name__ == "__main__":
    print([round(number, 6) for number in main()])
