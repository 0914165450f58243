"""Is a plan as fast here as the same degrees built by hand from torch's own parts?

Two ranks on the CPU (Gloo).  The native side lives in processes of its own, as it would without
this library (which keeps freed memory mapped and has Gloo's threads wait their turn), one beside
each of ours on the same core; with --together both live in one, and native has all that too.  Steps
are interleaved, so the machine's drift cancels in the paired ratios; and both sides are built anew
several times, one first and then the other, since where tensors lie is worth some percent:

    python profiling native [--quick] [--json FILE]
        [--only tp2,pp2,pp2zb,dp2,zero1,zero3] [--native-only] [--together] [--compiled]

A step is forward, backward and AdamW on a fixed global batch; it returns the global loss on every
rank.  Ratios are ours / native (below 1 is better for us); the exit status is 0 only if every
median time ratio and memory ratio is at most 1 and both sides gave the same losses.
In pp2zb, torch's own 1F1B meets our zero-bubble schedule: the degrees are equal, the schedules not,
so only its time counts.
With --compiled, native compiles every block of the model (torch.compile), and ours those that it
measures to be quicker (compile=True).
With --native-only nothing is compared, and the status says only that every case ran.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import gc
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from autopar_torch.measure.bytes import recorded
from clock.scores import interval
from clock.twin import Twin
from start import pin, start_ranks

T = TypeVar("T")

OTHER_SCHEDULE = "pp2zb"
CASES = ("tp2", "pp2", OTHER_SCHEDULE, "dp2", "zero1", "zero3")
WORLD, MICRO_BATCHES, MEMORY_STEPS, WARM_UPS = 2, 4, 7, 3
LEARNING_RATE, TOLERANCE = 1e-4, 1e-4


@dataclass(frozen=True)
class Sizes:
    layers: int = 6
    width: int = 256
    heads: int = 8
    vocab: int = 2048
    seq: int = 128
    batch: int = 8
    compiled: bool = False  # both sides


QUICK = Sizes(layers=4, width=128, heads=4, vocab=512, seq=64, batch=8)


# --- the model ------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj, self.head_width = nn.Linear(width, width), width // heads

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            f(x).view(b, s, -1, self.head_width).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, -1))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width, heads), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class GPT(nn.Module):
    """A plain GPT: separate q, k, v, an untied head, the mean loss over all tokens."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(s.vocab, s.width), nn.Embedding(s.seq, s.width)
        self.blocks = nn.ModuleList([Block(s.width, s.heads) for _ in range(s.layers)])
        self.ln_f, self.head = nn.LayerNorm(s.width), nn.Linear(s.width, s.vocab, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.ln_f(x)), targets)


def seeded_model(sizes: Sizes) -> GPT:
    torch.manual_seed(0)
    return GPT(sizes)


def native_model(sizes: Sizes) -> GPT:
    model = seeded_model(sizes)
    for block in model.blocks if sizes.compiled else ():
        block.compile()
    return model


def global_batch(sizes: Sizes) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(sizes.vocab, (2, sizes.batch, sizes.seq), generator=draw)
    return ids[0].clone(), ids[1].clone()


# --- the native side ------------------------------------------------------------------------


class Side(Protocol):
    opt: torch.optim.Optimizer

    def step(self) -> float: ...


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)


def tp_plan(sizes: Sizes) -> dict[str, Any]:
    """Two all-reduces per attention and per MLP; the vocabulary is split in head and loss.

    Splitting the table as well costs a small model 20 % of its time (so --quick does not); at
    full size it is as fast as a whole table and takes less memory.
    """
    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    if sizes.vocab >= Sizes.vocab:
        plan["tok"] = RowwiseParallel(input_layouts=Replicate())
    for i in range(sizes.layers):
        name = f"blocks.{i}."
        plan |= {name + "attn": whole, name + "attn.proj": RowwiseParallel()}
        plan |= {f"{name}attn.{part}": ColwiseParallel() for part in "qkv"}
        plan |= {name + "mlp.fc": ColwiseParallel(), name + "mlp.out": RowwiseParallel()}
    return plan


