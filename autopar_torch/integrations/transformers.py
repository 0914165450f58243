"""transformers.Trainer for a model that is split over the processes of torchrun.

    from autopar_torch.integrations.transformers import Trainer   # instead of transformers

A model that is not parallelized yet will be; pass `parallelize(model, ...)` to say how.
`per_device_train_batch_size` is the size of the global batch. For a subclass of transformers'
Trainer, `parallel(SFTTrainer)` makes the class to use.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers

from ..errors import RunError
from ..run.model import ParallelModel
from .alone import plain, read_alone, stand_alone, taken_up, wait

_FOLDER = "autopar"  # in each checkpoint: parts of the optimizer's state, for any plan


class _ParallelTrainer:
    """Comes before transformers.Trainer, or a subclass of it."""

    model: ParallelModel
    accelerator: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        if model is None:
            raise RunError("a parallelized model is made once", where="Trainer: model_init",
                           fix="pass model=")
        args = args or transformers.TrainingArguments("tmp_trainer")
        if args.deepspeed or args.fsdp:
            raise RunError("deepspeed and fsdp split the model in other ways",
                           where="TrainingArguments", fix="leave them out; the plan says what is "
                           "split, constraints={'zero': 3} asks for parts of parameters")
        parallel = taken_up(model)
        args._setup_devices  # noqa: B018  it resets the state of accelerate
        state = stand_alone(parallel.world.rank, parallel.device)
        args.__dict__["_setup_devices"], args.distributed_state = parallel.device, state
        args._n_gpu = min(1, args._n_gpu)
        super().__init__(parallel, args, *rest, **kwargs)  # type: ignore[call-arg]
        read_alone(self.accelerator)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """The plan says where parameters lie."""

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """By the names of the module itself, which are those of `named_parameters()`."""
        found: list[str] = super().get_decay_parameter_names(  # type: ignore[misc]
            getattr(model, "module", model))
        return found

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Workers are seeded by the index of the process: alike on all ranks."""
        state = self.args.distributed_state
        state.process_index = 0
        try:
            return super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        finally:
            state.process_index = self.model.world.rank

    # --- checkpoints: all ranks gather, then one writes -----------------------------------------

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self._full = self.model.state_dict()
        super().save_model(*args, **kwargs)  # type: ignore[misc]
        del self._full
        wait(self.model)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The files of `save_pretrained`, with whole tensors."""
        parallel, full = self.model, state_dict or self._full
        self.model = parallel.module  # type: ignore[assignment]
        try:
            super()._save(output_dir, full)  # type: ignore[misc]
        finally:
            self.model = parallel

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.model.save(os.path.join(output_dir, _FOLDER), plain(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))
        wait(self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = os.path.join(checkpoint, _FOLDER)
        if not os.path.isdir(folder):
            raise RunError("the checkpoint was written by another Trainer", where=checkpoint,
                           fix="go on from its weights alone: from_pretrained(checkpoint), then "
                           "train() without resume_from_checkpoint")
        self.model.load(folder, plain(self.optimizer))
        self.lr_scheduler.load_state_dict(
            torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True))


def parallel(trainer: type) -> type:
    """The class of a Trainer, for a parallelized model."""
    return type(trainer.__name__, (_ParallelTrainer, trainer), {})


Trainer = parallel(transformers.Trainer)
