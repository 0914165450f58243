"""Is what ordinary training scripts do right under every plan, or refused by name?

    python profiling trust [--quick] [--only NAME,...] [--plans tp2,pp2,dp2,zero3,one,auto]
        [--all] [--limit SECONDS] [--json FILE] [--list]

Each script (cases.py and scripts.py; with --all also strangers.py and losses.py) runs in plain
PyTorch, then on 2 ranks under each plan ("one": the library in one process; "auto", only if it is
named: the plan that the search finds); on GPUs where there are some. A cell says `right 3e-7` (the
worst difference to plain PyTorch, on any rank), `refused: ...` (an error of ours on every rank that
says what, where and what to do), or what is wrong: `silent 4e-2` (wrong numbers without a word),
`raw RuntimeError` (another library's error), `bare: ...` (ours, without a where or a fix, or on one
rank alone), `lost: ...` (refused, although it can be done), `hang`, `abort`. The last line counts
them; the exit status is 0 only if all are right or refused.

Every cell has processes of its own, forked from this one after it has imported and traced once, so
none can spoil the next. A rank that raises ends, as a script does; one that is through stays until
all are.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import io
import json
import logging
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar_torch as ap
from autopar_torch.errors import AutoparError
from trust import cases as _cases, gpus, losses, scripts, strangers  # noqa: F401
from trust.lab import AUTO, CASES, Case, Wrap, difference, flat, net, train

ONE = "one"
PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "num_micro_batches": 2},
    "dp2": {"dp": 2},
    "zero3": {"dp": 2, "zero": 3},
    ONE: {},
    "auto": AUTO,
}
USUAL = [plan for plan in PLANS if plan != "auto"]
QUICK = (
    "dataloader_shuffle", "randint_batches", "each_rank_another_batch", "gradient_reversal",
    "torch_clip_grad_norm", "penalty_in_the_loop", "freeze_after_first_step", "tensor_hook",
    "logits_and_loss", "batch_mixes_rows", "first_call_no_grad", "deepcopy_of_it",
)
GOOD = ("right", "refused", "-")
HANG_S, GRACE_S, POLL_S, SHOWN = 60.0, 2.0, 0.02, 44


@dataclass(frozen=True)
class Cell:
    case: str
    plan: str
    status: str
    detail: str
    seconds: float
    about: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        colon = ":" if self.status in ("refused", "lost", "bare") else ""
        return f"{self.status}{colon} {self.detail}".strip()


# --- in a rank ------------------------------------------------------------------------------


def _be_rank(case: Case, wrap: Wrap, port: int) -> None:
    """Run the script, leave what came of it in a file, and end."""
    places = {"RANK": wrap.rank, "LOCAL_RANK": wrap.rank, "WORLD_SIZE": wrap.size,
              "LOCAL_WORLD_SIZE": wrap.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
              "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in places.items()})
    logging.basicConfig(level=logging.INFO, force=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    random.seed(0)
    torch.manual_seed(0)
    found: dict[str, Any] = {"when": 0.0}
    try:
        wrap.listen()
        with gpus.placed(wrap.rank, wrap.size):
            value = flat(case.run(wrap))
        torch.save(value, io.BytesIO())  # what cannot be kept is no number
        found |= {"value": value, "about": wrap.about}
    except BaseException as error:
        traceback.print_exc()
        whole = isinstance(error, AutoparError) and all((error.what, error.where, error.fix))
        text = error.what if isinstance(error, AutoparError) else str(error)
        found |= {"error": type(error).__name__, "text": " ".join(text.split()),
                  "ours": isinstance(error, AutoparError), "whole": whole}
    found["when"] = time.time()
    draft = wrap.folder / f"{wrap.rank}.draft"
    torch.save(found, draft)
    draft.rename(_result(wrap.folder, wrap.rank))
    time.sleep(GRACE_S / 2 if "error" in found else 3600)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _result(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.pt"


# --- around the ranks -----------------------------------------------------------------------


def _fork(case: Case, wrap: Wrap, port: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            log = os.open(wrap.folder / f"{wrap.rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            _be_rank(case, wrap, port)
        finally:
            os._exit(1)
    return pid


def _run(case: Case, degrees: dict[str, Any] | None, size: int, limit_s: float,
         folder: Path) -> list[dict[str, Any] | None]:
    """What every rank left; None where it left nothing: it hung or died."""
    port = _free_port()
    pids = [_fork(case, Wrap(degrees, r, size, folder), port) for r in range(size)]
    deadline, ended = time.monotonic() + limit_s, set[int]()
    while time.monotonic() < deadline:
        ended |= {pid for pid in set(pids) - ended if os.waitpid(pid, os.WNOHANG)[0]}
        if all(_result(folder, r).exists() or pid in ended for r, pid in enumerate(pids)):
            break
        time.sleep(POLL_S)
    found = [_left(folder, r, died=pid in ended) for r, pid in enumerate(pids)]
    for pid in set(pids) - ended if None in found else ():
        os.kill(pid, signal.SIGUSR1)  # the logs say where it stood
        time.sleep(0.1)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if pid not in ended:
            os.waitpid(pid, 0)
    return found


def _left(folder: Path, rank: int, died: bool) -> dict[str, Any] | None:
    if _result(folder, rank).exists():
        return torch.load(_result(folder, rank))
    return {"died": True} if died else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def judge(case: Case, found: list[dict[str, Any] | None],
          want: dict[str, Any]) -> tuple[str, str]:
    """(status, detail) of a cell, from what its ranks left and what plain PyTorch gave."""
    errors = sorted((f for f in found if f and "error" in f), key=lambda f: f["when"])
    told = any(f["ours"] and f["whole"] for f in errors)
    # A script's own collective ends with torch's error, after the headline on the rank that waited.
    foreign = [f for f in errors if not f["ours"] and not (told and "by peer" in f["text"])]
    if any(f and "died" in f for f in found):
        return "abort", ""
    if foreign:
        after = f" (after: {errors[0]['text'][:SHOWN]})" if errors[0]["ours"] else ""
        return "raw", f"{foreign[0]['error']}: {foreign[0]['text'][:SHOWN]}{after}"
    if None in found:
        return "hang", f"(after: {errors[0]['text'][:SHOWN]})" if errors else ""
    if len(errors) == len(found):
        best = next((f for f in errors if f["whole"]), None)
        if best is None:
            return "bare", errors[0]["text"]
        return "lost" if case.right else "refused", best["text"]
    if errors:
        return "bare", f"on one rank only: {errors[0]['text']}"
    if case.refuse:
        return "silent", "not refused"
    apart, where = max(difference(f["value"], want) for f in found if f)
    return ("right", f"{apart:.0e}") if apart <= case.tolerance else (
        "silent", f"{apart:.0e} {where}")


def run_case(case: Case, plans: list[str], limit_s: float, logs: Path) -> list[Cell]:
    folder = logs / case.name / "plain"
    folder.mkdir(parents=True)
    plain = _run(case, None, 1, limit_s, folder)[0] or {"error": "hang", "text": ""}
    if "value" not in plain and not case.refuse:
        text = f"{plain.get('error', 'died')}: {plain.get('text', '')}"
        return [Cell(case.name, plan, "broken", text, 0.0) for plan in plans]
    return [_cell(case, plan, plain.get("value", {}), limit_s, logs) for plan in plans]


def _cell(case: Case, plan: str, want: dict[str, Any], limit_s: float, logs: Path) -> Cell:
    if case.refuse and plan == ONE:
        return Cell(case.name, plan, "-", "", 0.0)
    folder, began = logs / case.name / plan, time.monotonic()
    folder.mkdir()
    found = _run(case, PLANS[plan], 1 if plan == ONE else 2, limit_s, folder)
    status, detail = judge(case, found, want)
    about = (found[0] or {}).get("about", {})
    return Cell(case.name, plan, status, detail, round(time.monotonic() - began, 1), about)


def warm_up() -> None:
    """Import all that a rank needs, and trace once, so that no rank has to."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    scripts.llama()
    if not gpus.there():  # who has used one may not fork
        train(ap.parallelize(net()))
    if dist.is_initialized():
        raise SystemExit("trust starts its ranks itself: run it with python")


