"""Rows of published measurements, read as jobs: a model, a layout, a recipe and the hardware."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from autopar_torch.cluster import Link
from autopar_torch.datasheets import Hardware, hardware
from published.recipes import ACESO_LAYER, SCALING, Row, layout, recipe
from published.roofline import Worker
from published.transformer import ALL, Transformer

Key = tuple[str, str]

# What a row calls its device -> a description; the first that fits.
DEVICES = (
    ("GB300", "GB300"), ("GB200", "GB200"), ("B200", "B200"), ("GH200", "GH200"), ("H200", "H200"),
    ("H800", "H800"), ("H100.*PCIe", "H100-PCIe"), ("H100-96", "H100-96"), ("H100", "H100"),
    ("A800", "A800"), ("A100.*40.*PCIe", "A100-40-PCIe"), ("A100.*PCIe", "A100-80-PCIe"),
    ("A100.*40", "A100-40"), ("A100", "A100-80"), ("V100.*16", "V100-16"), ("V100", "V100-32"),
    ("Ascend", "Ascend-910B"), ("A10G", "A10G"), ("L4", "L4"), ("T4", "T4"),
)
UNGATED = re.compile(r"gpt|mpt|opt|nemotron|bloom|falcon|\bT5|turing|MT-NLG", re.I)
# What collectives reach over it beside InfiniBand, fitted on bigscience: hosts move the data.
OMNI_PATH = 0.4
# Bytes per second of a node with A100 whose network is not told: 400 Gb/s, what clouds sell most.
# Aleph Alpha's and torchtitan's rows bear it out; the DGX has four times that.
CLOUD = 50e9
ASSUMED_VOCAB = 51200
NEEDED = (
    *(("model", name) for name in ("layers", "hidden", "ffn", "seq")),
    *(("parallel", name) for name in ("tp", "pp", "dp")),
    ("hardware", "gpu"),
    ("hardware", "count"),
)


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
    """What a folder holds: jobs by (file, id), and (file, id, reason) of rows without one."""

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
    for part, name in NEEDED:
        if not row[part].get(name):
            return f"{part}.{name} is not stated"
    if row["model"].get("experts"):
        return "a mixture of experts"
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
        other = replace(worker, layout=replace(worker.layout, recompute=ALL))
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
    stated = network(row["hardware"].get("inter_bw") or "", 8)
    if "A100" in row["hardware"]["gpu"] and row["hardware"]["count"] > per_node(row) and not stated:
        yield "a network of 400 Gb/s per node"


@dataclass(frozen=True)
class MemoryKind:
    """What a source's memory figure counts."""

    name: str = "allocator"
    stage: int | None = None  # of whom it is told; None: the one that holds most
    whole_device: bool = False


MEMORY_KINDS = {
    "hf_playbook_sweep": MemoryKind("reserved", stage=-1),
    "megatron_golden": MemoryKind("allocator", stage=-1),
    "mlperf": MemoryKind("allocator", stage=0),
    "torchtitan": MemoryKind("reserved"),
    "nvidia_dgxc": MemoryKind("reserved"),
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
    if not rate and found.device.name.startswith("A100"):
        rate = CLOUD / 8
    if rate:
        link = Link(found.fabric.link.latency_s, rate)
        found = structs.replace(found, network=structs.replace(found.fabric, link=link))
    if (
        "PCIe" in (row["hardware"].get("intra_bw") or "")
        and "NVLink" not in row["hardware"]["intra_bw"]
    ):
        found = structs.replace(found, inside=Link(found.inside.latency_s, 31.5e9))
    return found


def network(text: str, devices_per_node: int) -> float:
    """Bytes per second and device: `8x HDR InfiniBand 200 Gb/s per node`, `400 Gb/s per GPU`."""
    match = re.search(r"(?:(\d+)x\D*?)?(\d+) ?Gb/s", text)
    if not match:
        return 0.0
    bits = int(match[1] or 1) * int(match[2]) * 1e9 * (OMNI_PATH if "Omni-Path" in text else 1)
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
                        m["vocab"] or ASSUMED_VOCAB, m["seq"], tied=tied(row))
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
    if stages := row["derived"].get("stages"):
        return tuple(layers_of_operators([stage["ops"] for stage in stages]))
    m, p = row["model"], row["parallel"]
    if "nanotron" in row["source"] and p["pp"] > 1:
        return balanced(model(row), p["pp"])
    if row["file"] in SCALING:
        return uniform(m["layers"], p["pp"])
    if (
        p["pp"] > 2
        and (m["layers"] + 2) % (p["pp"] * (p["vpp"] or 1)) == 0
        and m["layers"] % p["pp"]
    ):
        each = (m["layers"] + 2) / p["pp"]  # embedding and head count as layers
        return tuple(each - (s in (0, p["pp"] - 1)) for s in range(p["pp"]))
    return ()


def layers_of_operators(counts: list[int]) -> Iterator[float]:
    """Aceso cuts between operators: an embedding, so many per layer, a norm and the head."""
    for stage, count in enumerate(counts):
        yield (count - (stage == 0) - 2 * (stage == len(counts) - 1)) / ACESO_LAYER


def balanced(found: Transformer, num_stages: int) -> tuple[float, ...]:
    """As nanotron cuts: a stage ends with the block that exceeds its part of the parameters."""
    total = found.layers * found.layer_params + found.vocab_params
    counts, stage = [0.0] * num_stages, 0
    for n in range(found.layers):
        counts[stage] += 1
        stage += (n + 1) * found.layer_params > total * (stage + 1) / num_stages
    return tuple(counts)


def uniform(num_layers: int, num_stages: int) -> tuple[float, ...]:
    """Equal numbers of modules, the earlier stages one more: embedding, layers, norm and head."""
    least, more = divmod(num_layers + 3, num_stages)
    counts = [float(least + (stage < more)) for stage in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 2
    return tuple(counts)
