"""Which architectures, of `transformers` and others, train exactly under every plan?

    python profiling coverage [--kind causal,masked,seq2seq,image,sequence,others]
        [--only NAME,...] [--plans dp2,tp2,pp2] [--quick]
        [--json FILE] [--markdown FILE] [--logs FOLDER]

Every architecture that can be built tiny trains two steps of SGD in float64, in plain PyTorch and
on two ranks under each plan; losses and weights must agree to 1e-6. A cell says what it does in
`trust`, and how: `proven` (rules keep the rows apart), `tested` (rows were tried together and
apart), `untraced` (replicas of the module as it is), and the share of the work that tensor
parallelism splits. Messages are taken to be free where ways to split are chosen, so that tiny
models are cut wherever rules allow it. `--quick` takes every tenth. The exit status is 0 if nothing
is wrong in silence and 98 % of the cells are exact.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import resource
import signal
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar_torch.cluster import Link
from autopar_torch.run import shardings
from autopar_torch.shard.price import Prices, op_seconds
from autopar_torch.shard.solve import chosen_way, ways
from covered.architectures import (
    OTHER,
    RATE,
    TASKS,
    Architecture,
    Batch,
    batch,
    build,
    dtype_of,
    listed,
    loss_of,
)
from covered.others import OPTIONS
from trust import gpus
from trust.lab import EXACT, Case, Wrap
from trust.table import GOOD, PLANS, run_case, warm_up

LIMIT_S, BUILD_S, LIMIT_BYTES, MOST_PARAMETERS = 90.0, 20, 12 * 2**30, 20_000_000
HALF, EXACT_SHARE, IN_FLOAT32 = 0.5, 0.98, 1e-4
STEPS, FREE = 2, Link(0.0, 1e15)


@dataclass(frozen=True)
class Row:
    """What became of one architecture."""

    task: str
    name: str
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    broken: str = ""  # why it was not built


# --- in a rank ------------------------------------------------------------------------------


def script(model: nn.Module, given: Batch, options: dict[str, Any]) -> Any:
    """The loop of a user; what is compared are its losses and the weights it leaves."""

    def run(wrap: Wrap) -> Any:
        shardings.LOOPBACK = FREE  # else a message costs more than any op of a tiny model
        own = wrap(model.to(gpus.device()), **options)
        here = {name: x.to(gpus.device()) for name, x in given.items()}
        optimizer, found = torch.optim.SGD(own.parameters(), lr=RATE), []
        for _ in range(STEPS):
            loss = loss_of(own(**here))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        wrap.about |= about(own) if wrap.is_library else {}
        return {"losses": found, "weights": own.state_dict()}

    return run


def about(model: Any) -> dict[str, Any]:
    if model.fallback_reason:
        return {"how": "untraced", "why": model.fallback_reason}
    programs = [program for known in model._programs.values() for program in known]
    graph = model.graph
    return {"how": "tested" if getattr(graph, "tested", ()) else "proven",
            "unruled": list(graph.replicated_ops),
            "split": split_share(model.plan, programs[0].traced)}


def split_share(plan: Any, traced: Any) -> float:
    """The part of the work, by a datasheet's time, in ops that are split."""
    work = split = 0.0
    for stage in plan.replicas[0].stages:
        prices = Prices(links=())
        for index in range(*stage.blocks):
            graph, sharding = traced.programs[traced.graph.blocks[index].kind], None
            sharding = plan.sharding(stage, index)
            choices = ways(graph, sharding.mesh) if sharding else {}
            for node in graph.nodes:
                if node.op == "call_function":
                    seconds = op_seconds(node, prices, 1)
                    work += seconds
                    if node in choices and chosen_way(node, choices[node], sharding).share > 1:
                        split += seconds
    return split / work if work else 0.0


# --- around the ranks -------------------------------------------------------------------------


def in_a_process(own: Architecture, plans: list[str], logs: Path) -> Row:
    """In one of its own: what an architecture takes of memory ends with it."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        sender.send(covered(own, plans, logs))

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        return receiver.recv()  # type: ignore[no-any-return]
    except EOFError:
        return Row(own.task, own.name, broken="its process died")
    finally:
        process.join()


def covered(own: Architecture, plans: list[str], logs: Path) -> Row:
    try:
        model = _within(BUILD_S, own)
        size = sum(p.numel() for p in model.parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"{size} parameters are too many")
    except Exception as error:  # of the architecture, whatever it is
        return Row(own.task, own.name, broken=f"{type(error).__name__}: {error}"[:200])
    case = Case(f"{own.task}_{own.name}", "coverage", script(model, batch(own, dtype_of(model)),
                                                               OPTIONS.get(own.name, {})),
                tolerance=EXACT if dtype_of(model) == torch.float64 else IN_FLOAT32)
    found = run_case(case, plans, LIMIT_S, logs)
    return Row(own.task, own.name, {cell.plan: asdict(cell) for cell in found})


def _within(seconds: int, own: Architecture) -> nn.Module:
    def late(*_: Any) -> None:
        raise TimeoutError(f"not built within {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        return build(own)
    finally:
        signal.alarm(0)


# --- the table --------------------------------------------------------------------------------


def text(cell: dict[str, Any]) -> str:
    known = cell["about"]
    if cell["status"] != "right":
        return f"{cell['status']}: {cell['detail']}"
    share = f" {100 * known['split']:.0f} %" if cell["plan"].startswith("tp") and known else ""
    return f"{cell['detail']} {known.get('how', '')}{share}".strip()


TITLE = """# Coverage

