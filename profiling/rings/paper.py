"""What the paper prints (PrimePar, ASPLOS 2024): figures 7 to 10 and table 2, and its models."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

SEQ = 2048  # its kernel times mean FP32 and this length: 2 * 8192 * 12288**2 FLOP in 167 ms


class Shape(NamedTuple):
    """A transformer; `gated`: the Llama block, without biases, else the one of OPT and BLOOM."""

    width: int
    inner: int
    heads: int
    groups: int  # heads of keys and values
    layers: int
    gated: bool = False


SHAPES = {
    "OPT 6.7B": Shape(4096, 16384, 32, 32, 32),
    "OPT 175B": Shape(12288, 49152, 96, 96, 96),
    "Llama2 7B": Shape(4096, 11008, 32, 32, 32, True),
    "Llama2 70B": Shape(8192, 28672, 64, 8, 80, True),
    "BLOOM 7B1": Shape(4096, 16384, 32, 32, 30),
    "BLOOM 176B": Shape(14336, 57344, 112, 112, 70),
}

# Throughput over Megatron's (figure 7) and peak memory in percent of it (figure 8), by devices.
SPEED = {
    4: (1.16, 1.11, 1.16, 1.15, 1.15, 1.11), 8: (1.18, 1.35, 1.19, 1.21, 1.18, 1.43),
    16: (1.16, 1.38, 1.20, 1.24, 1.18, 1.68), 32: (1.20, 1.39, 1.21, 1.26, 1.19, 1.60),
}
MEMORY = {
    4: (89, 92, 90, 91, 89, 92), 8: (90, 80, 91, 88, 90, 78),
    16: (93, 80, 93, 91, 93, 69), 32: (93, 79, 92, 89, 92, 68),
}

# One MLP (figure 9): devices, model, rows -> collective time in percent of Megatron's, speed-up,
# and the percentage of Megatron's time that collectives take.
MLP = {
    (8, "OPT 175B", 8): (34.6, 1.40, 45.3), (8, "OPT 175B", 16): (62.2, 1.14, 30.6),
    (8, "Llama2 70B", 8): (51.2, 1.30, 47.2), (8, "Llama2 70B", 16): (59.1, 1.17, 34.5),
    (16, "OPT 175B", 8): (22.2, 2.26, 74.2), (16, "OPT 175B", 16): (19.9, 1.72, 58.8),
    (16, "Llama2 70B", 8): (36.5, 1.65, 62.7), (16, "Llama2 70B", 16): (23.0, 1.59, 51.8),
}

# Stages, replicas and tensor degree on 32 devices (figure 10): Megatron's throughput, and theirs.
DEGREES = ((2, 1, 16), (2, 2, 8), (2, 4, 4), (4, 1, 8), (4, 2, 4), (8, 1, 4))
THREE = {
    "OPT 6.7B": ((1.00, 1.306, 1.869, 1.212, 1.557, 1.402),
                 (1.237, 1.721, 1.885, 1.596, 1.571, 1.414)),
    "OPT 175B": ((1.00, 0.938, 0.656, 0.871, 0.547, 0.493),
                 (1.461, 1.163, 0.672, 1.081, 0.562, 0.504)),
    "Llama2 7B": ((1.00, 1.248, 1.874, 1.159, 1.563, 1.405),
                  (1.472, 1.724, 1.894, 1.602, 1.577, 1.420)),
    "Llama2 70B": ((None, 1.00, 0.868, 0.929, 0.723, 0.651),
                   (1.253, 1.267, 0.911, 1.176, 0.759, 0.684)),
    "BLOOM 7B1": ((1.00, 1.324, 1.895, 1.230, 1.579, 1.421),
                  (1.362, 1.823, 1.910, 1.693, 1.591, 1.432)),
    "BLOOM 176B": ((1.00, 0.881, 0.576, 0.818, 0.480, 0.433),
                   (1.400, 1.109, 0.608, 1.031, 0.507, 0.457)),
}

# Milliseconds of the search, by devices (table 2).
SEARCH = {
    "OPT": {4: 85.3, 8: 86.5, 16: 170.9, 32: 5357.3},
    "Llama2": {4: 86.5, 8: 88.8, 16: 185.9, 32: 6070.3},
    "BLOOM": {4: 85.4, 8: 80.2, 16: 165.8, 32: 4153.0},
}


class Mlp(nn.Module):
    """The two (or three) linears of a block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.inner, not shape.gated)
        self.gate = nn.Linear(shape.width, shape.inner, False) if shape.gated else None
        self.down = nn.Linear(shape.inner, shape.width, not shape.gated)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        own = functional.relu(up) if self.gate is None else functional.silu(self.gate(x)) * up
        return self.down(own)


class Layer(nn.Module):
    """A block of any of these models; rotary tables and ALiBi, which cost nothing, are left out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.heads, self.groups = shape.heads, shape.groups
        self.size = shape.width // shape.heads
        self.before, self.after = norm(shape.width), norm(shape.width)
        kv = shape.groups * self.size
        self.q, self.out = (nn.Linear(shape.width, shape.width, not shape.gated) for _ in range(2))
        self.k, self.v = (nn.Linear(shape.width, kv, not shape.gated) for _ in range(2))
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(-3, -2)
                   for f in (self.q, self.k, self.v))
        a = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.groups != self.heads)
        x = x + self.out(a.transpose(-3, -2).flatten(-2))
        return x + self.mlp(self.after(x))


class Model(nn.Module):
    """Three equal layers: the one in the middle is what a deep model consists of."""

    def __init__(self, shape: Shape, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, shape.width)
        self.layers = nn.ModuleList(layer(shape) for _ in range(3))
        self.head = nn.Linear(shape.width, 1024)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, -2), ids.flatten())
