"""The tables of the paper (PrimePar), ours beside theirs, from the package's prices.

8 nodes of 4 V100, FP32, 2048 tokens. Layers repeat and not all of them fit (the paper does not say
how many it ran), so all figures are of one layer among its like. Links are those that the paper's
own collectives had (figure 9), or those it states; batches are those of figure 9, the same for all
models. Megatron is the best of all replicas x tensor degrees, with columns and rows cut, or of
those whose tensor groups stay in a node, as in figure 9. Collectives are hidden for nobody.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterable
from typing import Any

from primepar_paper import DEGREES, MEMORY, MLP, SEARCH, SHAPES, SPEED, THREE
from primepar_space import (
    OBSERVED,
    STATED,
    Cost,
    Setting,
    Space,
    best,
    layer,
    meshes,
    prices,
    solved,
    ways,
)

from autopar_torch.simulate.formula import Pipeline, ends

DEVICES = (4, 8, 16, 32)
ROWS = (8, 16)  # those of figure 9
MICRO = (2, 8)  # micro-batches of a pipeline
ASSUMPTIONS = (
    STATED, OBSERVED._replace(name="as timed, nothing hidden", hides=0.0),
    OBSERVED._replace(name="as timed, 16 bit", flops=100e12, item=0.5),
)  # fmt: skip


def mean(values: Iterable[float]) -> float:
    """Geometric."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def speed(devices: int, rows: int, setting: Setting) -> list[dict[str, Any]]:
    """Figures 7 and 8: our best plan against Megatron's, with and without rings, per model."""
    found = []
    spaces: tuple[Space, ...] = ("megatron", "inside", "never", "free")
    for k, model in enumerate(SHAPES):
        base, home, never, free = (best(model, devices, rows, setting, s) for s in spaces)
        found.append({
            "model": model, "devices": devices, "rows": rows, "setting": setting.name,
            "speed": base.step / free.step, "speed_inside": home.step / free.step,
            "over_never": never.step / free.step, "paper": SPEED[devices][k],
            "memory": free.memory / base.memory, "memory_inside": free.memory / home.memory,
            "paper_memory": MEMORY[devices][k] / 100, "plan": free.plan, "megatron": base.plan,
        })  # fmt: skip
    return found


def show_speed(cells: list[dict[str, Any]]) -> None:
    for c in cells:
        print(f"{c['devices']:3} {c['model']:11} x{c['speed']:.2f} / x{c['speed_inside']:.2f} "
              f"(paper x{c['paper']:.2f})  without rings x{c['speed'] / c['over_never']:.2f}  "
              f"memory {c['memory']:.0%} / {c['memory_inside']:.0%} "
              f"(paper {c['paper_memory']:.0%})  {c['plan']} | {c['megatron']}")  # fmt: skip
    names = ("speed", "speed_inside", "over_never", "paper")
    geo = {name: mean(c[name] for c in cells) for name in names}
    print(f"    geo-mean    x{geo['speed']:.3f} / x{geo['speed_inside']:.3f} (paper x"
          f"{geo['paper']:.3f}); over ours without rings x{geo['over_never']:.3f}")  # fmt: skip


def mlp() -> list[dict[str, Any]]:
    """Figure 9: one MLP, Megatron with tensor groups in a node."""
    found = []
    for (devices, model, rows), (percent, gain) in MLP.items():
        base = best(model, devices, rows, OBSERVED, "inside", "mlp")
        own = best(model, devices, rows, OBSERVED, "free", "mlp")
        found.append({"devices": devices, "model": model, "rows": rows,
                      "collective": own.exposed / base.exposed, "speed": base.step / own.step,
                      "paper_collective": percent / 100, "paper": gain, "plan": own.plan,
                      "share": base.exposed / base.step})  # fmt: skip
    return found


def pipelined(costs: list[Cost], stages: int, layers: int, micro: int) -> float:
    """Seconds of a step: equal stages, 1F1B, then gradients and update."""

    def seconds(c: Cost) -> float:
        per = layers // stages
        ahead, back = [c.forward * per] * stages, [c.backward * per] * stages
        pipe = Pipeline(ahead, back, back, back, [0.0] * stages, [0.0] * stages)
        return max(ends("1f1b", pipe, micro)) + per * (c.reduce + c.update)

    return min(map(seconds, costs))


