"""What is saved under one plan and world size goes on under any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autopar_torch as ap
import oracle
import zoo
from autopar_torch.errors import CheckpointError, RunError
from ranks import run_ranks

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2, "num_micro_batches": 2}),
    "zero3": (2, {"dp": 2, "zero": 3}),
    "tp2pp2": (4, {"tp": 2, "pp": 2, "num_micro_batches": 2}),
    "one": (1, {}),
}
NAME = "gpt2"


def _start(degrees: dict[str, Any], seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    plan = ap.Plan.uniform(**degrees)
    model = ap.parallelize(zoo.build(NAME, seed), zoo.batch(NAME, 8), plan=plan)
    return model, oracle.optimizer(model.parameters())


def _steps(model: Any, opt: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        loss = model(**zoo.batch(NAME, 8, seed, pad=True))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def save_all(names: list[str], folder: str) -> dict[str, list[float]]:
    """In a rank: two steps, save, two more; the losses of the last two."""
    losses = {}
    for name in names:
        model, opt = _start(PLANS[name][1], 0)
        _steps(model, opt, range(2))
        model.save(Path(folder) / name, opt)
        losses[name] = _steps(model, opt, range(2, 4))
    return losses


def load_all(names: list[str], saved: list[str], folder: str) -> dict[str, list[float]]:
    """In a rank: what was saved under each plan, gone on with under each of `names`."""
    losses = {}
    for name in names:
        for source in saved:
            model, opt = _start(PLANS[name][1], 9)
            model.load(Path(folder) / source, opt)
            losses[f"{source} -> {name}"] = _steps(model, opt, range(2, 4))
    return losses


def _of_size(num_ranks: int) -> list[str]:
    return [name for name, (size, _) in PLANS.items() if size == num_ranks]


def test_training_goes_on_under_any_other_plan_as_if_nothing_had_happened(tmp_path: Path) -> None:
    saved: dict[str, list[float]] = {}
    for n in (1, 2, 4):
        saved |= run_ranks(n, "test_checkpoints:save_all", _of_size(n), str(tmp_path))[0]
    for n in (1, 2, 4):
        found = run_ranks(n, "test_checkpoints:load_all", _of_size(n), list(PLANS), str(tmp_path))
        for what, losses in found[0].items():
            assert losses == pytest.approx(saved["one"], rel=1e-5), what


def test_weights_of_another_model_are_refused_and_those_that_are_missing_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Loss(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    path, state = tmp_path / "own.safetensors", {"weight": torch.ones(4, 4)}

    def start(tensors: dict[str, torch.Tensor]) -> Any:
        save_file(tensors, str(path))
        return ap.parallelize(Loss(4, 4), torch.zeros(2, 4), weights=path)

    with pytest.raises(CheckpointError, match="none of the 2 tensors of the model is there"):
        start({"other": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"weight is \(2, 4\) there, \(4, 4\) here"):
        start({"weight": torch.ones(2, 4)})
    assert torch.equal(start(state).state_dict()["weight"], state["weight"])
    assert "1 tensors of the model are not in" in caplog.text


def test_saving_needs_a_first_batch_and_groups_that_hold_the_same(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="before the first batch"):
        ap.parallelize(zoo.build("gpt2")).save(tmp_path)
    model, opt = _start({}, 0)
    model.save(tmp_path, opt)
    names = [name for name, _ in model.named_parameters()]
    halves = [[p for i, p in enumerate(model.parameters()) if i % 2 == k] for k in (0, 1)]
    with pytest.raises(CheckpointError, match=f"groups of {len(names)} parameters there"):
        model.load(tmp_path, torch.optim.AdamW([{"params": half} for half in halves]))


def test_what_is_no_checkpoint_or_of_another_model_is_refused(tmp_path: Path) -> None:
    model, opt = _start({}, 0)
    with pytest.raises(CheckpointError, match="no readable checkpoint"):
        model.load(tmp_path / "nothing", opt)
    model.save(tmp_path / "gpt2")
    other = ap.parallelize(zoo.build("llama"), zoo.batch("llama", 4))
    with pytest.raises(CheckpointError, match="not in it"):
        other.load(tmp_path / "gpt2")