Written by `python profiling coverage --markdown docs/coverage.md`. Tiny models of each architecture
train two steps of SGD in float64, in plain PyTorch and on two ranks under each plan. Numbers are
the worst relative differences of losses and weights. *proven*: rules keep the rows apart;
*tested*: rows were tried together and apart; *untraced*: replicas of the module as it is. The share
is that of the work that tensor parallelism splits: messages are taken to be free where ways to
split are chosen, so that models this tiny are cut wherever rules allow it. What is not exact says
why.

"""


def markdown(rows: list[Row], plans: list[str]) -> str:
    told, _ = figures(rows, plans)
    lines = [TITLE + f"`{told}`", "", f"| task | architecture | {' | '.join(plans)} |",
             "|---" * (2 + len(plans)) + "|"]
    for row in rows:
        shown = [text(row.cells[plan]).replace("|", "/")[:120] for plan in plans]
        lines.append(f"| {row.task} | {row.name} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def figures(rows: list[Row], plans: list[str]) -> tuple[str, bool]:
    """The last line, and whether the aims are met."""
    counts = {plan: collections.Counter(row.cells[plan]["status"] for row in rows)
              for plan in plans}
    shares = [c["about"]["split"] for row in rows for c in row.cells.values()
              if c["plan"] == "tp2" and c["status"] == "right" and "split" in c["about"]]
    wrong = sum(n for own in counts.values() for status, n in own.items() if status not in GOOD)
    told = [f"architectures={len(rows)}", f"wrong={wrong}"]
    told += [f"{plan}_exact={own['right'] / max(1, len(rows)):.3f}" for plan, own in counts.items()]
    if shares:
        told.append(f"half_split={sum(s >= HALF for s in shares) / len(shares):.3f}")
    exact = all(own["right"] >= EXACT_SHARE * len(rows) for own in counts.values())
    return "FIGURES " + " ".join(told), bool(rows) and exact and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default="causal,masked", help=f"of {', '.join([*TASKS, OTHER])}")
    parser.add_argument("--only", default="", help="names of architectures, with commas")
    parser.add_argument("--plans", default="dp2,tp2,pp2")
    parser.add_argument("--quick", action="store_true", help="every tenth")
    parser.add_argument("--json", default="")
    parser.add_argument("--earlier", default="",
                        help="the --json of an earlier run: what --only does not name stands there")
    parser.add_argument("--markdown", default="", help="where the table is written to")
    parser.add_argument("--logs", default="", help="a new folder that keeps what the ranks said")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    plans, began, rows = options.plans.split(","), time.monotonic(), list[Row]()
    asked = [own for task in options.kind.split(",") for own in listed(task)]
    if unknown := [plan for plan in plans if plan not in PLANS]:
        parser.error(f"no plan is called {unknown[0]}: there are {', '.join(PLANS)}")
    known = {(row["task"], row["name"]): Row(**row) for row in json.loads(
        Path(options.earlier).read_text())} if options.earlier else {}
    if options.only:
        named = options.only.split(",")
        known = {key: row for key, row in known.items() if key[1] not in named}
        asked = [own for own in asked if own.name in named or (own.task, own.name) in known]
    warm_up()
    with tempfile.TemporaryDirectory(prefix="coverage-") as scratch:
        for own in asked[::10] if options.quick else asked:
            row = known.get((own.task, own.name)) or in_a_process(
                own, plans, Path(options.logs or scratch))
            shown = row.broken or " | ".join(f"{text(c)[:60]:60}" for c in row.cells.values())
            print(f"{own.task:9}{own.name:28}{'not built: ' if row.broken else ''}{shown}",
                  flush=True)
            rows += [row] if not row.broken else []
            if options.json:
                Path(options.json).write_text(json.dumps([asdict(r) for r in rows], indent=1))
    if options.markdown:
        Path(options.markdown).write_text(markdown(rows, plans))
    told, met = figures(rows, plans)
    print(f"{told} seconds={time.monotonic() - began:.0f}")
    return 0 if met else 1
