"""Does training go on when ranks, nodes and links are lost, and does it lose no step?

    python profiling lost --kind rank             # a rank is killed, 20 times (--times N)
    python profiling lost --kind node             # all of a node, which then returns
    python profiling lost --kind cut              # a node's link is unplugged, and plugged in again
    python profiling lost --kind chaos --nodes 4  # all of it and slow links, also two at once

Emulated nodes run `autopar run --elastic` with `examples/elastic.py`, whose losses have to be those
of one process, step by step. Prints how long it took each time until steps were made again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netlab import Lab

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = str(ROOT / "examples" / "elastic.py")
MARK = "LOST_NODE"  # in the environment of all processes of a node
HEAD, PORT = "n0", 29400
PAUSE_S, STEPS_EACH = 0.3, 14  # of training; steps of the run for each event
WAIT_S, RANK_S, CUT_S = 240.0, 30.0, 90.0  # until steps are made again: at most, and the targets
CLOSE = 1e-5  # relative, of losses
Line = tuple[int, float, int]  # step, loss, ranks


class Nodes:
    """Agents on emulated nodes, and what their ranks print."""

    def __init__(self, lab: Lab, folder: Path, num_steps: int, count: int) -> None:
        self.lab, self.folder, self.num_steps, self.count = lab, folder, num_steps, count
        self.names = [f"n{i}" for i in range(count)]
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.num_logs = 0

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "autopar_torch", "run", "--elastic", f"1:{self.count}",
                   "--head", f"{HEAD}:{PORT}", "--nproc-per-node", "1", SCRIPT, "--folder",
                   str(self.folder / "run"), "--steps", str(self.num_steps), "--pause",
                   str(PAUSE_S)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.num_logs += 1
        with (self.folder / f"{name}-{self.num_logs}.txt").open("wb") as log:
            self.agents[name] = self.lab.popen(
                name, command, stdout=log, stderr=subprocess.STDOUT,
                env=os.environ | {MARK: name, "OMP_NUM_THREADS": "1", "PYTHONPATH": path,
                                  "AUTOPAR_CACHE": str(self.folder), "GLOO_SOCKET_IFNAME": "eth0",
                                  "PYTHONUNBUFFERED": "1"})

    def lines(self) -> list[Line]:
        text = "".join(file.read_text(errors="replace") for file in self.folder.glob("*.txt"))
        found = re.findall(r"^step (\d+) loss (\S+) ranks (\d)$", text, re.MULTILINE)
        return sorted((int(step), float(loss), int(ranks)) for step, loss, ranks in found)

    def until(self, seen: Callable[[list[Line]], bool]) -> float:
        """Seconds until that is seen."""
        start = time.monotonic()
        while not seen(self.lines()):
            if time.monotonic() - start > WAIT_S:
                tails = (f"{f.name}: {f.read_text(errors='replace')[-1500:]}"
                         for f in sorted(self.folder.glob("*.txt")))
                raise SystemExit("training did not go on\n" + "\n".join(tails))
            time.sleep(0.1)
        return time.monotonic() - start

    def goes_on(self) -> float:
        """Seconds until steps are made that were not made when this was asked."""
        last = max((step for step, _, _ in self.lines()), default=-1)
        end = self.num_steps - 1
        return self.until(lambda lines: bool(lines) and lines[-1][0] >= min(last + 2, end))

    def all_there(self) -> float:
        """Seconds until a step is made by all nodes."""
        last = max((step for step, _, _ in self.lines()), default=-1)
        return self.until(lambda lines: any(
            step > last and ranks == self.count for step, _, ranks in lines)
            or (bool(lines) and lines[-1][0] == self.num_steps - 1))

    def ranks(self, name: str) -> list[int]:
        return [pid for pid, told in _processes() if f"{MARK}={name}\0" in told
                and "\0RANK=" in told]

    def lives(self, name: str) -> bool:
        return name in self.agents and self.agents[name].poll() is None

    # --- what happens to them -------------------------------------------------------------------

    def kill_rank(self, name: str) -> None:
        for pid in self.ranks(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_node(self, name: str) -> None:
        self.lab.kill(name)
        self.agents.pop(name).wait()

    def cut(self, name: str) -> None:
        self.lab.set_link(name, up=False)

    def mend(self, name: str) -> None:
        """Plugged in again; who gave up meanwhile is started again, as a system would."""
        self.lab.set_link(name, up=True)
        if self.lives(name):
            self.kill_node(name)
        self.start(name)


def _processes() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield int(folder.name), (folder / "environ").read_text(errors="replace") + "\0"


# --- what is tried ------------------------------------------------------------------------------


def one(nodes: Nodes, kind: str) -> dict[str, float]:
    """One loss, and the return where something has to come back: seconds of each."""
    name = nodes.names[-1]
    if kind == "rank":
        nodes.kill_rank(name)
        return {"on": nodes.goes_on()}
    if kind == "node":
        nodes.kill_node(name)
        on_s = nodes.goes_on()
        nodes.start(name)
        return {"on": on_s, "back": nodes.all_there()}
    nodes.cut(name)
    on_s = nodes.goes_on()
    nodes.mend(name)
    return {"on": on_s, "back": nodes.all_there()}


def chaos(nodes: Nodes, draw: random.Random) -> tuple[str, Callable[[], object]]:
    """Something that may happen now, by name."""
    others = nodes.names[1:]
    there = [name for name in others if nodes.lives(name)]
    gone = [name for name in others if not nodes.lives(name)]
    what: list[tuple[str, Callable[[], object]]] = []
    for name in there:
        what += [(f"the rank of {name} is killed", lambda n=name: nodes.kill_rank(n)),
                 (f"{name} is killed", lambda n=name: nodes.kill_node(n)),
                 (f"{name} is cut off", lambda n=name: (nodes.cut(n), nodes.kill_node(n))),
                 (f"the link of {name} falls", lambda n=name: nodes.lab.set_rate(
                     n, rate_mbps=draw.choice([20, 100, 1000])))]
    what += [(f"{name} returns", lambda n=name: nodes.mend(n)) for name in gone] * 3
    what.append(("the rank of the head is killed", lambda: nodes.kill_rank(HEAD)))
    return draw.choice(what)


def run_chaos(nodes: Nodes, times: int, seed: int) -> list[float]:
    draw, found = random.Random(seed), []
    for number in range(times):
        name, act = chaos(nodes, draw)
        act()
        soon = draw.random() < 0.3  # the next comes before this one is over
        waited_s = 0.0 if soon else nodes.goes_on()
        found += [] if soon else [waited_s]
        then = "at once the next" if soon else f"on after {waited_s:.1f} s"
        print(f"{number}: {name}; {then}", flush=True)
        if soon:
            time.sleep(draw.uniform(0, 5))
    for name in nodes.names[1:]:
        if not nodes.lives(name):
            nodes.mend(name)
    return found


def as_in_one_process(lines: list[Line], num_steps: int) -> tuple[str, bool]:
    """Every step was made; what was made again gave the same loss."""
    plain = subprocess.run([sys.executable, SCRIPT, "--plain", "--folder", "", "--steps",
                            str(num_steps)], capture_output=True, text=True, check=True,
                           timeout=600, env=os.environ | {"PYTHONPATH": str(ROOT)})
    want = {int(step): float(loss) for step, loss in
            re.findall(r"step (\d+) loss (\S+)", plain.stdout)}
    off = max((abs(loss / want[step] - 1) for step, loss, _ in lines), default=1.0)
    missing = set(range(num_steps)) - {step for step, _, _ in lines}
    again = len(lines) - len({step for step, _, _ in lines})
    return (f"losses off by {off:.1e} at most; {len(missing)} steps missing, {again} made again "
            "after a checkpoint"), off <= CLOSE and not missing


def main() -> int:
    parser = argparse.ArgumentParser("profiling lost", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["rank", "node", "cut", "chaos"], required=True)
    parser.add_argument("--times", type=int, default=0, help="(20; chaos: 25)")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from netlab import Lab, Node

    times = options.times or (25 if options.kind == "chaos" else 20)
    num_steps = STEPS_EACH * times
    cores = sorted(os.sched_getaffinity(0))
    made = [Node(name=f"n{i}", cores=(cores[i % len(cores)],), rate_mbps=1000)
            for i in range(options.nodes)]
    on: list[float] = []
    back: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Lab(made, weight=100) as lab:
        nodes = Nodes(lab, Path(folder), num_steps, options.nodes)
        for name in nodes.names:
            nodes.start(name)
            time.sleep(1.0)  # the first one is the head
        nodes.all_there()
        if options.kind == "chaos":
            on = run_chaos(nodes, times, options.seed)
        for number in range(times if options.kind != "chaos" else 0):
            seconds = one(nodes, options.kind)
            on.append(seconds["on"])
            back += [seconds["back"]] if "back" in seconds else []
            print(f"{number}: on after {on[-1]:.1f} s" + (
                f", all there after {back[-1]:.1f} s" if back else ""), flush=True)
        nodes.until(lambda lines: bool(lines) and lines[-1][0] == num_steps - 1)
        for agent in nodes.agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(60)
        left = [pid for name in nodes.names for pid in nodes.ranks(name)]
        text, good = as_in_one_process(nodes.lines(), num_steps)
    most_s = RANK_S if options.kind in ("rank", "node") else CUT_S
    good = good and not left and all(seconds <= most_s for seconds in on)
    print(f"{options.kind}: {len(on)} of {len(on)} times training went on, after "
          f"{statistics.median(on):.1f} s ({min(on):.1f} to {max(on):.1f})"
          + (f", all there after {statistics.median(back):.1f} s ({min(back):.1f} to "
             f"{max(back):.1f})" if back else "") + f"; {text}; {len(left)} processes left")
    if options.json:
        options.json.write_text(json.dumps({"on": on, "back": back}))
    return int(not good)
