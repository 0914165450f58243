"""What do policies of moving make of networks that change and nodes that are lost?

    python profiling changing --case traces --traces FOLDER     published traces (see traces.py)
    python profiling changing --case day --traces FOLDER        a composed day on 1,024 devices
    python profiling changing --case noise                      nothing but minutes of 10 to 30 %
    python profiling changing --case replan                     how long another plan takes

A GPT of 6.6 billion parameters, 1,024 rows of 2,048 tokens a step, on A100s by datasheet. Samples
are told beside those of always being in the best plan if moves were free, and beside the oracle's,
which pays for its moves, but knows all that will happen. Exits 0 if every replay took less than a
minute (a new plan less than a second), no policy had more samples than the oracle, and in noise
regret moved no more often than the oracle.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec.structs import replace

import autopar_torch as ap
from autopar_torch import api, files
from autopar_torch.cluster import Cluster
from autopar_torch.datasheets import named
from autopar_torch.errors import AutoparError
from autopar_torch.history import History
from autopar_torch.search.replay import table
from autopar_torch.search.unequal import fastest
from autopar_torch.simulate.network import lookup
from changing import traces
from zoo import NanoGPT

ROWS, SEQ, MOST_S, MOST_REPLAN_S = 1024, 2048, 60.0, 1.0
LIMIT_S = 0.5  # of the search, which ends soon after it
LEVELS = [3e7, 6e7, 1.25e8, 2.5e8, 5e8]  # if no measured ones are given: bytes per second


def gpt() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        ids = torch.zeros(1, SEQ, dtype=torch.long)
        return NanoGPT(32000, 4096, 32, 32, SEQ), {"idx": ids, "targets": ids}


def histories(case: str, folder: Path | None) -> Iterator[History]:
    found = [p for p in sorted(folder.iterdir()) if p.suffix != ".md"] if folder else []
    if case == "noise":
        yield traces.noise()
    elif case == "day":
        links = [p for p in found if p.name.startswith("intercloud")]
        yield traces.read(links[0]) if links else traces.day(LEVELS, "made-up rates")
    else:
        for path in found:
            try:
                yield files.load(path, History) if b'"num_nodes"' in files.read(path) else (
                    traces.read(path))
            except AutoparError as error:
                print(f"{path.name}: left out, as {error.what}")


def replayed(history: History, case: str) -> bool:
    cluster = f"{history.num_nodes}x{history.devices_per_node}xA100-80"
    start = time.perf_counter()
    try:
        found = ap.simulate(None, *gpt(), cluster, changes=history, global_batch_size=ROWS,
                            precision="bfloat16")
    except AutoparError as error:
        print(f"{history.source}: {error}")
        return False
    took_s = time.perf_counter() - start
    print(f"{history.source}: {found.num_devices} devices, {history.end_s / 3600:.1f} h, "
          f"{found.num_segments} states, {found.num_plans} plans, {took_s:.1f} s")
    print("\n".join(f"  {row}" for row in table(found.outcomes)), flush=True)
    *policies, best = found.outcomes
    still = case != "noise" or found.outcomes[3].moves <= found.outcomes[-1].moves
    return took_s < MOST_S and still and all(
        own.samples <= best.samples * (1 + 1e-9) for own in policies)


def changed() -> Iterator[tuple[str, Cluster]]:
    """What up to 64 devices may come to be."""
    yield "63 of 64 nodes of one device", named("63x1xA100-80")
    yield "7 of 8 nodes of eight", named("7x8xA100-80")
    yield "the links of 8x8 at half their rate", named("8x8xA100-80").with_network(0.5)
    whole = named("8x8xA100-80")
    slow = tuple(replace(device, speed=0.7) for device in whole.nodes[0])
    yield "one node of 8x8 at 0.7 of its speed", replace(whole, nodes=(*whole.nodes[1:], slow))
    yield "one node of 4x8 at 0.7 of its speed", replace(whole, nodes=(*whole.nodes[1:4], slow))


def replan() -> bool:
    slowest = 0.0
    for what, cluster in changed():
        case = api.case(*gpt(), cluster, global_batch_size=ROWS, precision="bfloat16")
        times = []
        for _ in range(3):
            start = time.perf_counter()
            found = fastest(case.graph, case.options, lookup(case.profile), ROWS, case.limits,
                            time_limit_s=LIMIT_S)
            times.append(time.perf_counter() - start)
        slowest = max(slowest, sorted(times)[1])
        whole = fastest(case.graph, case.options, lookup(case.profile), ROWS, case.limits)
        print(f"{what}: {sorted(times)[1] * 1e3:.0f} ms (of 3: {min(times) * 1e3:.0f} to "
              f"{max(times) * 1e3:.0f}); its step beside that of a search of {whole.seconds:.1f} s "
              f"without limit: {found.step_s / whole.step_s:.3f}", flush=True)
    return slowest < MOST_REPLAN_S


def main() -> int:
    parser = argparse.ArgumentParser("profiling changing", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["traces", "day", "noise", "replan"], required=True)
    parser.add_argument("--traces", type=Path, help="folder of the published files")
    options = parser.parse_args()
    if options.case == "traces" and not (options.traces and options.traces.is_dir()):
        parser.error("--case traces needs --traces FOLDER")
    if options.case == "replan":
        return int(not replan())
    done = [replayed(history, options.case) for history in histories(options.case, options.traces)]
    return int(not (done and all(done)))
