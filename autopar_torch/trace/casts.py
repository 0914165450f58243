"""Models of bfloat16 parameters that compute in float32 elsewhere: what meets a parameter is cast.

Inputs come in their own precision. As under autocast, an operand of another precision is cast where
it meets a bfloat16 one in a product or a norm; losses are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# Ops that want one precision of all operands: that of the parameters, where one has it.
_PRODUCTS = {
    "linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "__imatmul__", "mm", "bmm", "mv",
    "dot", "vdot", "inner", "addmm", "addbmm", "baddbmm", "addmv", "addr", "einsum", "tensordot",
    "multi_dot", "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
    "multi_head_attention_forward", "layer_norm", "group_norm", "instance_norm", "rms_norm",
    "prelu", "embedding_bag", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell",
    "rnn_tanh_cell", "rnn_relu_cell", "grid_sample",
}
_INTO = {"index_put", "index_add", "index_copy", "scatter", "scatter_add", "masked_scatter"}
_INTO |= {f"{name}_" for name in (*_INTO, "addmm", "addbmm", "baddbmm", "addmv", "addr")}
_LOSSES = {
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "ctc_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss",
    "gaussian_nll_loss", "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss", "log_softmax",
}
CallArgs = tuple[tuple[Any, ...], dict[str, Any]]


def _cast(call: CallArgs, dtype: torch.dtype, wanted: Callable[[torch.dtype], bool]) -> CallArgs:
    def one(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() and wanted(value.dtype) else value

    return pytree.tree_map_only(Tensor, one, call)


def _dtypes(call: CallArgs) -> set[torch.dtype]:
    found = (t for t in pytree.tree_leaves(call) if isinstance(t, Tensor))
    return {t.dtype for t in found if t.is_floating_point()}


class Casts(TorchFunctionMode):
    """While it is entered; `dtype` is that of the parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._ready(getattr(func, "__name__", ""), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _ready(self, name: str, call: CallArgs) -> CallArgs:
        if name in _PRODUCTS and {self.dtype} < _dtypes(call):
            return _cast(call, self.dtype, lambda d: d != self.dtype)
        if name in _INTO and call[0] and len(_dtypes(call)) > 1:
            return _cast(call, call[0][0].dtype, lambda d: d != call[0][0].dtype)
        if name in _LOSSES or (name == "batch_norm" and torch.float32 in _dtypes(call)):
            own = call[0][0] if name == "batch_norm" and call[0] else None  # as it comes
            args, kwargs = _cast(call, torch.float32, lambda d: d == self.dtype)
            return (args if own is None else (own, *args[1:])), kwargs
        return call
