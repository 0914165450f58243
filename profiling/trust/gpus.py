"""Ranks that may share one GPU, on which scripts make their tensors.

NCCL refuses two ranks on one GPU of a machine. With a name of its own (`NCCL_HOSTID`) each rank is
taken for a machine; messages go through sockets, and the GPU takes turns. Slow, and as right as
anywhere. Where torch sees no GPU nothing of this happens.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class _OnGpu(TorchFunctionMode):
    """As if a script named the GPU wherever it makes a tensor; numbers that a generator of the CPU
    draws are brought there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func not in _device_constructors() or given.get("device") is not None:
            return func(*args, **given)
        if getattr(given.get("generator"), "device", None) == torch.device("cpu"):
            return func(*args, **{**given, "device": "cpu"}).cuda()
        return func(*args, **{**given, "device": "cuda"})


def there() -> bool:
    """Asked of the driver's library: who asks CUDA may not fork any more."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cuda" if there() else "cpu")


@contextlib.contextmanager
def placed(rank: int, size: int) -> Iterator[None]:
    """Be a rank with its GPU."""
    if not there():
        yield
        return
    if size > torch.cuda.device_count():
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo",
                       "NCCL_IB_DISABLE": "1"}
    torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with _OnGpu():
        yield