class NativeTensor:
    """DTensor: parallelize_module with local activations in attention, and loss_parallel."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh) -> None:
        self.idx, self.targets = global_batch(sizes)
        self.model = parallelize_module(native_model(sizes), mesh, tp_plan(sizes))
        self.opt = adamw(self.model)

    def step(self) -> float:
        with loss_parallel():
            loss = self.model(self.idx, self.targets)
            loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return float(loss.to_local().detach() if isinstance(loss, DTensor) else loss.detach())


class FirstHalf(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tok, self.pos = model.tok, model.pos
        self.blocks = nn.Sequential(*model.blocks[: len(model.blocks) // 2])

    def forward(self, idx: Tensor) -> Tensor:
        return self.blocks(self.tok(idx) + self.pos(torch.arange(idx.shape[1])))


class SecondHalf(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*model.blocks[len(model.blocks) // 2 :])
        self.ln_f, self.head = model.ln_f, model.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ln_f(self.blocks(x)))


def manual_stage(sizes: Sizes, mesh: DeviceMesh) -> PipelineStage:
    """One stage of two, its shapes given: no inference step, no shape exchange."""
    rank, rows = dist.get_rank(), sizes.batch // MICRO_BATCHES
    ids = torch.empty(rows, sizes.seq, dtype=torch.int64, device="meta")
    x = torch.empty(rows, sizes.seq, sizes.width, device="meta", requires_grad=True)
    out = torch.empty(rows, sizes.seq, sizes.vocab, device="meta", requires_grad=True)
    module = (FirstHalf, SecondHalf)[rank](native_model(sizes))
    given, made = ((ids, x), (x, out))[rank]
    return PipelineStage(module, rank, WORLD, torch.device("cpu"), input_args=(given,),
                         output_args=(made,), group=mesh.get_group())


class NativePipeline:
    """torch.distributed.pipelining: two manual stages with static shapes under 1F1B."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh) -> None:
        self.idx, self.targets = global_batch(sizes)
        stage = manual_stage(sizes, mesh)
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=token_loss)
        self.opt = adamw(stage.submod)

    def step(self) -> float:
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            self.schedule.step(self.idx)
        else:
            self.schedule.step(target=self.targets, losses=losses, return_outputs=False)
        self.opt.step()
        self.opt.zero_grad()
        value = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(value, WORLD - 1)
        return float(value)


