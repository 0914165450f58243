"""Claims about devices and backends of ranks, tried without a GPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar_torch import api
from autopar_torch.run import world
from autopar_torch.shard.collectives import backend_of

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
        api._tell_precision(precision, device)
    assert ("TF32" in caplog.text) == warned
