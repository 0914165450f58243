"""Rows of published measurements, read as jobs: a model, a layout, a recipe and the hardware."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from autopar_torch.cluster import Hardware, Link, hardware
from autopar_torch.simulate.transformer import (
    ALL,
    CORE,
    NOTHING,
    Layout,
    Recipe,
    Redo,
    Transformer,
    Worker,
)

Row = dict[str, Any]
Key = tuple[str, str]

# What a row calls its device -> a description; the first that fits.
DEVICES = (
    ("GB300", "GB300"), ("GB200", "GB200"), ("B200", "B200"), ("GH200", "GH200"), ("H200", "H200"),
    ("H800", "H800"), ("H100.*PCIe", "H100-PCIe"), ("H100-96", "H100-96"), ("H100", "H100"), ("A800", "A800"),
    ("A100.*40.*PCIe", "A100-40-PCIe"), ("A100.*PCIe", "A100-80-PCIe"), ("A100.*40", "A100-40"),
    ("A100", "A100-80"), ("V100.*16", "V100-16"), ("V100", "V100-32"), ("Ascend", "Ascend-910B"),
    ("A10G", "A10G"), ("L4", "L4"), ("T4", "T4"),
)  # fmt: skip
UNGATED = re.compile(r"gpt|mpt|opt|nemotron|bloom|falcon|\bT5|turing|MT-NLG", re.I)
OLD = re.compile(r"fp16|fp32 training|mixed \(not stated")  # the years before fused attention
DEEPSPEED = ("bigscience", "sailor_validation")  # its pipeline does not split what it sends
MEGATRON = re.compile("Megatron|NVIDIA|MLPerf|Korthikanti|MindSpeed|Zero Bubble")  # from 2022 on
PRECISIONS = {"sailor_validation": "fp32 training"}  # its memory model: 4 bytes per weight
ASSUMED_VOCAB = 51200
# Parts of a plain product's speed that fused attentions reach: FlashAttention-2 tells of 190-230 of
# 312 TFLOP/s on the A100 and (the paper of FlashAttention-3) of 35 % of the H100, -3 of 75 %.
FLASH_1, FLASH_2, FLASH_2_HOPPER, CUDNN = 0.42, 0.65, 0.35, 0.56


@dataclass(frozen=True)
class Job:
    """A row that can be predicted, and what had to be assumed for it."""

    row: Row
    worker: Worker
    layers: tuple[float, ...] = ()  # per stage, where the row says so
    assumed: tuple[str, ...] = ()
    other: Worker | None = None  # under the other assumption about recompute

    @property
    def step_s(self) -> float | None:
        return self.row["result"].get("step_s") or self.row["derived"].get("step_s")

    @property
    def memory_bytes(self) -> float | None:
        gib = self.row["result"].get("memory_gib")
        return gib * 2**30 if gib else None

    @property
    def name(self) -> str:
        return self.row["id"]

    @property
    def file(self) -> str:
        return self.row["file"]


@dataclass
class Rows:
    """What a folder holds: jobs by (file, id), and rows that cannot be predicted, with the reason."""

    jobs: dict[tuple[str, str], Job] = field(default_factory=dict)
    left_out: list[tuple[str, str, str]] = field(default_factory=list)


def read(folder: Path) -> Rows:
    found = Rows()
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, list) or not content or "parallel" not in content[0]:
            continue
        for row in content:
            row["file"] = path.stem
            reason = missing(row)
            if reason:
                found.left_out.append((path.stem, row["id"], reason))
            else:
                found.jobs[path.stem, row["id"]] = job(row)
    return found


def missing(row: Row) -> str:
    """Why a row cannot be predicted, or nothing."""
    for part, names in (("model", ("layers", "hidden", "ffn", "seq")),
                        ("parallel", ("tp", "pp", "dp")), ("hardware", ("gpu", "count"))):  # fmt: skip
        for name in names:
            if not row[part].get(name):
                return f"{part}.{name} is not stated"
    if not (row["parallel"].get("mbs") and row["parallel"].get("gbs")):
        return "micro-batch or global batch is not stated"
    if "nodes x" in row["hardware"]["gpu"]:
        return "devices of several types"
    if not any(re.search(pattern, row["hardware"]["gpu"]) for pattern, _ in DEVICES):
        return f"no description of {row['hardware']['gpu']}"
    return ""


def job(row: Row) -> Job:
    assumed = tuple(_assumptions(row))
    worker = Worker(model(row), layout(row), recipe(row), machine(row), per_node(row))
    other = None
    if row["parallel"].get("recompute") is None:
        other = replace(worker, layout=replace(worker.layout, redo=ALL))
    return Job(row, worker, layers(row), assumed, other)


def _assumptions(row: Row) -> Iterator[str]:
    if not row["model"].get("vocab"):
        yield f"vocab {ASSUMED_VOCAB}"
    if not row["model"].get("heads"):
        yield "heads of 128"
    if row["parallel"].get("vpp") is None:
        yield "1 virtual stage"
    if row["parallel"].get("zero") is None:
        yield "ZeRO 1"
    if row["parallel"].get("recompute") is None:
        yield "no recompute"


@dataclass(frozen=True)
class MemoryKind:
    """What a source's memory figure counts."""

    name: str = "allocator"
    last_stage: bool = False
    whole_device: bool = False