class NativeData:
    """Half of the batch per rank: DDP, with ZeroRedundancyOptimizer or not, or fully_shard on every
    block and the root."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh, zero: int) -> None:
        self.idx, self.targets = (t.chunk(WORLD)[dist.get_rank()] for t in global_batch(sizes))
        model = native_model(sizes)
        self.model: nn.Module = self.shard(model, mesh) if zero == 3 else DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True)
        self.opt = adamw(self.model) if zero != 1 else ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE)

    @staticmethod
    def shard(model: GPT, mesh: DeviceMesh) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def step(self) -> float:
        loss = self.model(self.idx, self.targets)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        value = loss.detach().clone()
        dist.all_reduce(value, dist.ReduceOp.AVG)
        return float(value)


def native(case: str, sizes: Sizes) -> Side:
    mesh = init_device_mesh("cpu", (WORLD,))
    if case == "tp2":
        return NativeTensor(sizes, mesh)
    if case.startswith("pp2"):
        return NativePipeline(sizes, mesh)
    return NativeData(sizes, mesh, int(case.removeprefix("zero")) if "zero" in case else 0)


# --- our side -------------------------------------------------------------------------------


class Ours:
    """The unchanged single-device loop on a model that was handed to this library."""

    def __init__(self, sizes: Sizes, model: nn.Module) -> None:
        self.idx, self.targets = global_batch(sizes)
        self.model, self.opt = model, adamw(model)

    def step(self) -> float:
        loss = self.model(idx=self.idx, targets=self.targets)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return float(loss.detach())


def ours(case: str, sizes: Sizes) -> Side:
    import autopar_torch as ap

    degrees: dict[str, dict[str, Any]] = {
        "tp2": {"tp": 2},
        "pp2": {"pp": 2, "num_micro_batches": MICRO_BATCHES, "schedule": "1f1b"},
        "pp2zb": {"pp": 2, "num_micro_batches": MICRO_BATCHES, "schedule": "zero_bubble"},
        "dp2": {"dp": 2},
        "zero1": {"dp": 2, "zero": 1},
        "zero3": {"dp": 2, "zero": 3},
    }
    plan = ap.Plan.uniform(**degrees[case])
    model = ap.parallelize(seeded_model(sizes), plan=plan, compile=sizes.compiled)
    return Ours(sizes, model)


# --- memory ---------------------------------------------------------------------------------


def held_addresses(opt: torch.optim.Optimizer) -> set[int]:
    """Where the storages lie that some Python tensor holds, gradients included."""
    gradients = [p.grad for group in opt.param_groups for p in group["params"]]
    everything = itertools.chain(gc.get_objects(), gradients)  # a list around it would hold itself
    tensors = [t for t in everything if type(t) in (Tensor, nn.Parameter)]
    local = [g.to_local() for g in gradients if isinstance(g, DTensor)]
    return {t.untyped_storage().data_ptr() for t in tensors + local if t.device.type == "cpu"}


class TensorPeak:
    """Tensor bytes of everything allocated inside: what lived at `mark()`, and the peak of a step
    after it.

    The whole life of a side is recorded, its construction too, so DDP's buckets count although
    only C++ holds them between steps.  The profiler does not see every release: a storage that is
    never released and that no tensor holds during the last optimizer step is left out, and one that
    came after `mark()` ends with the optimizer step that follows, as gradients do (the next ones
    may lie at the same place).  That loss is by chance: the median of several steps is taken.
    """

    kept = 0
    peak = 0.0

    def __enter__(self) -> Self:
        gc.collect()
        self.held: set[int] = set()
        self.stepped: list[int] = []
        activities = [torch.profiler.ProfilerActivity.CPU]
        self.prof = torch.profiler.profile(activities=activities, profile_memory=True)
        self.prof.__enter__()
        return self

    def look(self, opt: torch.optim.Optimizer, *_: Any) -> None:
        self.held = held_addresses(opt)

    def mark(self, opt: torch.optim.Optimizer) -> None:
        after = opt.register_step_post_hook(lambda *_: self.stepped.append(time.time_ns()))
        self.hooks = [opt.register_step_pre_hook(self.look), after]
        gc.collect()
        self.marked = time.time_ns()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.prof.__exit__(kind, error, trace)
        if kind is None:
            for hook in self.hooks:
                hook.remove()
            self.settle()

    def settle(self) -> None:
        sure = [one for one in recorded(self.prof) if one.end or one.address in self.held]
        for one in sure:
            if one.end is None and one.begin > self.marked:
                one.end = next((when for when in self.stepped if when > one.begin), None)
        changes = [(one.begin, one.size) for one in sure]
        changes += [(one.end, -one.size) for one in sure if one.end]
        total, peaks = 0, [0] * len(self.stepped)
        for when, size in sorted(changes):
            total += size
            if when <= self.marked:
                self.kept = total
            step = bisect.bisect_left(self.stepped, when)
            if when > self.marked and step < len(peaks):
                peaks[step] = max(peaks[step], total)
        self.peak = statistics.median(peaks)


# --- the harness ----------------------------------------------------------------------------


@dataclass
class Looked:
    """What two steps gave, and what memory they took."""

    losses: tuple[float, float]
    kept_mib: list[float]
    peak_mib: list[float]


@dataclass
class Row:
    case: str
    losses: dict[str, tuple[float, float]]
    kept_mib: dict[str, list[float]]
    peak_mib: dict[str, list[float]]
    ms: dict[str, float] = field(default_factory=dict)
    loss_difference: float = 0.0
    time_ratio: float | None = None
    interval: tuple[float, float] | None = None
    memory_ratio: float | None = None

    def passed(self) -> bool:
        """Another schedule may well take more memory."""
        ratios = [self.time_ratio] + [self.memory_ratio] * (self.case != OTHER_SCHEDULE)
        return all(ratio is not None and ratio <= 1.0 for ratio in ratios)


def over_ranks(value: float) -> list[float]:
    every = [torch.zeros(1, dtype=torch.float64) for _ in range(WORLD)]
    dist.all_gather(every, torch.tensor([value], dtype=torch.float64))
    return [float(one) for one in every]


def here(work: Callable[[], T]) -> T:
    return work()


Places = dict[str, Callable[[Callable[[], Any]], Any]]  # side -> where it lives
MAKERS = {"native": native, "ours": ours}
alive: dict[str, Side] = {}  # in this process


def looked_at(name: str, case: str, sizes: Sizes) -> Looked:
    """Build a side, take its first two steps, and a few more for its memory."""
    alive.clear()
    with TensorPeak() as memory:
        side = MAKERS[name](case, sizes)
        losses = (side.step(), side.step())
        memory.mark(side.opt)
        for _ in range(MEMORY_STEPS):
            side.step()
    kept, peak = (over_ranks(n / 2**20) for n in (memory.kept, memory.peak))
    return Looked(losses, kept, peak)


def build(name: str, side: str, case: str, sizes: Sizes) -> None:
    """A side that runs as a user's would, nothing recorded."""
    alive.pop(name, None)
    gc.collect()
    alive[name] = MAKERS[side](case, sizes)
    for _ in range(WARM_UPS):
        alive[name].step()


