"""torch's encoders compute in a trace what they do without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import TransformerEncoder
from torch.nn.modules import transformer

from .effects import attributes_set


@contextlib.contextmanager
def as_without_a_trace() -> Iterator[None]:
    """They look into a mask for whether it is causal, which is a hint and no more; and what is
    padded is 0 in evaluation, where they leave it out."""
    with (attributes_set(transformer, _detect_is_causal_mask=lambda _, is_causal=None, *__: bool(
            is_causal)), attributes_set(TransformerEncoder, forward=_encoded)):
        yield


def _encoded(self: TransformerEncoder, src: Tensor, mask: Tensor | None = None,
             src_key_padding_mask: Tensor | None = None, is_causal: bool | None = None,
             plain: Any = TransformerEncoder.forward) -> Tensor:
    padding = src_key_padding_mask
    if padding is None or mask is not None or not _leaves_out(self, src):
        return plain(self, src, mask, padding, is_causal)  # type: ignore[no-any-return]
    norm, self._modules["norm"] = self.norm, None
    try:
        found: Tensor = plain(self, src, None, padding, is_causal)
    finally:
        self._modules["norm"] = norm
    valid = padding.logical_not()
    ends = (valid[:, 1:] <= valid[:, :-1]).all() if self.mask_check else valid.new_ones(())
    found = found.masked_fill((~valid & ends)[..., None], 0.0)  # where padding comes last only
    return found if norm is None else norm(found)


def _leaves_out(own: TransformerEncoder, src: Tensor) -> bool:
    learns = src.requires_grad or any(p.requires_grad for p in own.layers[0].parameters())
    return (torch.backends.mha.get_fastpath_enabled() and own.use_nested_tensor and src.dim() == 3
            and not own.layers[0].training and not torch.is_autocast_enabled()
            and not (torch.is_grad_enabled() and learns))