MEMORY_KINDS = {
    "hf_playbook_sweep": MemoryKind("reserved", last_stage=True),
    "megatron_golden": MemoryKind("allocator", last_stage=True),
    "torchtitan": MemoryKind("reserved"),
    "bigscience": MemoryKind("nvidia-smi", whole_device=True),
    "dlperf_oneflow": MemoryKind("nvidia-smi", whole_device=True),
    "sailor_validation": MemoryKind("device", whole_device=True),
}


def memory_kind(job: Job) -> MemoryKind:
    return MEMORY_KINDS.get(job.file, MemoryKind())


# --- hardware -------------------------------------------------------------------------------------


def machine(row: Row) -> Hardware:
    """The description of the row's device, with the network that the row states."""
    gpu = row["hardware"]["gpu"]
    found = hardware(next(name for pattern, name in DEVICES if re.search(pattern, gpu)))
    rate = network(row["hardware"].get("inter_bw") or "", row["hardware"].get("per_node") or 8)
    if rate:
        found = _with(found, across=Link(found.across.latency_s, rate))
    if (
        "PCIe" in (row["hardware"].get("intra_bw") or "")
        and "NVLink" not in row["hardware"]["intra_bw"]
    ):
        found = _with(found, inside=Link(found.inside.latency_s, 31.5e9))
    return found


def _with(found: Hardware, **changes: Link) -> Hardware:
    return structs.replace(found, **changes)


def network(text: str, devices_per_node: int) -> float:
    """Bytes per second and device: `8x HDR InfiniBand 200 Gb/s per node`, `400 Gb/s per GPU`."""
    match = re.search(r"(?:(\d+)x\D*?)?(\d+) ?Gb/s", text)
    if not match:
        return 0.0
    bits = int(match[1] or 1) * int(match[2]) * 1e9
    return bits / 8 / (1 if "per GPU" in text else devices_per_node)


def per_node(row: Row) -> int:
    """How many devices share the fast links."""
    if "GB200" in row["hardware"]["gpu"] or "GB300" in row["hardware"]["gpu"]:
        return hardware("GB200").per_node
    return row["hardware"].get("per_node") or 8


# --- model ----------------------------------------------------------------------------------------


def model(row: Row) -> Transformer:
    m = row["model"]
    heads = m["heads"] or m["hidden"] // 128
    found = Transformer(m["layers"], m["hidden"], heads, m["kv_heads"] or heads, m["ffn"],
                        m["vocab"] or ASSUMED_VOCAB, m["seq"], tied=tied(row))  # fmt: skip
    return replace(found, gated=gated(row, found))


def gated(row: Row, found: Transformer) -> bool:
    """Three matrices in the MLP or two: as stated, as the parameters say, or as the family has."""
    if row.get("swiglu") is not None:
        return row["swiglu"]
    params = row["model"].get("params")
    if params and found.layers > 1:
        near = {g: abs(replace(found, gated=g).params / params - 1) for g in (True, False)}
        return near[True] < near[False]
    return not UNGATED.search(row["model"]["name"])


def tied(row: Row) -> bool:
    if row.get("tied") is not None:
        return row["tied"]
    if row.get("untied") is not None:
        return not row["untied"]
    return bool(re.search(r"gpt|mpt|opt", row["model"]["name"], re.I))


def layers(row: Row) -> tuple[float, ...]:
    """Layers per stage where a row states them, embedding and head taken off."""
    stated = row["derived"].get("layers_per_stage")
    if stated:
        return tuple(n - (i == 0) - (i == len(stated) - 1) for i, n in enumerate(stated))
    m, p = row["model"], row["parallel"]
    if "nanotron" in row["source"] and p["pp"] > 1:
        return balanced(model(row), p["pp"])
    if (
        p["pp"] > 2
        and (m["layers"] + 2) % (p["pp"] * (p["vpp"] or 1)) == 0
        and m["layers"] % p["pp"]
    ):
        each = (m["layers"] + 2) / p["pp"]  # embedding and head count as layers
        return tuple(each - (s in (0, p["pp"] - 1)) for s in range(p["pp"]))
    return ()


