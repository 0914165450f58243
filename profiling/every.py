"""What does every measuring command say here, in its quick form, beside its targets?

    python profiling all --quick                    one after the other, then a table
    python profiling all --quick --only speed,fuzz
    python profiling all --quick --json FILE --markdown docs/measured.md

Each command runs as it would by hand (its quick options stand in `profiling/__main__.py`). Its last
line has the figures, its exit status says whether its targets hold: 0 yes, 77 skipped, as what it
needs is not here. The machine should be quiet; what else loads it is told beside the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from start import DOOR

SCRIPTS = runpy.run_path(str(Path(DOOR) / "__main__.py"))["SCRIPTS"]
LABS = ("unequal", "live", "lost")  # need emulated nodes
SKIPPED, LIMIT_S, GRACE_S = 77, 400, 20

INTRO = """# Every measurement, quickly

Written by `python profiling all --quick --markdown docs/measured.md`: the last line of every
command of `python profiling` in its quick form, and whether its targets held. Quick forms have few
cases and few rounds: [accuracy](guide/accuracy.md) and the [log](log.md) have the figures of the
whole ones.
"""


@dataclass(frozen=True)
class Row:
    command: str
    outcome: str
    figures: str
    target: str
    seconds: float


def run(name: str, quick: bool, limit_s: float) -> Row:
    """One command, in processes of its own."""
    script = SCRIPTS[name]
    options = shlex.split(script.quick) if quick else []
    command, start = f"python profiling {shlex.join([name, *options])}", time.monotonic()
    if why := no_lab() if name in LABS else "":
        return Row(command, "skipped", why, script.target, 0.0)
    process = subprocess.Popen([sys.executable, DOOR, name, *options], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=limit_s)
        crashes = err.count("Traceback (most") - err.count("ChildFailedError: ")  # of torchrun
        broken = process.returncode not in (0, SKIPPED) and crashes > 0
        status, figures = 99 if broken else process.returncode, last(err if broken else out)
    except subprocess.TimeoutExpired:
        status, figures = 124, f"not done within {limit_s:.0f} s"
    finally:
        end(process)
    holds = {0: "held" if script.target else "-", SKIPPED: "skipped", 1: "NOT held"}
    return Row(command, holds.get(status, "FAILED"), figures, script.target,
               time.monotonic() - start)


def end(process: subprocess.Popen[str]) -> None:
    """With all that it has started."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)


def no_lab() -> str:
    """Why no emulated node can be made here."""
    from netlab import Lab, Node, NotPermitted

    try:
        with Lab([Node(name="n0", cores=(min(os.sched_getaffinity(0)),))]):
            return ""
    except NotPermitted as error:
        return str(error)


def last(text: str) -> str:
    found = [line.strip() for line in text.splitlines() if line.strip()]
    return found[-1].removeprefix("FIGURES ")[:300] if found else ""


def machine(before: float, after: float) -> str:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (f"{cores} core(s), {platform.machine()}, Python {platform.python_version()}, torch "
            f"{torch.__version__}, {time.strftime('%Y-%m-%d')}; load of others when it began "
            f"{before:.1f}, a minute's load at its end {after:.1f}")


def markdown(rows: list[Row], about: str, took_s: float) -> Iterator[str]:
    cells = ([f"`{r.command.removeprefix('python profiling ')}`", r.outcome, f"{r.seconds:.0f} s",
              r.target or "-", r.figures] for r in rows)
    yield from (INTRO, f"In all {took_s / 60:.1f} minutes on {about}.", "",
                "| command | targets | took | target | figures |", "|---|---|---|---|---|")
    for row in cells:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def main() -> int:
    parser = argparse.ArgumentParser("profiling all", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each in its quick form")
    parser.add_argument("--only", default="", help="names, with commas")
    parser.add_argument("--limit", type=float, default=0, metavar="SECONDS",
                        help=f"for one command ({LIMIT_S}; without --quick a day)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = options.only.split(",") if options.only else [n for n in SCRIPTS if n != "all"]
    if unknown := set(names) - set(SCRIPTS) | set(names) & {"all"}:
        parser.error(f"no command to run: {', '.join(sorted(unknown))}")
    limit_s = options.limit or (LIMIT_S if options.quick else 86400)
    rows, before, start = list[Row](), os.getloadavg()[0], time.monotonic()
    for name in names:
        rows.append(run(name, options.quick, limit_s))
        print(f"{name:12} {rows[-1].outcome:9} {rows[-1].seconds:5.0f} s  {rows[-1].figures}",
              flush=True)
    took_s, about = time.monotonic() - start, machine(before, os.getloadavg()[0])
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text("\n".join(markdown(rows, about, took_s)) + "\n")
    counts = {kind: sum(row.outcome == kind for row in rows)
              for kind in dict.fromkeys(row.outcome for row in rows)}
    print(f"\n{about}\n{len(rows)} commands in {took_s / 60:.1f} minutes: "
          + ", ".join(f"{count} {kind if kind != '-' else 'without a target'}"
                      for kind, count in counts.items()))
    return int(any(row.outcome in ("NOT held", "FAILED") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
