"""What accelerate, and so transformers, must see: each process alone, with an ordinary model.

What they do for many processes (share the data out, wrap the model, gather, scale losses) must not
happen here: every rank gets the global batch, and the model does the rest.
"""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

from ..api import parallelize
from ..run.model import ParallelModel

log = logging.getLogger("autopar_torch")
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
             "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def taken_up(model: nn.Module) -> ParallelModel:
    """The model, parallelized unless it is; what inspects its class and its forward sees the
    user's: how trainers treat a model of peft, say, follows from `isinstance`."""
    parallel = model if isinstance(model, ParallelModel) else parallelize(model)
    kind = type(parallel.module)

    def forward(self: ParallelModel, *args: Any, **kwargs: Any) -> Any:
        return ParallelModel.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    parallel.__class__ = type(kind.__name__, (ParallelModel,),
                              {"forward": forward, "__class__": property(lambda _: kind)})
    return parallel


def stand_alone(rank: int, device: torch.device) -> PartialState:
    """Accelerate's state: one process, whose index is our rank, so that one of them writes."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        state = PartialState(cpu=device.type == "cpu")
    finally:
        os.environ.update(hidden)
    state.process_index = rank
    state.local_process_index = int(hidden.get("LOCAL_RANK", rank))
    state.device = device
    return state


def read_alone(accelerator: Any) -> None:
    """Every rank reads the batches of a stream, which rank 0 would else send to the others."""
    if accelerator.dataloader_config.dispatch_batches:
        log.warning("not honoured: dispatch_batches, as every rank reads the global batch")
    accelerator.dataloader_config.dispatch_batches = False


def plain(optimizer: Any) -> Any:
    """The optimizer that accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def wait(parallel: ParallelModel) -> None:
    """Until all ranks are here: one of them has written a file that all will read."""
    with parallel.world.doing("saving"):
        if parallel.world.size > 1:
            dist.barrier()
