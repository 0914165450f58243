"""Small random models, built from code: the claim "any model" is tested on these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
VOCAB, SEQ = 96, 16


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        parts = self.qkv(self.ln_1(x)).split(e, dim=2)
        q, k, v = (p.view(b, s, self.heads, e // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, s, e))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """A nanoGPT-like language model with tied embeddings, returning (logits, loss)."""

    def __init__(self, vocab: int = VOCAB, width: int = 32, heads: int = 4, layers: int = 4,
                 seq: int = SEQ) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList([NanoBlock(width, heads) for _ in range(layers)])
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1),
                               ignore_index=-1)
        return logits, loss


class Encoder(nn.Module):
    """torch's own TransformerEncoder under a classifier."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(VOCAB, 32)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(32, 8)

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(self.embed(ids)).mean(1)), label)


class ResBlock(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(cout), nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or cin != cout:
            self.down = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False),
                                      nn.BatchNorm2d(cout))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    """A small ResNet: batch statistics, in-place activations, max-pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(ResBlock(8, 8), ResBlock(8, 8))
        self.layer2 = nn.Sequential(ResBlock(8, 16, 2), ResBlock(16, 16))
        self.fc = nn.Linear(16, 8)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(image))), 2)
        x = F.adaptive_avg_pool2d(self.layer2(self.layer1(x)), 1)
        return F.cross_entropy(self.fc(torch.flatten(x, 1)), label)


class UNet(nn.Module):
    """Skip connections that span the whole depth; regression with a mean over all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.mid = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up1 = nn.ConvTranspose2d(16, 16, 2, 2)
        self.merge1 = nn.Conv2d(32, 8, 3, padding=1)
        self.up2 = nn.Upsample(scale_factor=2, mode="nearest")
        self.merge2 = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        a = F.relu(self.down1(image))
        b = F.relu(self.down2(F.avg_pool2d(a, 2)))
        c = self.up1(self.mid(F.max_pool2d(b, 2)))
        c = F.relu(self.merge1(torch.cat([c, b], 1)))
        return F.mse_loss(self.merge2(torch.cat([self.up2(c), a], 1)), target)


class BranchMLP(nn.Module):
    """Branches, a shared layer used twice, a parameter without a module, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(10, 24)
        self.left, self.right = nn.Linear(24, 24), nn.Linear(24, 24)
        self.shared = nn.Linear(24, 24)
        self.scale = nn.Parameter(torch.ones(24))
        self.out = nn.Linear(48, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.inp(x))
        left = self.shared(F.relu(self.left(h))) * self.scale
        right = self.shared(torch.sigmoid(self.right(h)))
        return F.cross_entropy(self.out(torch.cat([left, right], -1)), y)


def _tokens(rows: int, seed: int, pad: bool) -> Batch:
    """A batch of token ids whose rows carry different numbers of real labels."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, SEQ), generator=gen)
    labels, mask = ids.clone(), torch.ones_like(ids)
    if pad:
        lengths = torch.randint(SEQ // 3, SEQ + 1, (rows,), generator=gen)
        lengths[0] = SEQ
        dead = torch.arange(SEQ)[None] >= lengths[:, None]
        labels[dead], mask[dead], ids[dead] = -100, 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _seq2seq(rows: int, seed: int, pad: bool) -> Batch:
    batch = _tokens(rows, seed, pad)
    other = _tokens(rows, seed + 1000, pad)
    return {**batch, "labels": other["labels"]}


def _nano(rows: int, seed: int, pad: bool) -> Batch:
    batch = _tokens(rows, seed, pad)
    targets = batch["labels"].roll(-1, 1)
    return {"idx": batch["input_ids"], "targets": targets.where(targets != -100, -1)}


def _classes(rows: int, seed: int, pad: bool) -> Batch:
    gen = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(0, VOCAB, (rows, SEQ), generator=gen),
            "label": torch.randint(0, 8, (rows,), generator=gen)}


