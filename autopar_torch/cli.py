"""The command line: measure, plan, simulate, explain, run. Results on stdout, else on stderr."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from . import files
from .errors import (
    AutoparError,
    CheckpointError,
    FileError,
    PlanError,
    ProfileError,
    RunError,
    SearchError,
    TraceError,
)
from .profile import QUICK_S

# Of what went wrong: nothing fits; a bad file, model or plan; another profile; a worker failed.
EXIT_CODES: dict[type[AutoparError], int] = {
    SearchError: 3, FileError: 4, PlanError: 4, TraceError: 4, CheckpointError: 4,
    ProfileError: 5, RunError: 6,
}  # fmt: skip
SIZES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
MODEL = "module:function or file.py:function that returns (model, inputs); its code is run"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status says how it went."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = 0 if given[:1] == ["run"] else len(given)  # what follows `run` is for others
    given[:own] = [re.sub("(?<=[a-z])_", "-", a) if a.startswith("--") and "=" not in a else a
                   for a in given[:own]]  # fmt: skip
    parser = _parser()
    options, unknown = parser.parse_known_args(given)
    if unknown and options.command is not _run:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unknown:  # options of torchrun come before the script
        options.rest = [*unknown, *options.rest]
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="[autopar] %(message)s")
    try:
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except AutoparError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("autopar", description="Plan and run parallel training.")
    verbs = parser.add_subparsers(required=True, metavar="command")
    plan = _verb(verbs, "plan", _plan, "find the fastest plan that fits", "--cluster")
    plan.add_argument("--top", type=int, default=5, help="plans that are shown (5)")
    plan.add_argument("--out", help="file for the plan")
    explain = _verb(verbs, "explain", _explain, "say why a plan is the fastest", "--cluster")
    explain.add_argument("--plan", help="a plan to lay beside the best")
    simulated = _verb(verbs, "simulate", _simulate, "predict a step of a plan", "--cluster", True)
    simulated.add_argument("--out", help="file for the timeline")
    measured = _verb(verbs, "measure", _measure, "measure what planning needs, under torchrun")
    measured.add_argument("--out", required=True, help="file for what was measured")
    measured.add_argument("--seconds", type=float, default=QUICK_S,
                          help=f"time to spend after a first look ({QUICK_S:.0f})")  # fmt: skip
    about = ("write a checkpoint of the old form in the new one; runs what the old files hold, so "
             "only for files that you trust")  # fmt: skip
    convert = verbs.add_parser("convert", help=about, description=about)
    convert.add_argument("old", help="folder that torch.distributed.checkpoint wrote")
    convert.add_argument("new", help="folder for the new one")
    convert.set_defaults(command=_convert)
    run = verbs.add_parser("run", help="start a script under torchrun")  # --plan comes first
    run.add_argument("--plan", required=True, help="file of the plan that the script trains under")
    run.add_argument("--print", action="store_true", help="only show the command")
    run.add_argument("rest", nargs=argparse.REMAINDER, metavar="[torchrun options] script ...")
    run.set_defaults(command=_run)
    return parser


def _verb(verbs: Any, name: str, command: Callable[[argparse.Namespace], int], about: str,
          cluster: str = "", takes_plan: bool = False) -> argparse.ArgumentParser:  # fmt: skip
    """A command about a model."""
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=about, description=about)
    if takes_plan:
        verb.add_argument("plan", help="file of a plan")
    verb.add_argument("model", help=MODEL)
    if cluster:
        verb.add_argument(cluster, required=True, help="16x8xH100, or a JSON file of a cluster or "
                          "of what was measured")  # fmt: skip
    verb.add_argument("--global-batch-size", type=int, help="rows of a step (those of inputs)")
    verb.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    verb.add_argument("--pin", action="append", default=[], metavar="tp=2", help="a constraint")
    verb.add_argument("--memory", default="", help="bytes per device to plan with, like 70GiB")
    verb.add_argument("--json", action="store_true", help="one JSON object on stdout")
    verb.add_argument("--force", action="store_true", help="overwrite the file")
    verb.set_defaults(command=command)
    return verb


# --- commands -------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> int:
    from . import api
    from .search.explain import line

    found = api.plan(*_model(options), options.cluster, **_asked(options))
    _save(found.plan, options)
    if options.json:
        return _show(json.loads(files.encode(found)))
    print("      step     memory per device")
    print(line(found, found.step_s))
    for choice in found.others[: options.top - 1]:
        print(line(choice, found.step_s))
    print(f"search: {found.result.how_exact}, in {found.result.seconds * 1e3:.0f} ms")
    return 0


def _explain(options: argparse.Namespace) -> int:
    from . import api
    from .plan import load_plan
    from .search.why import against, why

    case = api.case(*_model(options), options.cluster, **_asked(options))
    best = case.best().best
    rows = why(case, best)
    if options.plan:
        rows += ["this plan beside the best:", *against(case, load_plan(options.plan), best.plan)]
    return _show(rows) if options.json else _lines(rows)


def _simulate(options: argparse.Namespace) -> int:
    from . import api

    timeline = api.simulate(options.plan, *_model(options), options.cluster,
                            global_batch_size=options.global_batch_size)  # fmt: skip
    _save(timeline, options)
    peak = max(timeline.memory, key=lambda memory: memory.peak_bytes)
    parts = timeline.parts(timeline.ranks[0])
    shown = {"step_s": timeline.step_s, "idle_s": parts.idle_s, "comm_s": parts.comm_s,
             "overlap_s": parts.overlap_s, "peak_bytes": peak.peak_bytes}  # fmt: skip
    return _show(shown) if options.json else _lines([f"{k:12} {v:.6g}" for k, v in shown.items()])


def _measure(options: argparse.Namespace) -> int:
    from . import api

    asked = _asked(options)
    known = api.measure(*_model(options), constraints=asked["constraints"],
                        seconds=options.seconds)  # fmt: skip
    if os.environ.get("RANK", "0") == "0":
        _save(known, options)
        print(f"{len(known.profile.cells)} programs, {len(known.profile.curves)} groups: "
              f"{options.out}")  # fmt: skip
    return 0


def _convert(options: argparse.Namespace) -> int:
    from .run.convert import convert

    count = convert(Path(options.old), Path(options.new))
    return _lines([f"{count} tensors: {options.new}"])


def _run(options: argparse.Namespace) -> int:
    """torchrun, a process per device of the plan; `parallelize` reads AUTOPAR_PLAN."""
    from .plan import load_plan

    count = len(load_plan(options.plan).devices)
    rest = options.rest[options.rest[:1] == ["--"] :]
    start = [] if any("nproc" in a or "nnodes" in a for a in rest) else [
        "--standalone", "--nproc-per-node", str(count)]  # fmt: skip
    plan = str(Path(options.plan).resolve())
    print(f"AUTOPAR_PLAN={plan} torchrun {shlex.join([*start, *rest])}", file=sys.stderr)
    if options.print:
        return 0
    from .run import launcher

    os.environ["AUTOPAR_PLAN"] = plan
    launcher.launch([*start, *rest])
    return 0


# --- in and out -----------------------------------------------------------------------------------


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, as the Python API takes it."""
    pins: dict[str, Any] = {}
    for pin in options.pin:
        name, _, value = pin.partition("=")
        try:
            pins[name.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            pins[name.replace("-", "_")] = value
    if options.memory:
        pins["memory_bytes"] = _bytes(options.memory)
    return {"global_batch_size": options.global_batch_size, "precision": options.precision,
            "constraints": {**pins, "precision": options.precision}}  # fmt: skip


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9.]+) *([kmg]?i?b?)", text.lower())
    if not match or match[2] not in SIZES:
        raise PlanError(f"{text!r} is no size", where="--memory", fix="write 70GiB or 70GB")
    return int(float(match[1]) * SIZES[match[2]])


def _model(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its inputs."""
    place, _, name = options.model.rpartition(":")
    if not place:
        raise PlanError(f"{options.model!r} names no function", where="MODEL", fix=MODEL)
    try:
        made = getattr(_module(place), name)
    except (ImportError, AttributeError, OSError) as error:
        raise FileError(f"{options.model}: {error}", where="MODEL", fix=MODEL) from error
    model, inputs = made()
    return model, inputs


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no Python file")
    sys.path.insert(0, str(Path(place).resolve().parent))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _save(value: Any, options: argparse.Namespace) -> None:
    if options.out and Path(options.out).exists() and not options.force:
        raise FileError(f"{options.out} is there already", where="--out", fix="add --force")
    if options.out:
        files.save(value, options.out)


def _show(value: Any) -> int:
    print(json.dumps(value, indent=1))
    return 0


def _lines(rows: Sequence[str]) -> int:
    print("\n".join(rows))
    return 0
