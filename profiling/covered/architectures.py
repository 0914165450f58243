"""Tiny random models of every architecture that `transformers` has for a task.

A configuration is the architecture's own, with every size that is known by name made small. What
drops values is turned off; what draws numbers after that is left out, as our numbers are not those
of one process. All is computed in float64.
"""

from __future__ import annotations

import copy
import itertools
import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from covered import others

OTHER = "others"
RATE = 0.1
ROWS, LENGTH, VOCABULARY, WIDTH, LAYERS, CLASSES, PIXELS = 4, 16, 64, 32, 4, 2, 32
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
# (size, the names under which configurations know it)
SIZES: tuple[tuple[float | bool, str], ...] = (
    (VOCABULARY, "vocab_size intermediate_size ffn_dim n_inner d_ff hidden_dim encoder_ffn_dim "
    "decoder_ffn_dim ffn_hidden_size max_position_embeddings n_positions n_ctx max_seq_len "
    "max_target_positions max_source_positions"),
    (WIDTH, "hidden_size pooler_hidden_size d_model n_embd dim embed_dim embedding_size "
    "word_embed_proj_dim emb_dim image_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads "
    "num_heads attention_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts time_step_rank conv_kernel mamba_n_heads"),
    (2, "encoder_layers decoder_layers num_decoder_layers num_encoder_layers num_key_value_heads "
    "num_kv_heads eos_token_id decoder_start_token_id sep_token_id num_experts_per_tok moe_topk "
    "moe_k type_vocab_size mamba_expand index_n_heads num_labels"),
    (8, "head_dim kv_channels d_kv attention_head_size qk_rope_head_dim qk_nope_head_dim "
    "v_head_dim rotary_dim index_topk index_head_dim sliding_window attention_window patch_size "
    "state_size mamba_d_state"),
    (16, "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank "
    "qk_head_dim mamba_d_head"),
    (3, "num_channels"),
    (1, "bos_token_id n_shared_experts first_k_dense_replace n_group topk_group mamba_n_groups"),
    (0, "pad_token_id"),
    (0.0, "hidden_dropout_prob attention_probs_dropout_prob attention_dropout hidden_dropout "
    "resid_pdrop embd_pdrop attn_pdrop dropout activation_dropout residual_dropout "
    "embedding_dropout dropout_rate drop_path_rate classifier_dropout layerdrop "
    "encoder_layerdrop decoder_layerdrop attn_dropout resid_dropout ffn_dropout ffn_dropout_rate"),
    (False, "use_cache output_router_logits"),
)
# Where a configuration has a list, one number for each of its entries.
EACH = {"depths": 2, "num_heads": 2, "num_attention_heads": 2, "hidden_sizes": WIDTH,
        "embed_dim": WIDTH, "stage_in_channels": WIDTH, "stage_mid_channels": 8,
        "stage_out_channels": WIDTH, "embed_dims": WIDTH}
NAMED = [(name, size) for size, names in SIZES for name in names.split()]
VARIANTS: tuple[dict[str, int], ...] = (
    {}, {"num_key_value_heads": 4}, {"num_key_value_heads": 4, "head_dim": 16},
    {"num_key_value_heads": 4, "num_hidden_layers": 2}, {"patch_size": 2}, {"patch_size": 4},
)
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types",
             "attn_layer_indices")
PARTS = ("text_config", "vision_config", "encoder", "decoder")
DROPS = ("p", "dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "dropout_p")
Batch = dict[str, Tensor]


class Architecture(NamedTuple):
    task: str
    name: str  # the type of the configuration
    class_name: str


def listed(task: str) -> list[Architecture]:
    if task == OTHER:
        return [Architecture(task, name, "") for name in others.OTHERS]
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, TASKS[task]).items()
    return [Architecture(task, name, own if isinstance(own, str) else own[0])
            for name, own in found]