def _images(key: str, label: str) -> Callable[[int, int, bool], Batch]:
    def make(rows: int, seed: int, pad: bool) -> Batch:
        gen = torch.Generator().manual_seed(seed)
        image = torch.randn(rows, 3, 16, 16, generator=gen)
        if label == "target":
            return {key: image, label: torch.randn(rows, 3, 16, 16, generator=gen)}
        return {key: image, label: torch.randint(0, 8, (rows,), generator=gen)}

    return make


def _mlp_batch(rows: int, seed: int, pad: bool) -> Batch:
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (rows,), generator=gen)
    if pad:
        y[1::3] = -100
    return {"x": torch.randn(rows, 10, generator=gen), "y": y}


def _hf(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers as T

        head, config = name.split(":")
        settings = getattr(T, config)(**options)
        settings.use_cache = False
        return getattr(T, head)(settings)

    return build


_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
_LLAMA = {**_SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2}
_NO_DROP = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int, bool], Batch]]] = {
    "gpt2": (_hf("GPT2LMHeadModel:GPT2Config", vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4,
                 n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), _tokens),
    "llama": (_hf("LlamaForCausalLM:LlamaConfig", **_LLAMA), _tokens),
    "qwen3": (_hf("Qwen3ForCausalLM:Qwen3Config", **_LLAMA, head_dim=8), _tokens),
    "mistral": (_hf("MistralForCausalLM:MistralConfig", **_LLAMA, sliding_window=8), _tokens),
    "gemma": (_hf("GemmaForCausalLM:GemmaConfig", **_LLAMA, head_dim=8), _tokens),
    "opt": (_hf("OPTForCausalLM:OPTConfig", **_SIZES, ffn_dim=64, word_embed_proj_dim=32,
                dropout=0.0, max_position_embeddings=64), _tokens),
    "bloom": (_hf("BloomForCausalLM:BloomConfig", vocab_size=VOCAB, hidden_size=32, n_layer=4,
                  n_head=4, hidden_dropout=0.0, attention_dropout=0.0), _tokens),
    "neox": (_hf("GPTNeoXForCausalLM:GPTNeoXConfig", **_SIZES, intermediate_size=64,
                 hidden_dropout=0.0, attention_dropout=0.0), _tokens),
    "phi": (_hf("PhiForCausalLM:PhiConfig", **_SIZES, intermediate_size=64, resid_pdrop=0.0,
                embd_pdrop=0.0, attention_dropout=0.0), _tokens),
    "bert": (_hf("BertForMaskedLM:BertConfig", **_SIZES, intermediate_size=64, **_NO_DROP),
             _tokens),
    "t5": (_hf("T5ForConditionalGeneration:T5Config", vocab_size=VOCAB, d_model=32, d_kv=8,
               d_ff=64, num_layers=3, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
               pad_token_id=0), _seq2seq),
    "vit": (_hf("ViTForImageClassification:ViTConfig", hidden_size=32, num_hidden_layers=4,
                num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
                num_labels=8, **_NO_DROP), _images("pixel_values", "labels")),
    "mixtral": (_hf("MixtralForCausalLM:MixtralConfig", **_LLAMA, num_local_experts=4,
                    experts_implementation="batched_mm"), _tokens),
    "nanogpt": (NanoGPT, _nano),
    "encoder": (Encoder, _classes),
    "resnet": (ResNet, _images("image", "label")),
    "unet": (UNet, _images("image", "target")),
    "mlp": (BranchMLP, _mlp_batch),
}
OWN: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int, bool], Batch]]] = {}
"""Models of one test file; no table that runs the whole zoo sees them."""


def build(name: str, seed: int = 0) -> nn.Module:
    """The model, the same values in every process."""
    torch.manual_seed(seed)
    return (MODELS | OWN)[name][0]().train()


def batch(name: str, rows: int, seed: int = 1, pad: bool = False) -> Batch:
    """A global batch of so many rows; with `pad`, rows with different numbers of labels."""
    return (MODELS | OWN)[name][1](rows, seed, pad)
