"""What NVIDIA's management library says of the GPUs here: memory, clocks, what slows them, links.

It needs `pynvml` (the package nvidia-ml-py) and a driver; without either there is one line that
says so, and nothing else changes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .. import datasheets

# Reasons for low clocks that cost time: the bits of nvmlClocksEventReasons.
SLOWING = {0x04: "its power limit", 0x08: "the hardware slows it down", 0x20: "its temperature",
           0x40: "its temperature (hardware)", 0x80: "the power supply (hardware)"}
NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK


class Gpu(NamedTuple):
    """One GPU, as it is now."""

    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    clock_mhz: int
    most_mhz: int
    limit_w: float
    slowed_by: tuple[str, ...]
    is_cut: bool  # in MIG mode, several devices share it
    joined: tuple[int, ...]  # numbers of the GPUs that NVLink joins it with

    @property
    def line(self) -> str:
        sheet = datasheets.of_product(self.name, self.total_bytes)
        told = [f"{self.name} ({sheet.device.name if sheet else 'no datasheet'})",
                f"{self.free_bytes / 2**30:.1f} of {self.total_bytes / 2**30:.1f} GiB free",
                f"{self.clock_mhz} of {self.most_mhz} MHz", f"at most {self.limit_w:.0f} W",
                f"NVLink to {', '.join(map(str, self.joined))}" if self.joined else "no NVLink"]
        told += ["in MIG mode"] if self.is_cut else []
        told += [f"slowed down by {' and '.join(self.slowed_by)}"] if self.slowed_by else []
        return ", ".join(told)


@contextmanager
def _library() -> Iterator[Any]:
    """The library, ready; an OSError where there is none, or no driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise OSError("pynvml is not installed (pip install nvidia-ml-py)") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise OSError(f"no driver ({error})") from error
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise OSError(str(error)) from error
    finally:
        nvml.nvmlShutdown()


def gpus() -> list[Gpu]:
    """Of this machine, by number; an OSError that says why nothing is known of them."""
    with _library() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [_gpu(nvml, handle, [other for other in range(len(handles)) if other != i and _may(
            nvml, 1, nvml.nvmlDeviceGetP2PStatus, handle, handles[other], NVLINK) == 0])
            for i, handle in enumerate(handles)]


def _gpu(nvml: Any, handle: Any, joined: list[int]) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    clock = nvml.NVML_CLOCK_SM
    return Gpu(
        _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle)),
        int(memory.total), int(memory.free),
        _may(nvml, 0, nvml.nvmlDeviceGetClockInfo, handle, clock),
        _may(nvml, 0, nvml.nvmlDeviceGetMaxClockInfo, handle, clock),
        _may(nvml, 0, nvml.nvmlDeviceGetEnforcedPowerLimit, handle) / 1000,
        _slowed_by(nvml, handle), _may(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)[0] == 1,
        tuple(joined),
    )


def _may(nvml: Any, without: Any, ask: Any, *args: Any) -> Any:
    """What not every GPU answers."""
    try:
        return ask(*args)
    except nvml.NVMLError:
        return without


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _slowed_by(nvml: Any, handle: Any) -> tuple[str, ...]:
    ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or (
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons)  # its older name
    bits = _may(nvml, 0, ask, handle)
    return tuple(text for bit, text in SLOWING.items() if bits & bit)


def slowed_by(device: torch.device) -> tuple[str, ...]:
    """Why a device of this process runs below its clocks; nothing if it does not, or none knows."""
    if device.type != "cuda":
        return ()
    uuid = torch.cuda.get_device_properties(device).uuid
    try:
        with _library() as nvml:
            return _slowed_by(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode()))
    except OSError:
        return ()


def lines() -> list[str]:
    """For a person: a line for each GPU, or one that says why nothing is known of any."""
    try:
        return [f"GPU {number}: {gpu.line}" for number, gpu in enumerate(gpus())]
    except OSError as error:
        return [f"GPUs: nothing is known of any: {error}"]