# --- the table --------------------------------------------------------------------------------


def _chosen(options: argparse.Namespace) -> list[Case]:
    if options.only:
        if unknown := set(names := options.only.split(",")) - CASES.keys():
            raise SystemExit(f"no such script: {', '.join(sorted(unknown))}; --list names them")
        return [CASES[name] for name in names]
    if options.quick:
        return [CASES[name] for name in QUICK]
    asked = ("cases", "scripts", *(("strangers", "losses") if options.all else ()))
    return [c for c in CASES.values() if c.group in asked]


def _show(found: list[Cell], width: int) -> None:
    short = [re.sub(r"\s+", " ", cell.text())[:SHOWN] for cell in found]
    print(f"{found[0].case:28s} " + " | ".join(f"{text:{width}s}" for text in short), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a dozen scripts")
    parser.add_argument("--all", action="store_true", help="invented scripts and every loss too")
    parser.add_argument("--only", default="", help="names of scripts, with commas")
    parser.add_argument("--plans", default=",".join(USUAL), help="of " + " ".join(PLANS))
    parser.add_argument("--limit", type=float, default=HANG_S, help="seconds until a cell hangs")
    parser.add_argument("--json", default="")
    parser.add_argument("--logs", default="", help="a new folder that keeps what the ranks said")
    parser.add_argument("--list", action="store_true", help="only name the scripts")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{c.group:10s} {c.name}" for c in _chosen(options)))
        return 0
    plans, began = options.plans.split(","), time.monotonic()
    warm_up()
    found: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="trust-") as scratch:
        logs = Path(options.logs or scratch)
        print(f"{'':28s} " + " | ".join(f"{plan:26s}" for plan in plans))
        for case in _chosen(options):
            row = run_case(case, plans, options.limit, logs)
            found += row
            _show(row, 26)
            if options.json:
                Path(options.json).write_text(json.dumps([asdict(c) for c in found], indent=1))
    counts = collections.Counter(cell.status for cell in found)
    bad = sum(n for status, n in counts.items() if status not in GOOD)
    print(f"FIGURES cells={len(found)} bad={bad} "
          + " ".join(f"{status}={n}" for status, n in sorted(counts.items()))
          + f" seconds={time.monotonic() - began:.0f}")
    return 1 if bad or not found else 0