def batch(own: Architecture, dtype: torch.dtype = torch.float64) -> Batch:
    task = own.task
    if task == OTHER:
        return others.made(own.name, dtype)[1]
    draw = torch.Generator().manual_seed(7)
    labels = torch.randint(CLASSES, (ROWS,), generator=draw)
    if task == "image":
        pixels = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=draw, dtype=dtype)
        return {"pixel_values": pixels, "labels": labels}
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=draw)
    ids[:, -1] = 2  # the end, which some classifiers look for
    return {"input_ids": ids, "labels": labels if task == "sequence" else ids.clone()}


def build(own: Architecture) -> nn.Module:
    """A model whose steps are finite and repeat themselves, in float64 unless its code has other
    numbers in it; else the first reason why not."""
    reasons: list[Exception] = []
    for dtype, variant in itertools.product((torch.float64, torch.float32), VARIANTS):
        try:
            model = _quiet(_made(own, variant)).to(dtype).train()
            _double_inside()
            first, again = (losses(copy.deepcopy(model), own, seed) for seed in range(2))
        except TimeoutError:
            raise
        except Exception as error:  # whatever a configuration of guessed sizes leads to
            reasons.append(error)
            continue
        if not torch.isfinite(torch.tensor(first)).all():
            raise ValueError("its loss is no number")
        if first != again:
            raise ValueError("two runs differ: it draws numbers")
        return model
    raise reasons[0]


def losses(model: nn.Module, own: Architecture, seed: int, steps: int = 2) -> list[float]:
    """Those of some steps of plain gradient descent."""
    given = batch(own, dtype_of(model))
    torch.manual_seed(seed)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE), []
    for _ in range(steps):
        loss = loss_of(model(**given))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


class _Doubled(ModuleType):
    """torch, where float32 means float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _double_inside() -> None:
    """Much code computes norms and softmax in float32 whatever its weights are. Rounding would then
    hide, or fake, a difference."""
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    for name, module in list(sys.modules.items()):
        own = name.startswith(("transformers.", "timm.", "diffusers."))
        if own and vars(module).get("torch") is torch:
            module.torch = _Doubled("torch")  # type: ignore[attr-defined]


def _made(own: Architecture, variant: dict[str, int]) -> nn.Module:
    if own.task == OTHER:
        return others.made(own.name)[0]
    import transformers
    from transformers.integrations import moe

    moe._can_use_grouped_mm = lambda *_: False  # torch has no grouped product in float64
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[own.name]()
    parts = [getattr(config, name, None) for name in PARTS]
    for part in [config, *(part for part in parts if hasattr(part, "to_dict"))]:
        _shrink(part, dict(NAMED) | variant)
    if own.task == "seq2seq" and not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 2
    if own.task == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    return getattr(transformers, own.class_name)(config)


def _shrink(config: Any, sizes: dict[str, Any]) -> None:
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", None) or {})
    for name, size in {**EACH, **sizes}.items():
        own = getattr(config, name, None)
        if isinstance(own, (list, tuple)):
            if name in EACH or isinstance(size, float):
                _set(config, name, type(own)([EACH.get(name, size)] * len(own)))
        elif name in known:
            _set(config, name, size)
    layers = next((n for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
                   if isinstance(n := getattr(config, name, None), int)), LAYERS)
    for name in PER_LAYER:
        own = getattr(config, name, None)
        if isinstance(own, (list, tuple)) and own:
            _set(config, name, (list(own) * layers)[:layers])
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if isinstance(rope, dict) and rope.get("mrope_section"):
        rope["mrope_section"] = [1, 1, 2]


def _set(config: Any, name: str, value: Any) -> None:
    """Some configurations refuse to change what they derive."""
    try:
        setattr(config, name, value)
    except (AttributeError, NotImplementedError, ValueError, TypeError):
        return


def _quiet(model: nn.Module) -> nn.Module:
    """Nothing is dropped."""
    for module in model.modules():
        for name in DROPS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model
