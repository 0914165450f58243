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
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from . import errors, files
from .errors import AutoparError, FileError, PlanError
from .profile import QUICK_S

# By what went wrong: nothing fits; a bad file, model or plan; another profile; a worker failed.
EXIT_CODES: dict[type[AutoparError], int] = {
    errors.SearchError: 3, FileError: 4, PlanError: 4, errors.ShardingError: 4,
    errors.ScheduleError: 4, errors.TraceError: 4, errors.CheckpointError: 4,
    errors.ProfileError: 5, errors.RunError: 6,
}
MOST_BYTES = 2**50
SIZES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
MOST_RESTARTS = "20"  # of one node, unless told otherwise; a script that fails fails each time
MODEL = "module:function or file.py:function; it is run, and returns (model, inputs)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status says how it went."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = 0 if given[:1] == ["run"] else len(given)  # torchrun's and the script's
    given[:own] = [re.sub("(?<=[a-z])_", "-", a) if a.startswith("--") and "=" not in a else a
                   for a in given[:own]]
    parser = _parser()
    options, unknown = parser.parse_known_args(given)
    if unknown and options.command is not _run:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unknown:  # options of torchrun, which come before the script
        options.rest = [*unknown, *options.rest]
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="[autopar] %(message)s")
    try:
        _refuse_out(options)
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except AutoparError as error:
        print(_plain(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("autopar", description="Plan and run parallel training.")
    verbs = parser.add_subparsers(required=True, metavar="command")
    plan = _verb(verbs, "plan", _plan, "find the fastest plan that fits", "--cluster")
    plan.add_argument("--top", type=_count, default=5, help="plans that are shown (5)")
    plan.add_argument("--out", help="file for the plan")
    explain = _verb(verbs, "explain", _explain, "say why a plan is the fastest", "--cluster")
    explain.add_argument("--plan", help="a plan to lay beside the best")
    simulated = _verb(verbs, "simulate", _simulate, "predict a step of a plan", "--cluster", True)
    simulated.add_argument("--out", help="file for the timeline, or for what was replayed")
    simulated.add_argument("--trace", help="file of what happens to nodes and links: no plan is "
                           "given, and policies of moving to another are laid side by side")
    measured = _verb(verbs, "measure", _measure, "measure what planning needs, under torchrun")
    measured.add_argument("--out", required=True, help="file for what was measured")
    measured.add_argument("--seconds", type=_seconds, default=QUICK_S,
                          help=f"time to spend after a quick pass ({QUICK_S:.0f})")
    env = verbs.add_parser("env", help="say what is here: versions, and every GPU")
    env.set_defaults(command=_env)
    run = verbs.add_parser("run", help="start a script under torchrun")  # --plan comes first
    how = run.add_mutually_exclusive_group(required=True)
    how.add_argument("--plan", help="file of the plan that the script trains under")
    how.add_argument("--elastic", type=_nodes, metavar="MIN:MAX",
                     help="so many nodes, which may come and go; the script calls model.resume")
    run.add_argument("--head", default="127.0.0.1:29400", metavar="HOST:PORT",
                     help="where elastic nodes meet, on one that stays (this machine, 29400)")
    run.add_argument("--print", action="store_true", help="only show the command")
    run.add_argument("rest", nargs=argparse.REMAINDER, metavar="[torchrun options] script ...")
    run.set_defaults(command=_run)
    return parser


def _verb(verbs: Any, name: str, command: Callable[[argparse.Namespace], int], about: str,
          cluster: str = "", takes_plan: bool = False) -> argparse.ArgumentParser:
    """A command about a model."""
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=about, description=about)
    if takes_plan:
        verb.add_argument("plan", nargs="?", help="file of a plan")
    verb.add_argument("model", help=MODEL)
    if cluster:
        verb.add_argument(cluster, required=True, help="16x8xH100, 2x8xH100@ib400 + 4x8xA100-80, or"
                          " a JSON file of a cluster or of what was measured")
        verb.add_argument("--network", default="", help="what joins the nodes of a name: a rate per"
                          " device (400Gb/s), or a name (roce100)")
    verb.add_argument("--global-batch-size", type=_count, help="rows of a step (those of inputs)")
    verb.add_argument("--precision", choices=["float32", "bfloat16"], help="(float32)")
    verb.add_argument("--pin", action="append", default=[], metavar="tp=2", help="a constraint")
    verb.add_argument("--memory", default="", help="bytes per device to plan with, like 70GiB")
    verb.add_argument("--json", action="store_true", help="one JSON object on stdout")
    verb.add_argument("--force", action="store_true", help="overwrite the file")
    verb.set_defaults(command=command)
    return verb


# --- commands -------------------------------------------------------------------------------------


def _env(options: argparse.Namespace) -> int:
    import torch

    from .measure import nvml

    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(*nvml.lines(), sep="\n")
    return 0


def _plan(options: argparse.Namespace) -> int:
    from . import api
    from .search.explain import line

    found = api.plan(*_model(options), _place(options), **_asked(options))
    _save(found.plan, options)
    if options.json:
        return _show(json.loads(files.encode(found)))
    print("      step     memory per device")
    for choice in found.choices[: options.top]:
        print(line(choice, found.step_s))
    print(f"search: {found.how_exact}, in {found.seconds * 1e3:.0f} ms")
    return 0


def _explain(options: argparse.Namespace) -> int:
    from . import api
    from .plan import load_plan
    from .search.reasons import against, why

    case = api.case(*_model(options), _place(options), **_asked(options))
    best = case.best().best
    rows = why(case, best)
    if options.plan:
        rows += ["this plan beside the best:", *against(case, load_plan(options.plan), best.plan)]
    return _show(rows) if options.json else _lines(rows)


def _simulate(options: argparse.Namespace) -> int:
    from . import api

    if options.trace:
        return _replay(options)
    if not options.plan:
        raise PlanError("no plan is given", where="plan", fix="write PLAN MODEL, or add --trace")
    if options.pin or options.memory or options.precision:
        raise PlanError("a plan says all of that itself", where="--pin, --memory, --precision",
                        fix="leave them out, or edit the plan")
    timeline = api.simulate(options.plan, *_model(options), _place(options),
                            global_batch_size=options.global_batch_size)
    _save(timeline, options)
    peak = max(timeline.memory, key=lambda memory: memory.peak_bytes)
    parts = timeline.parts(timeline.ranks[0])
    shown = {"step_s": timeline.step_s, "idle_s": parts.idle_s, "comm_s": parts.comm_s,
             "overlap_s": parts.overlap_s, "peak_bytes": peak.peak_bytes}
    return _show(shown) if options.json else _lines([f"{k:12} {v:.6g}" for k, v in shown.items()])


def _replay(options: argparse.Namespace) -> int:
    from . import api
    from .search.replay import table

    if options.plan:
        raise PlanError("a run with a trace begins with the fastest plan", where="plan",
                        fix="leave out the plan, or --trace")
    found = api.simulate(None, *_model(options), _place(options), changes=options.trace,
                         **_asked(options))
    _save(found, options)
    if options.json:
        return _show(json.loads(files.encode(found)))
    return _lines([*table(found.outcomes), f"{found.num_devices} devices, {found.num_segments} "
                   f"states one after the other, {found.num_plans} plans: {found.seconds:.1f} s"])


def _measure(options: argparse.Namespace) -> int:
    from . import api

    if options.global_batch_size:
        raise PlanError("what is measured are steps of the inputs", where="--global-batch-size",
                        fix="make inputs of so many rows")
    known = api.measure(*_model(options), constraints=_asked(options)["constraints"],
                        precision=options.precision, seconds=options.seconds)
    if os.environ.get("RANK", "0") == "0":
        _save(known, options)
        print(f"{len(known.profile.cells)} programs, {len(known.profile.curves)} groups: "
              f"{options.out}")
    return 0


def _run(options: argparse.Namespace) -> int:
    """torchrun, a process per device of the plan (`parallelize` reads AUTOPAR_PLAN), or one that
    starts the ranks again whenever one of them or a node goes or comes."""
    rest = options.rest[options.rest[:1] == ["--"] :]
    start, told = _elastic(options) if options.elastic else _planned(options, rest)
    shown = " ".join(f"{name}={value}" for name, value in told.items())
    print(f"{shown} torchrun {shlex.join([*start, *rest])}", file=sys.stderr)
    if options.print:
        return 0
    from .run import launcher

    os.environ.update(told)
    launcher.launch([*start, *rest])
    return 0


Start = tuple[list[str], dict[str, str]]  # options of torchrun, and the environment


def _planned(options: argparse.Namespace, rest: list[str]) -> Start:
    from .plan import load_plan

    count = load_plan(options.plan).devices[-1] + 1
    own = any("nproc" in a or "nnodes" in a for a in rest)
    return ([] if own else ["--standalone", "--nproc-per-node", str(count)],
            {"AUTOPAR_PLAN": str(Path(options.plan).resolve())})


def _elastic(options: argparse.Namespace) -> Start:
    """A node counts as lost after some seconds without a sign; one that comes is taken in."""
    waits = "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=3"
    start = ["--nnodes", options.elastic, "--rdzv-backend", "c10d", "--rdzv-endpoint", options.head,
             "--rdzv-id", "autopar", "--rdzv-conf", waits, "--max-restarts", MOST_RESTARTS]
    # A node that joins later would look for the ranks' store where the first attempt had it.
    return start, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


# --- in and out -----------------------------------------------------------------------------------


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, as the Python API takes it."""
    pins: dict[str, Any] = {"memory_bytes": _bytes(options.memory)} if options.memory else {}
    for pin in options.pin:
        name, _, value = pin.partition("=")
        name = name.replace("-", "_")
        if not value or value == "null" or name in pins:
            raise PlanError(f"--pin {pin}: it says nothing, or {name} is pinned already",
                            where="--pin", fix="write --pin tp=2, each name once (--memory pins "
                            "memory_bytes)")
        pins[name] = _value(value)
    return {"global_batch_size": options.global_batch_size, "precision": options.precision,
            "constraints": pins}


def _place(options: argparse.Namespace) -> Any:
    from .find.offline import place_of

    return place_of(options.cluster, options.network)


def _value(text: str) -> Any:
    """The value of a pin: a number or a text, but nothing that JSON lacks, like NaN."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text


def _nodes(text: str) -> str:
    """How many nodes, at least and at most."""
    found = re.fullmatch(r"([1-9][0-9]{0,4}):([1-9][0-9]{0,4})", text, re.ASCII)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!a} is no number of nodes like 1:4")
    return text


