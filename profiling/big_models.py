"""Large models on meta tensors, as `autopar` takes them: `profiling/big_models.py:llama_7b`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Tensor]]


def _llama(seq: int, **sizes: Any) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes))
        ids = torch.zeros(1, seq, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def llama_7b(seq: int = 4096, layers: int = 32) -> Made:
    return _llama(seq, hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers,
                  num_attention_heads=32, vocab_size=32000)


def llama_8b_128k(seq: int = 2**17) -> Made:
    """As Llama 3.1 8B, but for its vocabulary."""
    return _llama(seq, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                  num_attention_heads=32, num_key_value_heads=8, vocab_size=32000)


def qwen_7b_128k(seq: int = 2**17) -> Made:
    """With the heads of Qwen2.5 7B, which eight devices cannot share."""
    return _llama(seq, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                  num_attention_heads=28, num_key_value_heads=4, vocab_size=32000)


def llama_13b(seq: int = 4096) -> Made:
    return _llama(seq, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40,
                  num_attention_heads=40, vocab_size=32000)


def llama_70b(seq: int = 4096) -> Made:
    return _llama(seq, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                  num_attention_heads=64, num_key_value_heads=8, vocab_size=32000)


def llama_405b(seq: int = 8192) -> Made:
    return _llama(seq, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126,
                  num_attention_heads=128, num_key_value_heads=8, vocab_size=128256)


def gpt3_175b(seq: int = 2048) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": seq}
    config = GPT2Config(vocab_size=51200, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, tie_word_embeddings=False, **sizes)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        ids = torch.zeros(1, seq, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}
