"""The command line. Results on stdout, all else on stderr; `--help` of a command has an example."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .. import errors
from ..errors import AutoparError, FileError, PlanError
from ..profile import QUICK_S
from . import comparing, machines, planning, running
from .options import MODEL, count, nodes, plain, refuse_out, seconds
from .shown import LogLines, showing

# By what went wrong: nothing fits; a bad file, model or plan; another profile; a worker failed.
EXIT_CODES: dict[type[AutoparError], int] = {
    errors.SearchError: 3, FileError: 4, PlanError: 4, errors.ShardingError: 4,
    errors.ScheduleError: 4, errors.TraceError: 4, errors.CheckpointError: 4,
    errors.ProfileError: 5, errors.RunError: 6,
}
CLUSTER = ("16x8xH100, 2x8xH100@ib400 + 4x8xA100-80, or a JSON file of a cluster or of what was "
           "measured")
Command = Callable[[argparse.Namespace], int]
FILES = ("plan", "other", "out", "measured", "trace", "model", "cluster", "rest")  # for a shell


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status says how it went."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = 0 if given[:1] == ["run"] else len(given)  # torchrun's and the script's
    given[:own] = [re.sub("(?<=[a-z])_", "-", a) if a.startswith("--") and "=" not in a else a
                   for a in given[:own]]
    parser = build_parser()
    options, unknown = parser.parse_known_args(given)
    if unknown and options.command is not running.run:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unknown:  # options of torchrun, which come before the script
        options.rest = [*unknown, *options.rest]
    logging.basicConfig(handlers=[LogLines()], level=logging.INFO, format="[autopar] %(message)s")
    try:
        refuse_out(options)
        command: Command = options.command
        with showing():
            return command(options)
    except AutoparError as error:
        print(plain(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or `autopar ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be written has no reader
        return 130


class Parser(argparse.ArgumentParser):
    """Wrong usage is an error like any other: what, where, and what to do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"UsageError: {message}\n  where: {self.prog}\n  fix:   see {self.prog} "
                  f"--help\n{self.epilog or ''}")