def _count(text: str) -> int:
    """For argparse, which names the option."""
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!a} is no number from 1 to 999999999")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{0,9})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!a} is no number of seconds from 0 to 999999")
    return float(text)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) *([kmg]?i?b?)", text.lower(), re.ASCII)
    size = int(float(match[1]) * SIZES.get(match[2], 0)) if match else 0
    if not 0 < size <= MOST_BYTES:
        raise PlanError(f"{text[:80]!a} is no size up to {MOST_BYTES} bytes", where="--memory",
                        fix="write 70GiB or 70GB")
    return size


def _model(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its inputs, from code that is run."""
    place, _, name = options.model.rpartition(":")
    if not place:
        raise PlanError(f"{options.model!r} names no function", where="MODEL", fix=MODEL)
    try:
        made = getattr(_module(place), name)()
    except (Exception, SystemExit) as error:  # whatever the code does
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise FileError(f"{options.model}: {type(error).__name__}: {error}",
                        where=f"{last.filename}:{last.lineno}", fix=MODEL) from error
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise FileError(f"{options.model} returned {type(made).__name__}", where="MODEL", fix=MODEL)
    return made[0], made[1]


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


def _refuse_out(options: argparse.Namespace) -> None:
    """Refuse, before any work, an output path where something is that may not be replaced."""
    out = getattr(options, "out", None)
    if out and os.path.lexists(out) and not (options.force and files.is_regular(out)):
        fix = "add --force" if files.is_regular(out) else "name a file"
        raise FileError(f"{out} is there already", where="--out", fix=fix)


def _save(value: Any, options: argparse.Namespace) -> None:
    if options.out:
        files.save(value, options.out)


def _show(value: Any) -> int:
    print(json.dumps(value, indent=1))
    return 0


def _lines(rows: Sequence[str]) -> int:
    print(_plain("\n".join(rows)))
    return 0


def _plain(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
