"""Tiny models that are not from `transformers`, or not as it has them: what other people train.

Name -> (model that gives its loss, batch). A package that is missing is told where it is asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
Made = tuple[nn.Module, Batch]
ROWS, LENGTH, VOCABULARY, WIDTH, LAYERS, HEADS, CLASSES, PIXELS = 4, 16, 64, 32, 3, 4, 8, 32


class Classifier(nn.Module):
    """Any network that gives scores, with its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


def _images(pixels: int = PIXELS) -> Batch:
    return {"x": torch.randn(ROWS, 3, pixels, pixels), "y": torch.randint(CLASSES, (ROWS,))}


def _tokens() -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH))


def _timm(name: str, **sizes: Any) -> Callable[[], Made]:
    def make() -> Made:
        import timm

        net = timm.create_model(name, pretrained=False, num_classes=CLASSES, **sizes)
        return Classifier(net), _images()

    return make


# --- diffusion --------------------------------------------------------------------------------


class DiTBlock(nn.Module):
    """Attention and a feed-forward net, each shifted, scaled and gated by the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
                                  for _ in range(2))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"),
                                 nn.Linear(4 * WIDTH, WIDTH))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def attend(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(rows, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(rows, tokens, WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attend(_modulated(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(_modulated(self.norm2(x), shift2, scale2))


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiT(nn.Module):
    def __init__(self, patch: int = 4, channels: int = 4, side: int = 4) -> None:
        super().__init__()
        self.patch, self.channels, self.side = patch, channels, side
        self.embed = nn.Conv2d(channels, WIDTH, patch, patch)
        self.place = nn.Parameter(torch.randn(1, side * side, WIDTH), requires_grad=False)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.label = nn.Embedding(CLASSES + 1, WIDTH)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.head = nn.Linear(WIDTH, patch * patch * channels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        half = WIDTH // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=x.dtype) / half)
        angles = t[:, None].to(x.dtype) * rates[None]
        c = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.label(y)
        h = self.embed(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.condition(c).chunk(2, dim=1)
        h = self.head(_modulated(self.norm(h), shift, scale))
        h = h.reshape(x.shape[0], self.side, self.side, self.patch, self.patch, self.channels)
        images = torch.einsum("nhwpqc->nchpwq", h).reshape(x.shape)
        return ((images - noise) ** 2).mean()


def dit() -> Made:
    x = torch.randn(2, ROWS, 4, 16, 16)
    return DiT(), {"x": x[0], "t": torch.randint(1000, (ROWS,)),
                   "y": torch.randint(CLASSES, (ROWS,)), "noise": x[1]}


class Denoiser(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.net(x, t).sample, noise)


def unet() -> Made:
    from diffusers import UNet2DModel

    net = UNet2DModel(sample_size=16, in_channels=3, out_channels=3, layers_per_block=1,
                      block_out_channels=(16, 32), norm_num_groups=4, attention_head_dim=8,
                      down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                      up_block_types=("AttnUpBlock2D", "UpBlock2D"))
    x = torch.randn(2, ROWS, 3, 16, 16)
    return Denoiser(net), {"x": x[0], "t": torch.randint(1000, (ROWS,)), "noise": x[1]}


class VAE(nn.Module):
    """For flat pictures of 0 to 1; the loss is a sum, as its tutorial has it. What it draws counts
    nothing here: ranks draw other numbers than one process does."""

    noise = 0.0

    def __init__(self, size: int = 64, hidden: int = 32, code: int = 8) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = (nn.Linear(size, hidden), nn.Linear(hidden, code),
                                          nn.Linear(hidden, code))
        self.fc3, self.fc4 = nn.Linear(code, hidden), nn.Linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(x))
        mean, log_variance = self.fc21(h), self.fc22(h)
        deviation = torch.exp(0.5 * log_variance)
        z = mean + self.noise * torch.randn_like(deviation) * deviation
        again = torch.sigmoid(self.fc4(F.relu(self.fc3(z))))
        apart = F.binary_cross_entropy(again, x, reduction="sum")
        return apart - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())


# --- sequences --------------------------------------------------------------------------------


class MambaBlock(nn.Module):
    """A selective scan, step by step."""

    def __init__(self, state: int = 4, kernel: int = 4) -> None:
        super().__init__()
        inner = 2 * WIDTH
        self.state, self.rank = state, WIDTH // 16
        self.norm, self.inp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1)
        self.project = nn.Linear(inner, self.rank + 2 * state, bias=False)
        self.step, self.out = nn.Linear(self.rank, inner), nn.Linear(inner, WIDTH, bias=False)
        self.log_a = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.d = nn.Parameter(torch.ones(inner))

    def scan(self, u: Tensor) -> Tensor:
        delta, b, c = self.project(u).split([self.rank, self.state, self.state], dim=-1)
        delta = F.softplus(self.step(delta))
        decay = torch.exp(torch.einsum("bld,dn->bldn", delta, -torch.exp(self.log_a)))
        added = torch.einsum("bld,bln,bld->bldn", delta, b, u)
        x, ys = torch.zeros_like(added[:, 0]), []
        for i in range(u.shape[1]):
            x = decay[:, i] * x + added[:, i]
            ys.append(torch.einsum("bdn,bn->bd", x, c[:, i]))
        return torch.stack(ys, dim=1) + u * self.d

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.inp(self.norm(x)).chunk(2, dim=-1)
        u = self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.out(self.scan(F.silu(u)) * F.silu(gate))


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(MambaBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        scores = self.norm(x) @ self.embed.weight.T
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def mamba() -> Made:
    return Mamba(), {"ids": _tokens(), "labels": _tokens()}


def hf_mamba() -> Made:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4,
                         num_hidden_layers=LAYERS, time_step_rank=2, use_cache=False)
    ids = _tokens()
    return MambaForCausalLM(config), {"input_ids": ids, "labels": ids}


def lora() -> Made:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH,
                         num_hidden_layers=LAYERS, num_attention_heads=HEADS, use_cache=False,
                         num_key_value_heads=2, max_position_embeddings=LENGTH)
    ranks = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, init_lora_weights=False,
                       target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    ids = _tokens()
    return get_peft_model(LlamaForCausalLM(config), ranks), {"input_ids": ids, "labels": ids}


class WordLanguage(nn.Module):
    """torch's own encoder with the sequence in the first dim, and a loss of logarithms."""

    def __init__(self, is_batch_first: bool) -> None:
        super().__init__()
        self.length_dim = int(is_batch_first)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        place = torch.arange(LENGTH)[:, None] * torch.exp(
            torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        waves = torch.stack([place.sin(), place.cos()], -1).flatten(1)
        self.register_buffer("place", waves.unsqueeze(1 - self.length_dim))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0,
                                           batch_first=is_batch_first)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        length = ids.shape[self.length_dim]
        mask = torch.log(torch.tril(torch.ones(length, length)))
        x = self.embed(ids) * math.sqrt(WIDTH) + self.place
        x = F.log_softmax(self.decoder(self.encoder(x, mask=mask.to(x.dtype))), dim=-1)
        return F.nll_loss(x.view(-1, VOCABULARY), labels.reshape(-1))


