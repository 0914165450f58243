"""Are compiled blocks quicker than uncompiled ones, or than steps of another checkout?

Two ranks on the CPU (Gloo).  Both live in one process and take their steps in turn; --beside adds
the steps of the package of another checkout, of an earlier day, in a process of its own on the same
core.  A step is forward, backward and AdamW.  Ratios are medians over rounds, each of a pair:

    python profiling compiled [--quick] [--only gpt,llama,vit] [--plans dp2,tp2,pp2]
        [--beside FOLDER] [--rounds 30]

`all` has every kind of block compiled, `chosen` those that `compile=True` takes by measuring;
ratios are those of `chosen` to the others.  The exit status is 0 if none of them is above 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clock.twin import Twin
from start import pin, start_ranks

WORLD, WARM_UPS = 2, 2
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "num_micro_batches": 4, "schedule": "zero_bubble"},
}


@dataclass(frozen=True)
class Sizes:
    layers: int
    width: int
    seq: int
    rows: int = 8


FULL, QUICK = Sizes(6, 256, 128), Sizes(4, 64, 32)


def gpt(sizes: Sizes) -> tuple[nn.Module, dict[str, Tensor]]:
    from clock import native

    own = native.Sizes(sizes.layers, sizes.width, 4, 1024, sizes.seq, sizes.rows)
    idx, targets = native.global_batch(own)
    return native.seeded_model(own), {"idx": idx, "targets": targets}


def llama(sizes: Sizes) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=1024, hidden_size=sizes.width, intermediate_size=sizes.width * 11 // 4,
        num_hidden_layers=sizes.layers, num_attention_heads=4, num_key_value_heads=2,
        use_cache=False))
    ids = torch.randint(1024, (sizes.rows, sizes.seq))
    return model, {"input_ids": ids, "labels": ids}


def vit(sizes: Sizes) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(
        hidden_size=sizes.width, intermediate_size=4 * sizes.width,
        num_hidden_layers=sizes.layers, num_attention_heads=4, image_size=8 * int(sizes.seq**0.5),
        patch_size=8, num_labels=16))
    side = model.config.image_size
    return model, {"pixel_values": torch.randn(sizes.rows, 3, side, side),
                   "labels": torch.randint(16, (sizes.rows,))}


MODELS = {"gpt": gpt, "llama": llama, "vit": vit}
alive: dict[str, Any] = {}  # in this process


def build(side: str, name: str, plan: str, sizes: Sizes, folder: str = "") -> list[Any]:
    """A side after its first steps: its first loss, the kinds of its blocks, what was chosen."""
    if folder:
        sys.path.insert(0, folder)
    import autopar_torch as ap

    if folder and not Path(ap.__file__).is_relative_to(Path(folder).resolve()):
        raise SystemExit(f"{ap.__file__} is not of {folder}")
    torch.manual_seed(0)
    model, batch = MODELS[name](sizes)
    given, options = ap.Plan.uniform(**PLANS[plan]), {}
    if side == "all":
        from msgspec.structs import replace

        given = replace(given, compiled=tuple(alive["kinds"]))
    if side == "chosen":
        options = {"compile": True}
    parallel = ap.parallelize(model, batch, plan=given, **options)
    if side == "uncompiled":
        alive["kinds"] = [k for k, kind in parallel.graph.kinds.items() if not kind.mutates]
    alive[side] = (parallel, batch, torch.optim.AdamW(parallel.parameters(), lr=1e-4))
    loss = step(side)
    for _ in range(WARM_UPS):
        step(side)
    return [loss, list(getattr(parallel.plan, "compiled", ()))]


def step(side: str) -> float:
    model, batch, optimizer = alive[side]
    loss = model(**batch)
    loss = loss if isinstance(loss, Tensor) else loss.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def timed_ms(side: str) -> float:
    """One step between barriers: the slowest rank's time."""
    dist.barrier()
    begin = time.perf_counter()
    step(side)
    took = torch.tensor([(time.perf_counter() - begin) * 1e3], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def row(name: str, plan: str, sizes: Sizes, rounds: int, beside: Twin | None,
        folder: str) -> tuple[str, bool]:
    """What to print of one model under one plan, and whether nothing was chosen that is slower."""
    alive.clear()
    sides = {side: partial(timed_ms, side) for side in ("uncompiled", "all", "chosen")}
    first = build("uncompiled", name, plan, sizes)[0]
    begin = time.perf_counter()
    loss, chosen = build("chosen", name, plan, sizes)
    start_s = time.perf_counter() - begin
    losses = [loss, build("all", name, plan, sizes)[0]]
    if beside:
        losses.append(beside(partial(build, "before", name, plan, sizes, folder))[0])
        sides["before"] = partial(beside, partial(timed_ms, "before"))
    times: dict[str, list[float]] = {side: [] for side in sides}
    for k in range(rounds):
        for side in sorted(sides, reverse=bool(k % 2)):
            times[side].append(sides[side]())
    usual = {side: median(own) for side, own in times.items()}

    def ratio(side: str) -> float:
        return median(a / b for a, b in zip(times["chosen"], times[side], strict=True))

    off = max(abs(loss - first) / abs(first) for loss in losses)
    ms = " | ".join(f"{usual[side]:.1f}" for side in ("before", "uncompiled", "all", "chosen")
                    if side in usual)
    others = {side: ratio(side) for side in ("before", "uncompiled") if side in usual}
    ratios = " | ".join(f"{own:.3f}" for own in others.values())
    text = f"| {name} | {plan} | {ms} | {ratios} | {', '.join(chosen) or 'none'} | "
    return text + f"{start_s:.0f} s | {off:.0e} |", max(others.values()) <= 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small models, fewer rounds")
    parser.add_argument("--only", default=",".join(MODELS), help="a comma-separated part of them")
    parser.add_argument("--plans", default=",".join(PLANS), help="a comma-separated part of them")
    parser.add_argument("--beside", default="", help="the folder of another checkout")
    parser.add_argument("--rounds", type=int, help="default 30, with --quick 10")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        start_ranks("compiled", sys.argv[1:], WORLD)
        return 0
    pin()
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    sizes, rounds = QUICK if args.quick else FULL, args.rounds or (10 if args.quick else 30)
    good, heads = True, ["before"] * bool(args.beside) + ["uncompiled", "all", "chosen (ms)"]
    heads += ["of before"] * bool(args.beside) + ["of uncompiled", "kinds", "start", "loss off"]
    if dist.get_rank() == 0:
        print(f"| model | plan | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 2)}", flush=True)
    with Twin() if args.beside else contextlib.nullcontext() as beside:
        for name in args.only.split(","):
            for plan in args.plans.split(","):
                text, fine = row(name, plan, sizes, rounds, beside, args.beside)
                good = good and fine
                if dist.get_rank() == 0:
                    print(text, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if good else 1
