"""How a published run was laid out, and how its program worked: what a row or its source says."""

from __future__ import annotations

import re
from typing import Any

from published.transformer import ALL, CORE, NOTHING, Layout, Recipe, Recompute

Row = dict[str, Any]

OLD = re.compile(r"fp16|fp32 training|mixed \(not stated")  # the years before fused attention
# Aleph Alpha's program (github.com/Aleph-Alpha/scaling): once a step it sums gradients in 32 bit on
# every replica and gathers the weights, beside nothing; a pipeline sends whole activations.
SCALING = ("aleph_alpha_layouts",)
DEEPSPEED = ("sailor_validation",)  # its pipeline does not split what it sends
MEGATRON = re.compile("Megatron|NVIDIA|MLPerf|Korthikanti|MindSpeed|Zero Bubble")  # from 2022 on
LEAN = re.compile(f"{MEGATRON.pattern}|OneFlow")  # keeps and copies no more than it must
# Megatron drops a tenth unless told otherwise, which the model_config.yaml of these runs does not.
DROPPING = ("megatron_golden",)
BLACKWELL = "B200|B300"
PRECISIONS = {"sailor_validation": "fp32 training"}  # its memory model: 4 bytes per weight
# Parts of a plain product's speed that fused attentions reach: FlashAttention-2 tells of 190-230 of
# 312 TFLOP/s on the A100 and (the paper of FlashAttention-3) of 35 % of the H100, -3 of 75 %.
DETERMINISTIC = 0.8  # a backward that sums in a fixed order
FLASH_1, FLASH_2, FLASH_2_HOPPER, CUDNN = 0.42, 0.65, 0.35, 0.56
# cuDNN had no such backward on Blackwell, so Transformer Engine takes FlashAttention-2 (its #2130),
# whose instructions are no faster there than on Hopper: a smaller part of twice the speed.
FLASH_2_BLACKWELL = 0.16


def layout(row: Row) -> Layout:
    p = row["parallel"]
    zero = 1 if p["zero"] is None else p["zero"]
    return Layout(
        tp=p["tp"], pp=p["pp"], dp=p["dp"], cp=p["cp"] or 1, virtual=p["vpp"] or 1,
        sequence=bool(p["sp"]), zero=zero, zero_group=zero_group(row),
        micro_rows=p["mbs"], rows=p["gbs"], recompute=recompute(row),
        recompute_by_stage=recompute_by_stage(row), schedule=schedule(row),
    )


def zero_group(row: Row) -> int:
    if match := re.search(r"within (\d+)", row.get("zero_group") or ""):
        return min(int(match[1]), row["parallel"]["dp"])
    group = row["derived"].get("fsdp_group") or 0
    return min(group, row["parallel"]["dp"] * (row["parallel"]["cp"] or 1))


def schedule(row: Row) -> str:
    return {"ZB-1p": "zero_bubble", "ZB-2p": "zero_bubble_h2"}.get(
        row.get("schedule") or "", "1f1b"
    )


def recompute(row: Row) -> Recompute:
    stated = row["parallel"].get("recompute") or "none"
    if stated.startswith("full"):
        return ALL
    if "every 2nd layer" in stated:
        return NOTHING.towards(ALL, 0.5)
    if "per-op" in stated:  # every second product is kept
        return Recompute(products=0.5, outputs=0.5, passes=1.0)
    return CORE if stated.startswith("selective") else NOTHING


# Aceso (microsoft/SuperScaler) counts an embedding, so many operators per layer, a norm and the
# head. Until a stage fits, its search recomputes the operators of every layer that keep most: so
# many more, and then so much of a layer. The order is read off a plan in Mist's artifact.
ACESO_LAYER = 13
ACESO = (
    (2, Recompute(attention=0.6)),  # dropout, and the product with the values
    (2, Recompute(attention=1.0)),  # scores and their softmax
    (2, Recompute(1 / 3, 1 / 2, attention=1.0)),  # the MLP's first product, and its activation
    (1, Recompute(7 / 12, 7 / 8, attention=1.0)),  # queries, keys and values
    (2, Recompute(7 / 12, 7 / 8, attention=1.0, passes=1 / 6)),  # dropout and norm after attention
    (4, ALL),
)


def recompute_by_stage(row: Row) -> tuple[Recompute, ...]:
    stages = row["derived"].get("stages") or ()
    return tuple(_recomputed(s["recomputed_ops"] * ACESO_LAYER / s["ops"]) for s in stages)


