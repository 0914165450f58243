"""A GPT of any size on meta tensors, for the examples that plan: nothing of it is in memory.

    autopar estimate examples/gpt.py:small --cluster 8xH100 --cluster 8xL4 --global-batch-size 64
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 32000


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, width = x.shape
        q, k, v = (part(self.norm_1(x)).view(rows, seq, self.heads, -1).transpose(1, 2)
                   for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(rows, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, seq: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, width), nn.Embedding(seq, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def made(layers: int, width: int, heads: int, seq: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch of one row."""
    with torch.device("meta"):
        ids = torch.zeros(1, seq, dtype=torch.long)
        return GPT(layers, width, heads, seq), {"ids": ids, "targets": ids}


def small(seq: int = 2048) -> tuple[nn.Module, dict[str, Tensor]]:
    """1.4 billion parameters."""
    return made(24, 2048, 16, seq)


def large(seq: int = 2048) -> tuple[nn.Module, dict[str, Tensor]]:
    """39 billion parameters."""
    return made(48, 8192, 64, seq)
