"""Which calibrated parts of a device's description fit published step times best?

    python profiling calibrate H100                        a fit, and its errors by source
    python profiling calibrate H100 --write                and write it to profiling/hardware
    python profiling calibrate A100-80 --leave-out         each source predicted by the others
    python profiling calibrate B200 --fields scale inside  only these; `scale`: the whole curve

Coordinate search on the mean |log error|, every source weighing as much as its rows but at most
eight. The bounds keep to what such hardware can do; nothing is fitted to a single row.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from autopar_torch import files
from autopar_torch.datasheets import Hardware, hardware
from published.predictions import seconds
from published.rows import Job, read

HERE = Path(__file__).resolve().parent
SAME = {"A100-80": ("A100-80", "A100-40"), "V100-16": ("V100-16", "V100-32")}
WEIGHT = 8
BOUNDS = {
    "scale": (0.6, 1.4), "memory": (0.5, 0.92), "launch": (2e-6, 1e-4), "inside": (0.25, 0.85),
    "across": (0.25, 0.85), "tensor": (0.3, 0.95), "data": (0.3, 0.95),
    **{f"part{i}": (0.3, 0.95) for i in range(5)},
}
NVLINK = {"inside": (0.65, 0.8)}  # what the library's own tests reach on these
TIGHTER = {"A100-80": NVLINK, "H100": NVLINK}
Values = dict[str, float]
Errors = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device")
    parser.add_argument("--fields", nargs="+", choices=BOUNDS, default=[*BOUNDS][1:])
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found, jobs = hardware(args.device), jobs_on(SAME.get(args.device, (args.device,)))
    values = fit(found, jobs, args.fields)
    errors = log_errors(changed(found, values), jobs)
    print({name: round(value, 7) for name, value in values.items()})
    for source, own in errors.items():
        print(f"  {source:22s}{len(own):4d} {size(own):6.1%}", end="")
        if args.leave_out:
            print(f"   left out {alone(found, jobs, args.fields, source):6.1%}", end="")
        print()
    if args.write:
        write(changed(found, values))
    before = loss(found, jobs, current(found, args.fields))
    print(f"{args.device}: {len(jobs)} rows of {len(errors)} source(s), loss "
          f"{loss(found, jobs, values):.1%}, as it is {before:.1%}")


def jobs_on(names: Sequence[str]) -> list[Job]:
    rows = read(HERE)
    core = json.loads((HERE / "core.json").read_text(encoding="utf-8"))
    chosen = (rows.jobs.get((file, name)) for file, name in core["time"])
    return [job for job in chosen
            if job and job.step_s and job.worker.hardware.device.name in names
            and job.row.get("regime", "gpu_bound") == "gpu_bound"]


def changed(found: Hardware, values: Mapping[str, float]) -> Hardware:
    """A description with other calibrated parts."""
    old, scale = found.device, values.get("scale", 1.0)
    curve = [(x, min(0.95, scale * values.get(f"part{i}", y)))
             for i, (x, y) in enumerate(old.efficiency)]
    rising = [(x, min(y for _, y in curve[i:])) for i, (x, _) in enumerate(curve)]
    device = structs.replace(
        old, efficiency=tuple(rising), launch_s=values.get("launch", old.launch_s),
        memory_efficiency=values.get("memory", old.memory_efficiency))
    overlap = {**found.overlap, **{k: v for k, v in values.items() if k in ("tensor", "data")}}
    reached = values.get("across", found.fabric.reached)
    return structs.replace(
        found, device=device, overlap=overlap,
        inside_reached=values.get("inside", found.inside_reached),
        network=structs.replace(found.fabric, reached=reached))


def bounds(found: Hardware, name: str) -> tuple[float, float]:
    return TIGHTER.get(found.device.name, {}).get(name, BOUNDS[name])


def current(found: Hardware, fields: Sequence[str]) -> Values:
    device = found.device
    known = {
        "scale": 1.0, "memory": device.memory_efficiency, "launch": device.launch_s,
        "inside": found.inside_reached, "across": found.fabric.reached, **found.overlap,
        **{f"part{i}": part for i, (_, part) in enumerate(device.efficiency)},
    }
    limits = {name: bounds(found, name) for name in fields}
    return {name: min(max(known[name], low), high) for name, (low, high) in limits.items()}


def fit(found: Hardware, jobs: Sequence[Job], fields: Sequence[str]) -> Values:
    """Steps up and down, one field after another, each growing while it helps."""
    best = current(found, fields)
    least, steps = loss(found, jobs, best), dict.fromkeys(fields, 0.2)
    while max(steps.values()) > 0.005:
        for name in fields:
            low, high = bounds(found, name)
            tries = [{**best, name: min(high, max(low, best[name] * (1 + sign * steps[name])))}
                     for sign in (1, -1)]
            value, trial = min(((loss(found, jobs, t), t) for t in tries), key=lambda pair: pair[0])
            steps[name] *= 1.3 if value < least - 1e-6 else 0.5
            if value < least - 1e-6:
                best, least = trial, value
    return best


def loss(found: Hardware, jobs: Sequence[Job], values: Values) -> float:
    errors = log_errors(changed(found, values), jobs)
    weights = [min(len(own), WEIGHT) for own in errors.values()]
    sizes = [sum(map(abs, own)) / len(own) for own in errors.values()]
    return sum(w * s for w, s in zip(weights, sizes, strict=True)) / sum(weights)


def log_errors(found: Hardware, jobs: Sequence[Job]) -> Errors:
    """Each row keeps its own network: only the parts reached are taken over."""
    errors: Errors = defaultdict(list)
    for job in jobs:
        own = job.worker.hardware
        device = structs.replace(found.device, memory_bytes_per_s=own.device.memory_bytes_per_s)
        network = structs.replace(own.fabric, reached=found.fabric.reached)
        machine = structs.replace(found, device=device, inside=own.inside, network=network)
        predicted = seconds(job, replace(job.worker, hardware=machine))
        errors[job.file].append(math.log(predicted / (job.step_s or predicted)))
    return errors


def size(errors: Sequence[float]) -> float:
    return sum(abs(math.expm1(e)) for e in errors) / len(errors)


def alone(found: Hardware, jobs: Sequence[Job], fields: Sequence[str], source: str) -> float:
    others = [job for job in jobs if job.file != source]
    mine = [job for job in jobs if job.file == source]
    values = fit(found, others, fields) if others else {}
    return size(log_errors(changed(found, values), mine)[source])


def write(found: Hardware) -> None:
    """The description, its network and, where one fit serves several, those of its like."""
    for name in SAME.get(found.device.name, (found.device.name,)):
        old = hardware(name)
        device = structs.replace(
            old.device, efficiency=found.device.efficiency, launch_s=found.device.launch_s,
            memory_efficiency=found.device.memory_efficiency)
        files.save(
            structs.replace(old, device=device, overlap=found.overlap,
                            inside_reached=found.inside_reached),
            HERE.parent / "hardware" / f"{name}.json")
        network = structs.replace(old.fabric, reached=found.fabric.reached)
        files.save(network, HERE.parent / "hardware" / "networks" / f"{old.network}.json")