def timed_ms(name: str) -> float:
    """One step between barriers, after one that is not timed: the slowest rank's time."""
    alive[name].step()
    dist.barrier()
    begin = time.perf_counter()
    alive[name].step()
    return max(over_ranks((time.perf_counter() - begin) * 1e3))


def interleave(places: Places, case: str, sizes: Sizes, builds: int,
               rounds: int) -> dict[str, list[float]]:
    """Several builds, each of so many rounds; the order alternates."""
    times: dict[str, list[float]] = {name: [] for name in places}
    for k in range(builds):
        for name in sorted(places, reverse=bool(k % 2)):
            places[name](partial(build, name, name, case, sizes))
        for name, found in in_turn(places, rounds).items():
            times[name] += found
    return times


def in_turn(places: Places, rounds: int) -> dict[str, list[float]]:
    """Each round times every side once; the order alternates."""
    times: dict[str, list[float]] = {name: [] for name in places}
    for i in range(rounds):
        for name in sorted(places, reverse=bool(i % 2)):
            times[name].append(places[name](partial(timed_ms, name)))
    return times


def loss_difference(sides: dict[str, Looked]) -> float:
    """The largest relative difference to the native losses, over both steps and all ranks."""
    good = sides["native"].losses
    pairs = [(a, b) for s in sides.values() for a, b in zip(s.losses, good, strict=True)]
    finite = all(math.isfinite(a) for a, _ in pairs)
    worst = max(abs(a - b) / abs(b) for a, b in pairs) if finite else math.inf
    return max(over_ranks(worst))


def compare(row: Row, times: dict[str, list[float]]) -> None:
    ratios = [a / b for a, b in zip(times["ours"], times["native"], strict=True)]
    row.time_ratio = statistics.median(ratios)
    row.interval = interval(ratios, statistics.median, 2000)
    row.memory_ratio = max(row.peak_mib["ours"]) / max(row.peak_mib["native"])


