"""A rank that becomes slower is named; noise, longer batches and a busy machine are not."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

import autopar_torch as ap
import zoo
from autopar_torch.run.pace import NETWORK, Detector, Slowed
from quiet import patient
from ranks import run_ranks
from slow import slowly

BASE = (0.1, 0.12, 0.08, 0.1)  # seconds of four ranks


def looks(num: int, noise: float, seed: int,
          factor: Callable[[int, int], float] = lambda rank, look: 1.0,
          network: Callable[[int], float] = lambda look: 1.0) -> list[tuple[int, Slowed]]:
    """(look, what was found) where ranks jitter by so much, and are slower by `factor`, or steps
    by `network`."""
    draw, detector = random.Random(seed), Detector(len(BASE))
    found = []
    for look in range(num):
        now = [s * factor(r, look) * draw.lognormvariate(0.0, noise) for r, s in enumerate(BASE)]
        step_s = network(look) * max(now) * draw.lognormvariate(0.0, noise)
        if change := detector.look(np.array([*now, step_s]), look):
            found.append((look, change))
    return found


@pytest.mark.parametrize(("noise", "most"), [(0.03, 0), *slowly((0.01, 0), (0.10, 5))])
def test_noise_alone_raises_hardly_an_alarm(noise: float, most: int) -> None:
    assert sum(len(looks(1000, noise, seed)) for seed in range(5)) <= most


@pytest.mark.parametrize(("slower", "noise", "latest"), [
    (1.3, 0.03, 8), (1.1, 0.01, 10), (1.1, 0.03, 50), (3.0, 0.10, 8)])
def test_a_slower_rank_is_named_and_its_return_too(
        slower: float, noise: float, latest: int) -> None:
    def factor(rank: int, look: int) -> float:
        return slower if rank == 2 and 40 <= look < 140 else 1.0

    for seed in range(5):
        (first, change), (second, back) = looks(240, noise, seed, factor)
        assert change.rank == back.rank == 2
        assert change.factor > 1.0 > back.factor
        assert 40 <= first < 40 + latest and 140 <= second < 140 + latest
        assert change.since >= 30


def test_longer_batches_and_a_busy_machine_raise_no_alarm() -> None:
    draw = random.Random(0)
    lengths = [draw.uniform(0.3, 3.0) for _ in range(500)]
    assert looks(500, 0.03, 1, lambda rank, look: lengths[look]) == []
    assert looks(500, 0.03, 1, lambda rank, look: 2.0 if look > 100 else 1.0) == []


def test_a_slower_network_is_no_slower_rank() -> None:
    for seed in range(5):
        found = looks(240, 0.03, seed, network=lambda look: 3.0 if 40 <= look < 140 else 1.0)
        assert [change.rank for _, change in found] == [NETWORK, NETWORK]
        assert found[0][1].factor > 1.5 and found[1][1].factor < 0.7


def trained(steps: Sequence[int], slow: bool) -> list[str]:
    """What rank 0 says while others use the core of rank 1, after some steps."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {rank})
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar_torch").addHandler(handler)
    batch = zoo.batch("nanogpt", 32)
    model = ap.parallelize(zoo.build("nanogpt", 0), batch, plan=ap.Plan.uniform(dp=2))
    others: list[subprocess.Popen[bytes]] = []
    for step in range(sum(steps)):
        if slow and rank == 1 and step == steps[0]:
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
                      for _ in range(3)]
        _loss(model, batch).backward()
        model.zero_grad()
    for other in others:
        other.kill()
        other.wait()
    return said


def _loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.loss


@pytest.mark.slow
@patient
def test_a_rank_whose_core_is_taken_is_named() -> None:
    # What is usual is known after 12 looks of 0.25 s, and a look at machines.
    told = [text for text in run_ranks(2, "test_pace:trained", [500, 400], True)[0]
            if "of what was usual" in text]
    assert told and told[0].startswith("rank 1 (pid") and "times as long in a step" in told[0]