class Completion(argparse.Action):
    """What a shell has to know, as torchrun gives it."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> NoReturn:
        try:
            import shtab
        except ImportError:
            parser.error("completion needs shtab: pip install shtab")
        for verb in subparsers(parser).values():
            for action in verb._actions:
                if action.dest in FILES:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, values))
        parser.exit()


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(dict(a.choices) for a in parser._actions if isinstance(a.choices, dict))


def build_parser() -> argparse.ArgumentParser:
    """Commands in the order in which one needs them."""
    parser = Parser("autopar", description="Plan and run parallel training.", epilog=_example(
        "estimate profiling/big_models.py:llama_7b --cluster 8xH100 --global-batch-size 64"),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print-completion", action=Completion, choices=["bash", "zsh", "tcsh"],
                        help="print a script that completes commands in a shell")
    verbs = parser.add_subparsers(required=True, metavar="command")
    _of_the_machine(verbs)
    _of_a_model(verbs)
    _of_plans(verbs)
    _run(verbs)
    return parser


def _of_the_machine(verbs: Any) -> None:
    env = _verb(verbs, "env", machines.env, "tell versions and devices, for an issue", "env")
    env.add_argument("--json", action="store_true", help="one JSON object on stdout")
    doctor = _verb(verbs, "doctor", machines.doctor, "try whether ranks can train here", "doctor")
    doctor.add_argument("--ranks", type=count, default=2, help="processes to start (2)")
    doctor.add_argument("--timeout", type=seconds, default=120.0, help="seconds to wait (120)")
    measured = _verb(verbs, "measure", machines.measure,
                     "measure what planning needs, under torchrun",
                     "measure train_model.py:made --out known.json",
                     "torchrun --standalone --nproc-per-node 2 -m autopar_torch")
    measured.add_argument("model", help=MODEL)
    _asking(measured)
    measured.add_argument("--out", required=True, help="file for what was measured")
    measured.add_argument("--seconds", type=seconds, default=QUICK_S,
                          help=f"time to spend after a quick pass ({QUICK_S:.0f})")


def _of_a_model(verbs: Any) -> None:
    model, batch = "train_model.py:made --cluster 8xH100", "--global-batch-size 64"
    estimated = _verb(verbs, "estimate", comparing.estimate, "say whether models fit on machines",
                      f"estimate {model} --cluster 2x8xA100-80 {batch}")
    estimated.add_argument("model", nargs="+", help=MODEL)
    _on_machines(estimated, action="append")
    planned = _verb(verbs, "plan", planning.plan, "find the fastest plan that fits",
                    f"plan {model} {batch} --out plan.json")
    planned.add_argument("model", help=MODEL)
    _on_machines(planned)
    planned.add_argument("--top", type=count, default=5, help="plans that are shown (5)")
    planned.add_argument("--out", help="file for the plan")
    explained = _verb(verbs, "explain", planning.explain, "say why a plan is the fastest",
                      f"explain {model} {batch} --plan mine.json")
    explained.add_argument("model", help=MODEL)
    _on_machines(explained)
    explained.add_argument("--plan", help="a plan to lay beside the best")


def _of_plans(verbs: Any) -> None:
    model = "train_model.py:made --cluster 8xH100 --global-batch-size 64"
    simulated = _verb(verbs, "simulate", planning.simulate, "predict a step of a plan",
                      f"simulate plan.json {model}")
    simulated.add_argument("plan", nargs="?", help="file of a plan")
    simulated.add_argument("--out", help="file for the timeline, or for what was replayed")
    simulated.add_argument("--trace", help="file of what happens to nodes and links: no plan is "
                           "given, and policies of moving to another are laid side by side")
    reported = _verb(verbs, "report", comparing.report, "tell all about a plan, as page or tables",
                     f"report plan.json {model} --out report.html")
    reported.add_argument("plan", help="file of a plan")
    reported.add_argument("--out", help="file for the page; without it there are tables")
    reported.add_argument("--measured", help="file of a measured timeline, to stand beneath")
    differing = _verb(verbs, "diff", comparing.diff, "say how two plans differ and what that costs",
                      f"diff plan.json mine.json {model}")
    differing.add_argument("plan", help="file of a plan")
    differing.add_argument("other", help="file of another")
    for verb, said in ((simulated, ""), (reported, "precision"),
                       (differing, "precision pin memory")):
        verb.add_argument("model", help=MODEL)
        _on_machines(verb, said)
    valid = _verb(verbs, "validate", comparing.validate, "check the file of a plan",
                  "validate plan.json --devices 8")
    valid.add_argument("plan", help="file of a plan")
    valid.add_argument("--devices", type=count, help="how many there are")


def _run(verbs: Any) -> None:
    run = _verb(verbs, "run", running.run, "start a script under torchrun",
                "run --plan plan.json train.py --epochs 3")
    how = run.add_mutually_exclusive_group(required=True)  # --plan comes first
    how.add_argument("--plan", help="file of the plan that the script trains under")
    how.add_argument("--elastic", type=nodes, metavar="MIN:MAX",
                     help="so many nodes, which may come and go; the script calls model.resume")
    run.add_argument("--head", default="127.0.0.1:29400", metavar="HOST:PORT",
                     help="where elastic nodes meet, on one that stays (this machine, 29400)")
    run.add_argument("--print", action="store_true", help="only show the command")
    run.add_argument("rest", nargs=argparse.REMAINDER, metavar="[torchrun options] script ...")


def _verb(verbs: Any, name: str, command: Command, about: str, example: str,
          program: str = "autopar") -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=about, description=about, epilog=_example(example, program),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    verb.set_defaults(command=command)
    return verb


def _example(text: str, program: str = "autopar") -> str:
    return f"example:\n  {program} {text}\n"


def _on_machines(verb: argparse.ArgumentParser, said: str = "", **more: Any) -> None:
    """Where a model would be trained, and how; `said`: what a plan says itself, so that it is
    refused, and not in the help."""
    verb.add_argument("--cluster", required=True, help=CLUSTER, **more)
    verb.add_argument("--network", default="", help="what joins the nodes of a name: a rate per "
                      "device (400Gb/s), or a name (roce100)")
    _asking(verb)
    for action in verb._actions:
        action.help = argparse.SUPPRESS if action.dest in said.split() else action.help


def _asking(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--global-batch-size", type=count, help="rows of a step (those of inputs)")
    verb.add_argument("--precision", choices=["float32", "bfloat16"], help="(float32)")
    verb.add_argument("--pin", action="append", default=[], metavar="tp=2", help="a constraint")
    verb.add_argument("--memory", default="", help="bytes per device to plan with, like 70GiB")
    verb.add_argument("--json", action="store_true", help="one JSON object on stdout")
    verb.add_argument("--force", action="store_true", help="overwrite the file")
