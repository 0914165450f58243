"""What does one GPU say of predictions, memory, kernels and speed?

    python profiling gpu --quick      # a Llama of 0.4 billion parameters
    python profiling gpu              # and one of 1.1 billion: 20 configurations

Tokens per second beside HF's model as it is and compiled; predicted beside measured step and memory
over numbers of micro-batches and recompute; whether attention runs in a fused kernel; whether the
peak grows with the number of micro-batches. Without a GPU it says so and exits with 77.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WARM, TRIED, SEQ = 3, 7, 2048
SIZES = {"quick": (1024, 16, 8), "whole": (2048, 18, 8)}  # width, layers, rows
VARIANTS = [(count, again) for again in (False, True) for count in (1, 2, 3, 4, 8)]
STEP_OFF, BYTES_OFF = 0.05, 0.03


def made(size: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, rows = SIZES[size]
    config = LlamaConfig(
        vocab_size=32000, hidden_size=width, intermediate_size=width * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 256, max_position_embeddings=SEQ, use_cache=False)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
        ids = torch.randint(config.vocab_size, (rows, SEQ))
    return model, {"input_ids": ids, "labels": ids.clone()}


def stepped(model: Any, batch: dict[str, torch.Tensor], autocast: bool,
            micro_batches: int = 1) -> dict[str, float]:
    """Seconds of a step and the peak of its memory; `micro_batches`: one after the other, by
    hand."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # what an update is predicted for
    times, losses = [], []
    peaks = dict.fromkeys(("forward", "backward", "update"), 0.0)

    def done(phase: str) -> None:
        peaks[phase] = max(peaks[phase], float(torch.cuda.max_memory_allocated()))
        torch.cuda.reset_peak_memory_stats()

    rows = len(batch["input_ids"]) // micro_batches
    parts = [{k: v[i * rows : (i + 1) * rows] for k, v in batch.items()}
             for i in range(micro_batches)]
    for _ in range(WARM + TRIED):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for part in parts:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(**part).loss / micro_batches
            done("forward")
            loss.backward()
            done("backward")
        optimizer.step()
        done("update")
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
    tokens = batch["input_ids"].numel()
    step_s = statistics.median(times[WARM:])
    return {"step_s": step_s, "tokens_per_s": tokens / step_s, "loss": losses[-1],
            "peak_bytes": max(peaks.values()), **{f"{k}_bytes": v for k, v in peaks.items()},
            "held_bytes": float(torch.cuda.memory_allocated())}


def hf(size: str, compiled: bool, micro_batches: int = 1) -> dict[str, float]:
    import torch

    model, batch = made(size)
    own = torch.compile(model) if compiled else model
    return stepped(own, batch, autocast=True, micro_batches=micro_batches)


def ours(size: str, micro_batches: int, recompute: bool, compiled: bool) -> dict[str, float]:
    import autopar_torch as ap

    model, batch = made(size)
    plan = ap.Plan.uniform(num_micro_batches=micro_batches, recompute=recompute,
                           precision="bfloat16")
    start = time.perf_counter()
    own = ap.parallelize(model, batch, plan=plan, compile=compiled)
    start_s = time.perf_counter() - start
    return {**stepped(own, batch, autocast=False), "start_s": start_s,
            "kinds": len(own.plan.compiled)}


def predicted(size: str) -> dict[str, Any]:
    """Steps and peaks by what was measured of the parts."""
    import autopar_torch as ap

    model, batch = made(size)
    start = time.perf_counter()
    known = ap.measure(model, batch, precision="bfloat16")
    found: dict[str, Any] = {"measuring_s": time.perf_counter() - start}
    for micro_batches, recompute in VARIANTS:
        plan = ap.Plan.uniform(num_micro_batches=micro_batches, recompute=recompute,
                               precision="bfloat16")
        line = ap.simulate(plan, model, batch, known)
        found[f"{micro_batches} {recompute}"] = {
            "step_s": line.step_s, "peak_bytes": line.memory[0].peak_bytes}
    return found


def kernels(size: str) -> dict[str, Any]:
    """The kernels of attention, and those that take longest."""
    import torch

    import autopar_torch as ap

    model, batch = made(size)
    parallel = ap.parallelize(model, batch, plan=ap.Plan.uniform(precision="bfloat16"))
    parallel(**batch).loss.backward()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        parallel(**batch).loss.backward()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    names = [row.key for row in rows]
    return {"attention": [n for n in names if "flash" in n.lower() or "fmha" in n.lower()
                          or "attention" in n.lower()][:8],
            "longest": [(row.key[:70], row.count, round(row.self_device_time_total / 1e3, 2))
                        for row in rows[:12]]}


def main() -> int:
    import torch

    parser = argparse.ArgumentParser("profiling gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compiled", action="store_true",
                        help="also HF's model and ours compiled: two minutes more")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here; what is checked without one: tests/test_attention.py, "
              "test_prologue.py, test_collectives.py, test_scale.py, test_room.py, test_nvml.py")
        return 77
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name()}

    def tried(name: str, act: Callable[[], Any]) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            found[name] = act()
        except Exception:
            found[name] = {"error": traceback.format_exc()[-1500:]}
        print(name, json.dumps(found[name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found))

    for size in ["quick"] if options.quick else list(SIZES):
        tried(f"{size} hf", lambda s=size: hf(s, False))
        for count, again in VARIANTS:
            tried(f"{size} {count} {again}",
                  lambda s=size, c=count, r=again: ours(s, c, r, False))
        tried(f"{size} predicted", lambda s=size: predicted(s))
        tried(f"{size} compiled", lambda s=size: ours(s, 1, False, True))
        if options.compiled:
            tried(f"{size} hf compiled", lambda s=size: hf(s, True))
    tried("kernels", lambda: kernels("quick"))
    return int(not told(found))


def told(found: dict[str, Any]) -> bool:
    """The figures against their targets."""
    steps, peaks = [], []
    for name, own in found.items():
        size, *variant = name.split()
        then = found.get(f"{size} predicted", {}).get(" ".join(variant))
        if then is None or "error" in own:
            continue
        step, peak = (then[what] / own[what] - 1 for what in ("step_s", "peak_bytes"))
        print(f"{name}: {own['step_s'] * 1e3:.1f} ms, predicted {step:+.1%}; "
              f"{own['peak_bytes'] / 2**30:.2f} GiB, predicted {peak:+.1%}")
        steps, peaks = [*steps, abs(step)], [*peaks, abs(peak)]
    for size in SIZES:
        for own, other in itertools.product(("1 False", "compiled"), ("hf", "hf compiled")):
            speeds = [found.get(f"{size} {name}", {}).get("tokens_per_s", 0.0)
                      for name in (own, other)]
            if all(speeds):
                print(f"{size}: tokens/s of ours {own} beside {other}: {speeds[0] / speeds[1]:.2f}")
    if not steps:
        return False
    print(f"{len(steps)} configurations: step off by {statistics.fmean(steps):.1%} in the mean, "
          f"{max(steps):.1%} at worst; memory {statistics.fmean(peaks):.1%}, {max(peaks):.1%}")
    return statistics.fmean(steps) <= STEP_OFF and max(peaks) <= BYTES_OFF