def balanced(found: Transformer, num_stages: int) -> tuple[float, ...]:
    """Layers and head cut where their parameters reach equal parts, as nanotron does."""
    total = found.layers * found.layer_params + found.vocab_params
    counts = [0.0] * num_stages
    for n in range(found.layers):
        reached = (n + 1) * found.layer_params
        counts[min(num_stages - 1, math.ceil(reached / total * num_stages - 1e-9) - 1)] += 1
    return tuple(counts)


# --- layout and recipe ----------------------------------------------------------------------------


def layout(row: Row) -> Layout:
    p = row["parallel"]
    zero = 1 if p["zero"] is None else p["zero"]
    return Layout(
        tp=p["tp"], pp=p["pp"], dp=p["dp"], cp=p["cp"] or 1, virtual=p["vpp"] or 1,
        sequence=bool(p["sp"]), zero=zero, zero_group=zero_group(row),
        micro_rows=p["mbs"], rows=p["gbs"], redo=redo(row), schedule=schedule(row),
    )  # fmt: skip


def zero_group(row: Row) -> int:
    if match := re.search(r"within (\d+)", row.get("zero_group") or ""):
        return min(int(match[1]), row["parallel"]["dp"])
    group = row["derived"].get("fsdp_group") or 0
    return min(group, row["parallel"]["dp"] * (row["parallel"]["cp"] or 1))


def schedule(row: Row) -> str:
    return {"ZB-1p": "zero_bubble", "ZB-2p": "zero_bubble_h2"}.get(
        row.get("schedule") or "", "1f1b"
    )


def redo(row: Row) -> Redo:
    stated = row["parallel"].get("recompute") or "none"
    stages = row["derived"].get("stages")
    if stated.startswith("per-op") and stages:
        part = sum(s["recomputed_ops"] for s in stages) / sum(s["ops"] for s in stages)
        return Redo(part, part, part, part)
    if stated.startswith("full"):
        return ALL
    if "every 2nd layer" in stated:
        return Redo(0.5, 0.5, 0.5, 0.5)
    if "per-op" in stated:  # every second product is kept
        return Redo(products=0.5, passes=1.0)
    return CORE if stated.startswith("selective") else NOTHING


def recipe(row: Row) -> Recipe:
    source, text = row["source"], stated_precision(row)
    kernel = row.get("kernel")
    nvidia = ("NVIDIA" in source and "Megatron-LM" not in source) or "MLPerf" in source
    small_grads = nvidia or re.search("fp16|pure|bf16 mixed", text)  # NeMo's default since 2024
    fsdp, precision = row["parallel"]["zero"] == 3, _precision(text)
    return Recipe(
        precision=precision,
        weight_bytes=4.0 if fsdp or precision == "float32" else 2.0,
        state_bytes=8.0 if fsdp or precision == "float32" else 12.0,
        grad_bytes=2.0 if small_grads else 4.0,
        work_grad_bytes=2.0 if "nanotron" in source else 0.0,
        attention=_attention(row, nvidia),
        fused=_fused(row, kernel),
        fused_softmax=kernel != "torch",
        fused_loss=nvidia or "cross-entropy fusion" in (row["notes"] or ""),
        whole_sends=row["file"] in DEEPSPEED,
        dropout=bool(OLD.search(text)) and precision != "float32",
        overlap_data=_overlaps(row, text),
        overlap_tensor=nvidia or bool(row.get("mc2")) or bool(row.get("async_tp")),
        whole_logits=row["file"] == "aleph_alpha_layouts",
        lean=bool(MEGATRON.search(source)),
        fused_sum=bool(MEGATRON.search(source)),
        overlap_weight=bool(MEGATRON.search(source)),
        overlap_pipeline=nvidia,
    )  # fmt: skip


def stated_precision(row: Row) -> str:
    return (row["parallel"].get("precision") or PRECISIONS.get(row["file"], "bf16")).lower()


def _overlaps(row: Row, text: str) -> bool:
    """Whether gradients travel beside the backward: as stated, or as the program did then."""
    if "NO communication overlap" in (row["notes"] or "") or "nanotron" in row["source"]:
        return False
    return row.get("overlap_grad_reduce", not OLD.search(text)) is not False


def _attention(row: Row, nvidia: bool) -> float:
    """What a row's kernel reaches, relative to a plain product."""
    kernel = row.get("kernel") or ""
    text = stated_precision(row)
    if not ("flash" in kernel if kernel else row.get("flash_attention", not OLD.search(text))):
        return 0.0
    if "v1" in kernel or ("llm-foundry" in row["source"] and "A100" in row["hardware"]["gpu"]):
        return FLASH_1
    if re.search("H100|H200|H800|B200|B300", row["hardware"]["gpu"]):
        return CUDNN if nvidia else FLASH_2_HOPPER
    return FLASH_2


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
