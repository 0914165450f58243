"""A transformer by its dimensions, how it is spread over devices, and how a program runs it."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Transformer:
    """Dimensions of a stack of equal layers between an embedding and a head."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    gated: bool = True
    tied: bool = False

    @property
    def kv_width(self) -> int:
        return self.hidden // self.heads * self.kv_heads

    @property
    def layer_params(self) -> float:
        mlp = (3 if self.gated else 2) * self.ffn
        return self.hidden * (2 * self.hidden + 2 * self.kv_width + mlp)

    @property
    def vocab_params(self) -> float:
        return self.vocab * self.hidden

    @property
    def params(self) -> float:
        return self.layers * self.layer_params + (1 if self.tied else 2) * self.vocab_params


@dataclass(frozen=True)
class Recompute:
    """The parts of a forward that the backward runs again."""

    products: float = 0.0
    outputs: float = 0.0  # of what products write: not kept, as they run again
    attention: float = 0.0
    passes: float = 0.0  # over memory
    exchange: float = 0.0

    def towards(self, other: Recompute, part: float) -> Recompute:
        """The mean of layers of which a part does as the other."""
        mine, its = astuple(self), astuple(other)
        return Recompute(*(a + part * (b - a) for a, b in zip(mine, its, strict=True)))


NOTHING, CORE, ALL = Recompute(), Recompute(attention=1.0), Recompute(1.0, 1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Layout:
    """How the work is spread: degrees, micro-batches, what is sharded and computed again."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    virtual: int = 1
    sequence: bool = False  # between tensor-parallel regions, the sequence is split
    zero: int = 0
    zero_group: int = 0  # ranks that share a state (0: all replicas)
    micro_rows: int = 1
    rows: int = 1
    recompute: Recompute = NOTHING
    recompute_by_stage: tuple[Recompute, ...] = ()  # where stages differ
    schedule: str = "1f1b"

    @property
    def num_micro_batches(self) -> int:
        return max(1, round(self.rows / (self.dp * self.micro_rows)))

    @property
    def shards(self) -> int:
        return self.zero_group or self.dp * self.cp


@dataclass(frozen=True)
class Recipe:
    """How the program does it: formats, kernels, and what runs beside computing."""

    precision: str = "bfloat16"
    weight_bytes: float = 2.0
    grad_bytes: float = 4.0
    work_grad_bytes: float = 0.0  # gradients in the format of the weights, beside `grad_bytes`
    state_bytes: float = 12.0  # master weight and two moments
    attention: float = 0.65  # speed of a fused one beside a plain product (0: it is not fused)
    fused: bool = True
    fused_softmax: bool = True
    fused_loss: bool = False
    whole_logits: bool = False  # every tensor-parallel rank sees the scores of all words
    fused_sum: bool = False  # products add to the gradients themselves
    lean: bool = True  # of what is gathered for a product only the own part is kept
    whole_sends: bool = False  # every tensor-parallel rank sends the whole activation
    dropout: bool = False
    overlap_data: bool = True
    travel_bytes: float = 0.0  # a gradient as it travels between replicas (0: as it is kept)
    whole_reduce: bool = False  # ZeRO or not, every replica receives all summed gradients
    overlap_tensor: bool = False  # exchange in pieces beside the products that feed it
    overlap_weight: bool = False  # backward's exchange beside the weight's gradient
    overlap_pipeline: bool = False
