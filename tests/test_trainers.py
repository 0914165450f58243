"""What Trainer and accelerate do around a model: streams, and names of checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import autopar_torch as ap
import claims
from autopar_torch.integrations.accelerate import Accelerator
from autopar_torch.integrations.transformers import Trainer
from nets import DP2
from texts import same


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(0)
        for _ in range(24):
            x = torch.randn(8, generator=draw)
            yield {"x": x, "labels": (x.sum() > 0).long()}


class Classifier(nn.Module):
    """Returns a dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"logits": logits} if labels is None else {
            "loss": F.cross_entropy(logits, labels), "logits": logits}


def _folder() -> str:
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    return folders[0]


def _logged(kind: Any, model: nn.Module) -> list[float]:
    args = transformers.TrainingArguments(
        _folder(), per_device_train_batch_size=8, max_steps=3, logging_steps=1, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, learning_rate=0.1)
    trainer = kind(model, args, train_dataset=Stream())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def claim_trainer_reads_a_stream_and_takes_a_model_of_ones_own() -> None:
    losses = _logged(Trainer, ap.parallelize(Classifier(), plan=ap.Plan.uniform(**DP2)))
    optimizer = torch.optim.AdamW((plain := Classifier()).parameters(), 0.1, weight_decay=0.0)
    for step, batch in enumerate(DataLoader(Stream(), 8)):
        optimizer.param_groups[0]["lr"] = 0.1 * (3 - step) / 3
        loss = plain(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        assert abs(losses[step] - float(loss.detach())) < 1e-4, step


def claim_accelerate_reads_a_stream_and_names_its_checkpoints() -> None:
    folder = _folder()
    config = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config)
    model = ap.parallelize(Classifier(), plan=ap.Plan.uniform(**DP2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(), 8))
    losses = []
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        accelerator.save_state()
    assert len(losses) == 3 and same(losses)
    names = sorted(own.name for own in (Path(folder) / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"]


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)