def three(model: str, micro: int) -> dict[str, Any]:
    """Figure 10: stages and replicas as given, only the tensor group is ours. Four rows in a
    micro-batch of all replicas together."""
    layers = 8 * (SHAPES[model].layers // 8)
    sides: dict[str, list[float]] = {"megatron": [], "free": []}
    spaces: tuple[Space, ...] = ("megatron", "free")
    for (stages, replicas, degree), space in itertools.product(DEGREES, spaces):
        found = ways(model, "layer", degree, replicas, 4 // replicas, OBSERVED, space)
        sides[space].append(1 / pipelined(found, stages, layers, micro) if found else 0.0)
    base = sides["megatron"][0] or sides["megatron"][1]
    ours = {space: [s / base for s in speeds] for space, speeds in sides.items()}
    top = max(ours["free"]) / max(ours["megatron"])
    known = [[s or 0.0 for s in row] for row in THREE[model]]
    return {"model": model, "micro_batches": micro, **ours,
            "paper_megatron": known[0], "paper": known[1], "best": top,
            "paper_best": max(known[1]) / max(known[0])}  # fmt: skip


def search(repeats: int) -> list[dict[str, Any]]:
    """Table 2, on one core: the paper's space (any axis may cut the batch, so one replica), and
    every number of replicas with every mesh."""
    found = []
    for name, model in {"OPT": "OPT 175B", "Llama2": "Llama2 70B", "BLOOM": "BLOOM 176B"}.items():
        for devices in DEVICES:
            one, every = (min(_solve_all(model, devices, most) for _ in range(repeats))
                          for most in (1, 8))  # fmt: skip
            found.append({"model": name, "devices": devices, "ms": one * 1e3,
                          "every_ms": every * 1e3, "paper_ms": SEARCH[name][devices]})  # fmt: skip
    return found


def _solve_all(model: str, devices: int, most_replicas: int) -> float:
    todo = [(mesh, layer(model, "layer", 8 // d)) for d in (1, 2, 4, 8)
            if d <= most_replicas and d < devices for mesh in meshes(devices // d)]  # fmt: skip
    start = time.process_time()
    for mesh, graph in todo:
        solved(graph, mesh, prices(mesh, 1, OBSERVED), "free")
    return time.process_time() - start


# --- the tables -------------------------------------------------------------------------------


def figure_7(quick: bool) -> list[dict[str, Any]]:
    found = []
    for rows, devices in itertools.product(ROWS, DEVICES[-1:] if quick else DEVICES):
        print(f"Throughput and memory over Megatron's (any tensor degree / in a node), {rows} rows")
        cells = speed(devices, rows, OBSERVED)
        show_speed(cells)
        found += cells
    return found


def what_moves(quick: bool) -> list[dict[str, Any]]:
    print("\nWhat moves the geo-mean at 32 devices (paper x1.30)")
    found = []
    todo = [(OBSERVED, rows) for rows in (8, 16, 32, 64)]
    todo += [] if quick else [(setting, 16) for setting in ASSUMPTIONS]
    for setting, rows in todo:
        cells = speed(32, rows, setting)
        geo = {name: mean(c[name] for c in cells)
               for name in ("speed", "speed_inside", "over_never")}  # fmt: skip
        print(f"{setting.name:26} {rows:3} rows  x{geo['speed']:.2f} / x{geo['speed_inside']:.2f}"
              f"  over ours without rings x{geo['over_never']:.3f}", flush=True)  # fmt: skip
        found.append({"setting": setting.name, "rows": rows, **geo})
    return found


def figure_9() -> list[dict[str, Any]]:
    print("\nOne MLP (figure 9): collectives in percent of Megatron's, speed-up")
    found = mlp()
    for c in found:
        print(f"{c['devices']:3} {c['model']:11} {c['rows']:3} rows  {c['collective']:.1%} (paper "
              f"{c['paper_collective']:.1%})  x{c['speed']:.2f} (paper x{c['paper']:.2f})  "
              f"{c['plan']}")  # fmt: skip
    return found


def figure_10() -> list[dict[str, Any]]:
    found = [three(model, micro) for micro in MICRO for model in SHAPES]
    print("\nStages, replicas, tensor degree (figure 10): "
          + " ".join(f"{d}".replace(" ", "") for d in DEGREES))  # fmt: skip
    for c in found:
        for name, key in (("Megatron", "megatron"), ("  paper", "paper_megatron"),
                          ("ours", "free"), ("  paper", "paper")):  # fmt: skip
            print(f"{c['model']:11} {name:9}" + " ".join(f"{s:7.3f}" for s in c[key]))
        print(f"{c['model']:11} {c['micro_batches']} micro-batches, best over best x{c['best']:.2f}"
              f" (paper x{c['paper_best']:.2f})")  # fmt: skip
    return found


def table_2(quick: bool) -> list[dict[str, Any]]:
    print("\nSearch, ms on one core (table 2): the paper's space; every number of replicas")
    found = search(2 if quick else 5)
    for c in found:
        print(f"{c['model']:7} {c['devices']:3} devices {c['ms']:8.1f} (paper {c['paper_ms']:.1f})"
              f"  {c['every_ms']:8.1f}")  # fmt: skip
    return found


def main(options: argparse.Namespace) -> int:
    result = {"speed": figure_7(options.quick), "assumptions": what_moves(options.quick),
              "mlp": figure_9(), "three": figure_10(),
              "search": table_2(options.quick)}  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 0
