"""accelerate's Accelerator for a model that is split over the processes of torchrun.

    from autopar_torch.integrations.accelerate import Accelerator   # instead of accelerate

`prepare` parallelizes the model, unless it is `parallelize(model, ...)` already, and shares out
no data: loaders give every process the global batch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import accelerate
from torch import nn

from ..errors import RunError
from ..run.model import ParallelModel
from ..run.world import device, start
from .alone import plain, read_alone, stand_alone, taken_up, wait

_FOLDER = "autopar"  # in each checkpoint: parts of the model and the optimizer's state


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """For one model and at most one optimizer; all else is as accelerate does it in one process."""

    _models: list[Any]
    _optimizers: list[Any]
    _aside: Sequence[tuple[ParallelModel, Any]] = ()  # while accelerate writes or reads

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        rank, _ = start()
        stand_alone(rank, device())
        super().__init__(*args, **kwargs)
        read_alone(self)
        self.register_save_state_pre_hook(lambda *given: self._save_parts(given[-1]))
        self.register_load_state_pre_hook(lambda *given: self._load_parts(given[-1]))

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """The same objects; the model is parallelized."""
        return super().prepare(
            *(taken_up(one) if isinstance(one, nn.Module) else one for one in args), **kwargs)

    def wait_for_everyone(self) -> None:
        for model in self._models or [model for model, _ in self._aside]:
            wait(model)

    # --- checkpoints: our part of them can be loaded under any plan -----------------------------

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._parts_aside():
            folder = super().save_state(*args, **kwargs)
        self.wait_for_everyone()
        return folder

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        with self._parts_aside():
            super().load_state(*args, **kwargs)

    @contextlib.contextmanager
    def _parts_aside(self) -> Iterator[None]:
        """Accelerate writes and reads what is whole on every rank."""
        models, optimizers = self._models, self._optimizers
        if len(models) != 1 or len(optimizers) > 1:
            raise RunError(f"{len(models)} models and {len(optimizers)} optimizers",
                           where="save_state, load_state",
                           fix="save one model with one optimizer, or use model.save()")
        self._aside = [(models[0], next(map(plain, optimizers), None))]
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers, self._aside = models, optimizers, []

    def _save_parts(self, folder: str) -> None:
        (model, optimizer), = self._aside
        model.save(os.path.join(folder, _FOLDER), optimizer)

    def _load_parts(self, folder: str) -> None:
        (model, optimizer), = self._aside
        model.load(os.path.join(folder, _FOLDER), optimizer)