def _recomputed(per_layer: float) -> Recompute:
    """Of so many operators in the mean of a stage's layers."""
    found = NOTHING
    for count, recompute in ACESO:
        found = found.towards(recompute, min(1.0, max(0.0, per_layer) / count))
        per_layer -= count
    return found


def recipe(row: Row) -> Recipe:
    source, text = row["source"], stated_precision(row)
    kernel = row.get("kernel")
    nvidia = ("NVIDIA" in source and "Megatron-LM" not in source) or "MLPerf" in source
    small_grads = nvidia or re.search("fp16|pure|bf16 mixed", text)  # NeMo's default since 2024
    fsdp, precision = row["parallel"]["zero"] == 3, _precision(text)
    return Recipe(
        precision=precision,
        weight_bytes=_weight_bytes(row, text, fsdp or precision == "float32"),
        state_bytes=8.0 if fsdp or precision == "float32" else 12.0,
        grad_bytes=2.0 if small_grads else 4.0,
        work_grad_bytes=2.0 if "nanotron" in source else 0.0,
        attention=_attention(row, nvidia),
        fused=_fused(row, kernel),
        fused_softmax=kernel != "torch",
        fused_loss=nvidia or "cross-entropy fusion" in (row["notes"] or ""),
        whole_sends=row["file"] in (*DEEPSPEED, *SCALING),
        travel_bytes=4.0 if row["file"] in SCALING else 0.0,
        whole_reduce=row["file"] in SCALING,
        dropout=_drops(row, text) and precision != "float32",
        overlap_data=_overlaps(row, text),
        overlap_tensor=nvidia or bool(row.get("mc2")) or bool(row.get("async_tp")),
        whole_logits=row["file"] in SCALING,
        lean=bool(LEAN.search(source)),
        fused_sum=bool(MEGATRON.search(source)),
        overlap_weight=bool(MEGATRON.search(source)),
        overlap_pipeline=nvidia,
    )


def stated_precision(row: Row) -> str:
    return (row["parallel"].get("precision") or PRECISIONS.get(row["file"], "bf16")).lower()


def _weight_bytes(row: Row, text: str, whole: bool) -> float:
    """Weights that are kept in 8 bit take as much as in 16 where products want them transposed too,
    which they do before Blackwell (Transformer Engine's `non_tn_fp8_gemm_supported`)."""
    if whole:
        return 4.0
    return 1.0 if "fp8 params" in text and re.search(BLACKWELL, row["hardware"]["gpu"]) else 2.0


def _drops(row: Row, text: str) -> bool:
    """Gated models are trained without dropout."""
    return bool(OLD.search(text)) or (row["file"] in DROPPING and not row.get("swiglu"))


def _overlaps(row: Row, text: str) -> bool:
    """Whether gradients travel beside the backward: as stated, or as the program did then."""
    if row["file"] in SCALING or "nanotron" in row["source"]:
        return False
    if "NO communication overlap" in (row["notes"] or ""):
        return False
    return row.get("overlap_grad_reduce", not OLD.search(text)) is not False


def _attention(row: Row, nvidia: bool) -> float:
    """What a row's kernel reaches, relative to a plain product."""
    kernel = row.get("kernel") or ""
    text = stated_precision(row)
    if not ("flash" in kernel if kernel else row.get("flash_attention", not OLD.search(text))):
        return 0.0
    part = DETERMINISTIC if row.get("deterministic") else 1.0
    if "v1" in kernel or ("llm-foundry" in row["source"] and "A100" in row["hardware"]["gpu"]):
        return part * FLASH_1
    if row.get("deterministic") and re.search(BLACKWELL, row["hardware"]["gpu"]):
        return part * FLASH_2_BLACKWELL
    if re.search(f"H100|H200|H800|{BLACKWELL}", row["hardware"]["gpu"]):
        engine = re.search(
            "transformer_engine|via TE", f"{row.get('transformer_impl')} {row['notes']}"
        )
        return part * (CUDNN if nvidia or engine else FLASH_2_HOPPER)
    return part * FLASH_2


def _precision(text: str) -> str:
    if "fp32 training" in text:
        return "float32"
    if "fp4" in text:
        return "float4"
    return "float8" if "fp8" in text or "float8" in text else "bfloat16"


def _fused(row: Row, kernel: str | None) -> bool:
    if kernel:
        return "RMS" in kernel
    return row.get("compile", row["parallel"]["zero"] != 3)