def word_language(is_batch_first: bool) -> Made:
    ids, labels = (own if is_batch_first else own.T.contiguous() for own in (_tokens(), _tokens()))
    return WordLanguage(is_batch_first), {"ids": ids, "labels": labels}


# --- two at a time ----------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(cout), nn.BatchNorm2d(cout)
        self.down = nn.Identity() if (cin, stride) == (cout, 1) else nn.Sequential(
            nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.down(x))


class Siamese(nn.Module):
    """Two passes through one ResNet of eight blocks; like pictures lie near each other."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = [width * 2**k for k in (0, 0, 0, 1, 1, 2, 2, 3, 3)]
        blocks = [ResidualBlock(a, b, 1 + (a != b))
                  for a, b in itertools.pairwise(sizes)]
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
                                  nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                  nn.Linear(sizes[-1], 16))

    def forward(self, a: Tensor, b: Tensor, alike: Tensor) -> Tensor:
        apart = F.pairwise_distance(self.body(a), self.body(b))
        return (alike * apart.pow(2) + (1 - alike) * F.relu(4 - apart).pow(2)).mean()


def siamese() -> Made:
    a, b = torch.randn(2, ROWS, 3, 16, 16)
    return Siamese(), {"a": a, "b": b, "alike": torch.tensor([1.0, 0.0] * (ROWS // 2))}


class Distilled(nn.Module):
    """A student that learns from labels and from a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student = _mlp(WIDTH)
        self.teacher = _mlp(2 * WIDTH).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = self.teacher(x).softmax(-1)
        scores = self.student(x)
        apart = F.kl_div(scores.log_softmax(-1), soft, reduction="batchmean")
        return F.cross_entropy(scores, y) + apart


class Penalised(nn.Module):
    """The loss has a part that only looks at the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y) + 1e-3 * sum(
            p.pow(2).sum() for p in self.parameters())


def _mlp(width: int) -> nn.Sequential:
    hidden = [part for _ in range(8) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, width), *hidden, nn.Linear(width, CLASSES))


def _numbers() -> Batch:
    return {"x": torch.randn(ROWS, 16), "y": torch.randint(CLASSES, (ROWS,))}


OTHERS: dict[str, Callable[[], Made]] = {
    "timm_vit": _timm("vit_tiny_patch16_224", img_size=PIXELS, patch_size=8, embed_dim=WIDTH,
                      depth=LAYERS, num_heads=HEADS),
    "timm_swin": _timm("swin_tiny_patch4_window7_224", img_size=PIXELS, patch_size=2,
                       window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
                       drop_path_rate=0.0),
    "timm_convnext": _timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 32, 64)),
    "timm_mobilenetv3": _timm("mobilenetv3_small_050", drop_rate=0.0),
    "dit": dit, "unet": unet, "mamba": mamba, "hf_mamba": hf_mamba, "lora": lora,
    "vae": lambda: (VAE(), {"x": torch.rand(ROWS, 64)}),
    "siamese": siamese,
    "word_language": lambda: word_language(False),
    "word_language_rows_first": lambda: word_language(True),
    "teacher": lambda: (Distilled(), _numbers()),
    "penalty": lambda: (Penalised(), _numbers()),
}


# What a user has to say to `parallelize`.
OPTIONS: dict[str, dict[str, Any]] = {"word_language": {"batch_dim": 1}}


def made(name: str, dtype: torch.dtype = torch.float64) -> Made:
    torch.manual_seed(0)
    model, batch = OTHERS[name]()
    return model.to(dtype).train(), {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in batch.items()}
