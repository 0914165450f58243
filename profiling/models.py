"""The small models that the measuring scripts train: model and global batch, by name."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from zoo import NanoGPT

VOCAB, SEQ, ROWS = 512, 64, 8


Made = tuple[nn.Module, dict[str, Tensor]]


def gpt(width: int = 192, layers: int = 4, rows: int = ROWS) -> Made:
    torch.manual_seed(0)
    model = NanoGPT(VOCAB, width, 4, layers, SEQ)
    ids = torch.randint(VOCAB, (rows, SEQ + 1))
    return model, {"idx": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def llama(width: int = 192, layers: int = 4, rows: int = ROWS) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=SEQ, use_cache=False,
    )
    ids = torch.randint(VOCAB, (rows, SEQ))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def opt(width: int = 192, layers: int = 4, rows: int = ROWS) -> Made:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=width, word_embed_proj_dim=width, ffn_dim=4 * width,
        num_hidden_layers=layers, num_attention_heads=4, max_position_embeddings=SEQ,
        dropout=0.0, use_cache=False,
    )
    ids = torch.randint(VOCAB, (rows, SEQ))
    return OPTForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def vit(width: int = 192, layers: int = 4, rows: int = ROWS) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=3 * width, image_size=64, patch_size=8, num_labels=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    labels = torch.randint(16, (rows,))
    return ViTForImageClassification(config), {"pixel_values": torch.randn(rows, 3, 64, 64),
                                               "labels": labels}


MODELS = {"gpt": gpt, "llama": llama, "vit": vit, "opt": opt}