def measure(case: str, sizes: Sizes, builds: int, rounds: int, places: Places) -> Row:
    seen = {name: at(partial(looked_at, name, case, sizes)) for name, at in places.items()}
    row = Row(
        case,
        losses={name: one.losses for name, one in seen.items()},
        kept_mib={name: one.kept_mib for name, one in seen.items()},
        peak_mib={name: one.peak_mib for name, one in seen.items()},
        loss_difference=loss_difference(seen),
    )
    if not row.loss_difference <= TOLERANCE:
        return row
    times = interleave(places, case, sizes, builds, rounds)
    row.ms = {name: statistics.median(values) for name, values in times.items()}
    if "ours" in places:
        compare(row, times)
    return row


# --- the report -----------------------------------------------------------------------------


def show(row: Row) -> str:
    parts = [f"{row.case:6}"]
    for name in row.losses:
        losses = " ".join(f"{x:.6f}" for x in row.losses[name])
        mib = "/".join(f"{x:.1f}" for x in row.peak_mib[name])
        kept = "/".join(f"{x:.1f}" for x in row.kept_mib[name])
        ms = f"{row.ms[name]:.2f} ms" if row.ms else "not timed"
        parts.append(f"{name}: {ms}, peak {mib} MiB (kept {kept}), losses {losses}")
    if row.interval:
        low, high = row.interval
        parts.append(f"time {row.time_ratio:.3f} [{low:.3f}, {high:.3f}]")
        parts.append(f"memory {row.memory_ratio:.3f}")
    if len(row.losses) > 1:
        verdict = "" if row.loss_difference <= TOLERANCE else " REFUSED: the losses differ"
        parts.append(f"loss diff {row.loss_difference:.1e}{verdict}")
    return " | ".join(parts)


def figures(rows: list[Row]) -> str:
    """The last line: ours / native for each case, or the native medians alone."""
    words = []
    for row in rows:
        alone = f"{row.ms['native']:.2f} ms" if row.ms else "refused"
        both = row.time_ratio and f"time {row.time_ratio:.3f} memory {row.memory_ratio:.3f}"
        words.append(f"{row.case} {both or alone}")
    return "FIGURES " + "; ".join(words)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a smaller model, 2 builds of 6 rounds"
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--only", default=",".join(CASES), help="a comma-separated part of them")
    parser.add_argument("--native-only", action="store_true", help="leave our library out")
    parser.add_argument("--compiled", action="store_true", help="blocks compiled on both sides")
    parser.add_argument("--together", action="store_true", help="both sides in one process")
    parser.add_argument("--builds", type=int, help="default 5, with --quick 2")
    parser.add_argument("--rounds", type=int, help="of every build: default 8, with --quick 6")
    args = parser.parse_args()
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    return args


def run(args: argparse.Namespace) -> list[Row]:
    sizes, builds, rounds = (QUICK, 2, 6) if args.quick else (Sizes(), 5, 8)
    builds, rounds = args.builds or builds, args.rounds or rounds
    sizes = replace(sizes, compiled=args.compiled)
    rows = []
    with contextlib.nullcontext(here) if args.together else Twin() as beside:
        places: Places = {"native": beside} | ({} if args.native_only else {"ours": here})
        for case in args.only:
            rows.append(measure(case, sizes, builds, rounds, places))
            if dist.get_rank() == 0:
                print(show(rows[-1]), flush=True)
    return rows


def main() -> int:
    args = options()
    if "RANK" not in os.environ:
        start_ranks("native", sys.argv[1:], WORLD)
        return 0
    pin()
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    if dist.get_world_size() != WORLD:
        raise SystemExit(f"these cases need {WORLD} ranks, not {dist.get_world_size()}")
    rows = run(args)
    if dist.get_rank() == 0:
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        print(figures(rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if args.native_only or all(row.passed() for row in rows) else 1
