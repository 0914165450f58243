"""Caches of keys and values, which models of transformers fill in training, too: of no use there,
and their objects stop export.

Where there is one, transformers looks for no sequences that follow each other in a row (positions
that begin again), so without it that has to be left out as well.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .call import Call
from .effects import attributes_set


@contextlib.contextmanager
def without(model: nn.Module, call: Call) -> Iterator[None]:
    """While the model is traced it makes none."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, "use_cache", False):
        yield
        return
    _, asked = call.rebuild([torch.empty([0] * len(shape)) for shape in call.shapes])
    dropped = model.training and torch.is_grad_enabled() and any(
        getattr(own, "gradient_checkpointing", False) for own in model.modules())
    masks = sys.modules.get("transformers.masking_utils")
    packed = masks and asked.get("use_cache") is None and not dropped
    with (attributes_set(config, use_cache=False), attributes_set(
            masks, find_packed_sequence_indices=lambda *_, **__: None)
          if packed else contextlib.nullcontext()):
        yield
