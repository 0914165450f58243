"""The line of figures: what it says is what happened."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import autopar_torch as ap
from autopar_torch.run import training_log

WIDTH, ROWS = 32, 4


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def trained(monkeypatch: pytest.MonkeyPatch, steps: int, every: int, peak: float = 0.0,
            tokens: int = 0) -> tuple[list[str], list[float]]:
    """The lines of some steps that take half a second each, and their losses."""
    clock = iter(range(10**6))
    monkeypatch.setattr(training_log.time, "perf_counter", lambda: now[0])
    now, lines, losses = [100.0], [], []
    model = ap.parallelize(Loss(), plan=ap.Plan.uniform())
    log = ap.TrainingLog(model, every=every, peak_flops_per_s=peak, write=lines.append)
    for _ in range(steps):
        loss = model(x=torch.full((ROWS, WIDTH), float(next(clock))))
        loss.backward()
        now[0] += 0.5
        log.step(loss, grad_norm=1.25, tokens=tokens)
        losses.append(float(loss))
    return lines, losses


def test_there_is_a_line_for_the_first_step_and_for_every_so_many(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, losses = trained(monkeypatch, steps=9, every=4)
    steps = [int(re.findall(r"step: (\d+)", line)[0]) for line in lines]
    assert steps == [1, 4, 8]
    for step, line in zip(steps, lines, strict=True):
        assert f"loss: {losses[step - 1]:.5f}  grad_norm: 1.2500  memory: " in line
        assert re.search(r"memory: \d+\.\d\dGiB\(\d+\.\d%\)", line)


def test_times_and_rates_are_those_of_the_steps_since_the_last_line(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    flops = 3 * 2 * ROWS * WIDTH * WIDTH
    lines, _ = trained(monkeypatch, steps=8, every=4, peak=flops * 8, tokens=100)
    assert "step_time" not in lines[0] and "tps" not in lines[0]  # the plan was made in it
    for line in lines[1:]:
        assert "step_time: 0.500s" in line and "tps: 200 " in line
        percent = float(re.findall(r"mfu: ([\d.]+)%", line)[0])
        assert percent == pytest.approx(25.0, rel=0.1)  # pointwise ops count a little as well


def test_mfu_is_left_out_where_no_peak_is_known_and_a_prediction_where_none_was_made(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, _ = trained(monkeypatch, steps=2, every=2)
    assert "tflops: " in lines[1] and "mfu" not in lines[1] and "predicted" not in lines[1]
    assert "tps" not in lines[1]


def test_a_line_every_zero_steps_is_refused() -> None:
    with pytest.raises(ap.AutoparError, match="every 0 steps"):
        ap.TrainingLog(ap.parallelize(Loss()), every=0)
