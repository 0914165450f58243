"""Claims about what NVML says of GPUs, with a stand-in for the library."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar_torch import cli, datasheets
from autopar_torch.measure import detect, nvml

GIB = 2**30


class NVMLError(Exception):
    pass


def standing_in(*, driver: bool = True, reasons: int = 0, mig: int = 0,
                answers: bool = True) -> Any:
    """Two H100 joined by NVLink; with `answers` off they keep their clocks to themselves."""

    def init() -> None:
        if not driver:
            raise NVMLError("Driver Not Loaded")

    def told(value: Any) -> Any:
        if not answers:
            raise NVMLError("Not Supported")
        return value

    return SimpleNamespace(
        NVMLError=NVMLError, NVML_CLOCK_SM=1, nvmlInit=init, nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda h: b"NVIDIA H100 80GB HBM3",
        nvmlDeviceGetUUID=lambda h: f"GPU-{h}",
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(total=80 * GIB, free=75 * GIB),
        nvmlDeviceGetClockInfo=lambda h, kind: told(1200),
        nvmlDeviceGetMaxClockInfo=lambda h, kind: told(1980),
        nvmlDeviceGetEnforcedPowerLimit=lambda h: told(700_000),
        nvmlDeviceGetMigMode=lambda h: told((mig, mig)),
        nvmlDeviceGetP2PStatus=lambda a, b, what: told(0),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda h: told(reasons),
        nvmlDeviceGetHandleByUUID=lambda uuid: 0,
    )


def test_a_line_says_what_a_gpu_is_and_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", standing_in())
    assert nvml.lines() == [
        f"GPU {i}: NVIDIA H100 80GB HBM3 (H100), 75.0 of 80.0 GiB free, 1200 of 1980 MHz, "
        f"at most 700 W, NVLink to {1 - i}" for i in range(2)]


def test_what_slows_a_gpu_down_and_mig_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", standing_in(reasons=0x20 | 0x01, mig=1))
    assert all(line.endswith("in MIG mode, slowed down by its temperature")
               for line in nvml.lines())
    one = SimpleNamespace(uuid="0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: one)
    assert nvml.slowed_by(torch.device("cuda", 0)) == ("its temperature",)
    assert nvml.slowed_by(torch.device("cpu")) == ()


def test_a_gpu_that_keeps_its_clocks_to_itself_is_still_seen(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", standing_in(answers=False))
    assert [gpu.joined for gpu in nvml.gpus()] == [(), ()]
    assert all("75.0 of 80.0 GiB free" in line for line in nvml.lines())


@pytest.mark.parametrize("library, why", [(None, "not installed"),
                                          (standing_in(driver=False), "no driver")])
def test_without_the_library_or_a_driver_env_says_so_in_one_line(
        library: Any, why: str, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(shutil, "which", lambda _: None)  # a driver that is there shows its links
    assert cli.main(["env"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("GPU")]
    assert why in line
    assert nvml.slowed_by(torch.device("cpu")) == ()


@pytest.mark.parametrize("product, gib, name", [
    ("NVIDIA H100 80GB HBM3", 79.6, "H100"), ("NVIDIA H100 PCIe", 79.6, "H100-PCIe"),
    ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40"), ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80"),
    ("NVIDIA A100 80GB PCIe", 79.2, "A100-80-PCIe"), ("Tesla T4", 14.7, "T4"),
    ("Tesla V100-SXM2-16GB", 15.8, "V100-16"), ("NVIDIA H200", 140.4, "H200"),
])
def test_a_driver_s_name_finds_the_datasheet(product: str, gib: float, name: str) -> None:
    found = datasheets.of_product(product, int(gib * GIB))
    assert found is not None and found.device.name == name


@pytest.mark.parametrize("product, gib", [("NVIDIA GeForce RTX 4090", 24), ("NVIDIA H100", 10)])
def test_a_device_without_a_datasheet_has_none(product: str, gib: float) -> None:
    assert datasheets.of_product(product, int(gib * GIB)) is None


def test_a_gpu_is_planned_with_by_its_datasheet_and_what_is_free(
        monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 * GIB, uuid="u")
    for name, value in {"is_available": True, "current_device": 0, "memory_reserved": 2 * GIB,
                        "mem_get_info": (60 * GIB, 79 * GIB)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: own)
    site = detect.here.__wrapped__()
    [[device]] = detect.cluster([site]).nodes
    assert device.name == "H100" and 60 * GIB < device.memory_bytes <= 62 * GIB
    assert device.flops_per_s == datasheets.hardware("H100").device.flops_per_s
