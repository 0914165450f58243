"""Claims about devices and backends of ranks, tried without a GPU."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar_torch as ap
from autopar_torch.find import honoured
from autopar_torch.run import world
from autopar_torch.shard.collectives import backend_of
from ranks import run_ranks

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("local_rank, num_seen, number", [("5", 8, 5), ("5", 1, 0), ("5", 4, 1)])
def test_a_rank_takes_the_device_of_its_number_among_those_that_it_sees(
        local_rank: str, num_seen: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_seen)
    monkeypatch.setattr(torch.cuda, "set_device", lambda own: told.update(set=own))
    monkeypatch.setattr(world, "meet", lambda *_: None)
    monkeypatch.setattr(world.atexit, "register", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **own: told.update(
        backend=backend, **own))
    world._join()
    assert told["backend"] == "nccl"
    assert told["set"] == told["device_id"] == torch.device("cuda", number)


@pytest.mark.parametrize("config, has_gpu, name", [
    ("cpu:gloo,cuda:nccl", True, "nccl"), ("cpu:gloo,cuda:nccl", False, "gloo"),
    ("cuda:nccl", True, "nccl"), ("cpu:gloo,cuda:gloo", True, "gloo"), ("cpu:fake", True, "fake"),
])
def test_of_several_backends_that_of_the_tensors_counts(
        config: str, has_gpu: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert backend_of() == name


@pytest.mark.parametrize("given", ["gloo", "cpu:gloo", None])
def test_a_group_that_names_no_backend_is_one_of_gloo_on_a_cpu(given: str | None) -> None:
    dist.init_process_group(given, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert backend_of() == backend_of(dist.new_group([0])) == "gloo"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("precision, allowed, device, warned", [
    ("float32", "highest", CUDA, True), ("float32", "high", CUDA, False),
    ("bfloat16", "highest", CUDA, False), ("float32", "highest", torch.device("cpu"), False),
])
def test_full_float32_on_a_gpu_is_named(
        precision: Any, allowed: str, device: torch.device, warned: bool,
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: allowed)
    with caplog.at_level(logging.WARNING):
        honoured.tell_precision(precision, device)
    assert ("TF32" in caplog.text) == warned


class Mixed(nn.Module):
    """Rows are told apart by a trial, and masked."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x.masked_fill(x > 1, 0.0)).cumsum(1)
        return nn.functional.mse_loss(x - x.mean(0), y)


def train_where_tensors_are_made_elsewhere(*plans: dict[str, Any]) -> list[list[list[float]]]:
    """Losses in one process, and of the library where the default device has no numbers."""
    found = []
    for plan in plans:
        torch.manual_seed(0)
        plain, batch = Mixed(), (torch.randn(8, 16), torch.randn(8, 16))
        given = copy.deepcopy(plain)
        torch.set_default_device("meta")
        model = ap.parallelize(given, plan=ap.Plan.uniform(**plan))
        found.append([_losses(model, batch), _losses(plain, batch)])
        model.state_dict()
        torch.set_default_device(None)
    return found


def _losses(model: nn.Module, batch: tuple[Tensor, ...]) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(3):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_default_device_of_the_script_is_none_of_the_librarys() -> None:
    plans = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}]
    for own in run_ranks(2, "test_devices:train_where_tensors_are_made_elsewhere", *plans):
        for got, want in own:
            assert got == pytest.approx(want, rel=1e-5)
