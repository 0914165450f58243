"""How many damaged files and odd command lines are refused as they should be?

    python profiling fuzz            # 5,000 files, 500 command lines
    python profiling fuzz --quick    # a tenth, as the tests do

Every file goes as far as a user's would: read, checked against the model, and simulated. What is
let in has to say in every field what the file says, and its step has to take a time. Of a command
line it is known whether any of its values makes no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar_torch import api, files
from autopar_torch.cli import main as autopar
from autopar_torch.cluster import Change, Cluster, Device, Link
from autopar_torch.errors import AutoparError
from autopar_torch.find import measuring, offline
from autopar_torch.plan import Plan, load_plan
from autopar_torch.run import tracing
from autopar_torch.search.space import Constraints
from autopar_torch.simulate import simulate
from autopar_torch.trace.call import take_apart

LIMIT_S = 1.0
ROWS = 64
MAKER = f"{Path(__file__).resolve()}:made"
NEGATIVE = {"added_s", "backward_bytes", "stash_bytes", "input_bytes", "cost_s",
            "shardings"}  # may be below zero


class Loss(nn.Module):
    """Four linears and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


def made() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return Loss(), {"x": torch.zeros(2, 64)}


def nothing() -> None:
    """Gives no model."""


def fails() -> None:
    raise KeyError("what is not there")


def leaves() -> None:
    sys.exit(3)


def wrong() -> tuple[str, str]:
    return "model", "inputs"


class _Shapes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.zeros(3, 5)


def clashes() -> tuple[nn.Module, Any]:
    return _Shapes(), (torch.zeros(2, 64),)


# --- files ----------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A kind of file, one that is right, and what a user does with it."""

    name: str
    text: str
    use: Callable[[Path], tuple[Any, float]]  # what was read, seconds of a step


class Desk:
    """The model and everything that files are used with, made once."""

    def __init__(self) -> None:
        device = Device("small", 1e12, 1e11, 2**30, efficiency=((1e6, 0.5), (1e9, 0.8)))
        self.cluster = Cluster(((device,) * 2,) * 2, Link(1e-5, 1e10), Link(2e-5, 1e9),
                               (Change(0.5, "link 1", 0.5),), (0, 1, 2, 2))
        model, inputs = made()
        call, _ = take_apart((), inputs)
        own = tracing.tracer(model, torch.device("cpu"), None, "float32", False)
        self.traced = own(call, True, ("loss",))
        limits = Constraints(tp=2)
        assumed = offline.known_of(self.traced, ROWS, self.cluster, limits)
        self.known = measuring.Known(assumed.options, assumed.profile,
                                  measuring.digest(self.traced.graph), measuring.made_with())
        best = api.plan(model, inputs, self.cluster, global_batch_size=ROWS, constraints=limits)
        self.plan = best.plan

    def cases(self) -> list[Case]:
        texts = [files.encode(x).decode() for x in (self.plan, self.cluster, self.known)]
        uses = (self.use_plan, self.use_place, self.use_place)
        return [Case(*case) for case in zip(("plan", "cluster", "known"), texts, uses, strict=True)]

    def use_plan(self, path: Path) -> tuple[Any, float]:
        found = load_plan(path)
        return found, self._step(found, self.cluster)

    def use_place(self, path: Path) -> tuple[Any, float]:
        found = offline.place_of(path)
        cluster = found if isinstance(found, Cluster) else found.profile.cluster
        same = cluster.num_devices == self.cluster.num_devices
        return found, self._step(self.plan if same else Plan.uniform(dp=cluster.num_devices), found)

    def _step(self, plan: Plan, where: offline.Where) -> float:
        whole, profile = offline.profile_for(plan, self.traced, ROWS, where)
        return simulate(whole, self.traced.graph, profile, ROWS).step_s


ODD: tuple[Any, ...] = (
    -1, 0, -0.5, 0.5, 1e-300, 1e300, 1e308, 2**31, 2**63, 2**64, 10**30, 10**400, True, None, "",
    "1", "NaN", [], {}, [1], "x" * 5000, "\u001b[31mred", "\u202eback", math.nan,
    math.inf, -math.inf,
)


def mutated(draw: random.Random, text: str) -> bytes:
    """A file with one or two faults."""
    if draw.random() < 0.35:
        return _bytes_changed(draw, text.encode())
    document = json.loads(text)
    for _ in range(draw.choice((1, 1, 2))):
        _value_changed(draw, document)
    written = json.dumps(document)
    for name, value in (("TWICE", None), ("BIG", "1e400"), ("DEEP", "[" * 100_000)):
        if f'"{name}"' in written:
            at = draw.choice(['"latency_s": 0.1', '"zero": 1', '"reason": "other"', '"name": "x"'])
            written = written.replace(f'"{name}"', value or f"1, {at}, {at}", 1)
    return written.encode()


def _bytes_changed(draw: random.Random, data: bytes) -> bytes:
    at, size = draw.randrange(len(data)), draw.choice((1, 1, 2, 20, 200))
    some = bytes(draw.randrange(256) for _ in range(size))
    return draw.choice((
        lambda: data[:at] + some + data[at + size :],
        lambda: data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :],
        lambda: data[:at], lambda: data[:at] + data[at + size :],
        lambda: data[: at + size] + data[at:], lambda: data[:at] + some + data[at:],
        lambda: b"\xef\xbb\xbf" + data, lambda: data + data, lambda: data + b" " * 1000,
        lambda: b"", lambda: b"null", lambda: b"[" * draw.choice((10, 10_000, 1_000_000)),
        lambda: b'{"a":' * 200_000, lambda: data[:at] + b"9" * 5000 + data[at:],
        lambda: b'"' + b"x" * draw.choice((10, 70_000_000 if draw.random() < 0.05 else 10)) + b'"',
    ))()


def _value_changed(draw: random.Random, document: Any) -> None:
    """Somewhere in the tree: a value replaced, dropped, doubled, or one that nobody knows."""
    place, key = draw.choice(list(_places(document)))
    action = draw.random()
    if action < 0.6:
        place[key] = _odd(draw, place[key])
    elif action < 0.7:
        del place[key]
    elif action < 0.8 and isinstance(place, dict):
        place[draw.choice(("unknown", "", "Name", "zero ", "\u0000"))] = draw.choice(ODD)
    elif action < 0.9 and isinstance(place, list):
        place.insert(draw.randrange(len(place) + 1), place[key])
    else:
        other, name = draw.choice(list(_places(document)))
        place[key], other[name] = other[name], place[key]


def _odd(draw: random.Random, value: Any) -> Any:
    if isinstance(value, (int, float)) and draw.random() < 0.4:
        return draw.choice((-value, value + 1, value * 2, value * 1e12, value - 1, float(value)))
    return draw.choice((*ODD, "TWICE", "BIG", "DEEP"))


def _places(document: Any) -> Any:
    """Every (container, key) below."""
    keys = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in keys:
        yield document, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def nonsense(value: Any, text: str, step_s: float) -> str:
    """Why what was let in should not have been, found without the code that let it in."""
    said, read = json.loads(text), json.loads(files.encode(value))
    if difference := _unlike(said, read, "$"):
        return difference
    for place, key in _places(said):
        number = place[key]
        negative = isinstance(number, (int, float)) and number < 0
        if negative and key not in NEGATIVE and not isinstance(place, list):
            return f"{key} = {number}"
    return "" if 0 < step_s < 1e12 else f"a step of {step_s} s"


def _unlike(said: Any, read: Any, path: str) -> str:
    """Where a file says something that was not read."""
    if isinstance(said, dict) and isinstance(read, dict):
        found = (_unlike(v, read[k], f"{path}.{k}") if k in read else f"{path}.{k} is not read"
                 for k, v in said.items())
        return next(filter(None, found), "")
    if isinstance(said, list) and isinstance(read, list) and len(said) == len(read):
        found = (
            _unlike(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(said, read, strict=True))
        )
        return next(filter(None, found), "")
    return (
        ""
        if said == read and isinstance(said, bool) == isinstance(read, bool)
        else f"{path}: {said!r:.40}"
    )


def fuzz_files(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    desk, draw = Desk(), random.Random(seed)
    cases, verdicts, told = desk.cases(), Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.json"
        for case in cases:  # what is not damaged is let in
            path.write_text(case.text)
            assert nonsense(*_swap(case.use(path), case.text)) == ""
        for i in range(count):
            case = cases[i % len(cases)]
            data = mutated(draw, case.text)
            path.write_bytes(data)
            start = time.process_time()
            verdict = _verdict(case, path, data)
            if time.process_time() - start > LIMIT_S:
                verdict = f"slow: {time.process_time() - start:.1f} s, {verdict}"
            verdicts[verdict.partition(":")[0]] += 1
            told += [f"file {i} {case.name}: {verdict}"] if ":" in verdict else []
    return verdicts, told


def _swap(found: tuple[Any, float], text: str) -> tuple[Any, str, float]:
    return found[0], text, found[1]


def _verdict(case: Case, path: Path, data: bytes) -> str:
    try:
        found = case.use(path)
    except AutoparError as error:
        return (
            "refused" if str(error).isprintable() or "\n" in str(error) else f"unprintable: {error}"
        )
    except (Exception, RecursionError) as error:
        return f"foreign: {type(error).__name__}: {error}"
    if why := nonsense(*_swap(found, data.decode())):
        return f"nonsense: {why}"
    return "the same" if json.loads(data) == json.loads(case.text) else "another that is right"


# --- command lines --------------------------------------------------------------------------------

VALUES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # option: (right, wrong)
    "--global-batch-size": (("64", "8"),
                            ("0", "-5", "x", "1e3", "", "64.0", "9" * 30, "nan", "\u0663")),
    "--precision": (("float32", "bfloat16"), ("int4", "", "FLOAT32")),
    "--memory": (("1GiB", "900MB"), ("1e99GiB", "-1GiB", "0", "1.2.3GiB", "x", "9" * 400, "nanGiB",
                                     "999999999999999999GiB", "GiB")),
    "--pin": (("tp=2", "zero=0", "schedule=1f1b", "recompute=false"),
              ("tp=NaN", "precision=int4", "nonsense=1", "tp", "tp=", "tp=0", "tp=-2", "tp=2.5",
               "=2", "tp=null", "tp=true", "zero=4", "memory_bytes=0", "tp=" + "[" * 9999,
               "schedule=x",
               "tp=1e400", "max_virtual=0", "max_virtual=99999999", "tp=\"2\"", "rings=maybe",
               "memory_bytes=Infinity", "recompute=1", "tp=" + "9" * 40)),
    "--top": (("1", "3"), ("0", "-1", "x", "1e9", "")),
}
_OWN = ("nothing", "fails", "leaves", "wrong", "clashes", "absent", "Path", "LIMIT_S", "", "a b")
MODELS = ((MAKER,), (
    *(f"{MAKER[:-5]}:{name}" for name in _OWN), "x", ":", "no.such:made", "/nonexistent/x.py:made",
    "/tmp:made", "/dev/null:made", "json:loads", "os:getpid", "\u001b[31m:made", "a\0b.py:made",
))


def _places_of(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    right = (str(folder / "cluster.json"), str(folder / "known.json"))
    return right, ("8xNothing", "0x8xH100", "x", "", str(folder), str(folder / "absent.json"),
                   str(folder / "folder.json"), "/dev/zero.json", str(folder / "plan.json"),
                   "99999999999x8xH100", "-1xH100", str(folder / "bomb.json"))


def _outs(folder: Path, i: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ((str(folder / f"out{i}.json"), str(folder / f"new{i}" / "deep" / "out.json")),
            ("/dev/null", "/dev/full", str(folder), str(folder / "plan.json"), "/proc/x/y.json",
             str(folder / "plan.json" / "x.json"), str(folder / "link.json"), "a\0b",
             str(folder / ("x" * 300))))


def command_line(draw: random.Random, folder: Path, i: int) -> tuple[list[str], bool]:
    """Arguments, and whether all of them make sense."""
    right = True

    def pick(values: tuple[tuple[str, ...], tuple[str, ...]], odds: float = 0.12) -> str:
        nonlocal right
        bad = draw.random() < odds
        right = right and not bad
        return draw.choice(values[bad])

    verb = draw.choice(("plan", "plan", "plan", "explain", "simulate"))
    line = [verb, *([str(folder / "plan.json")] if verb == "simulate" else []), pick(MODELS)]
    line += ["--cluster", pick(_places_of(folder))]
    line[1:2] = (
        [pick(((line[1],), _places_of(folder)[1][4:8]))] if verb == "simulate" else line[1:2]
    )
    names = (
        ["--global-batch-size"] if verb == "simulate" else [*VALUES][: 5 if verb == "plan" else 4]
    )
    for name in draw.sample(names, draw.randint(0, min(3, len(names)))):
        line += [name + "=" + pick(VALUES[name], 0.4)]
    if verb != "explain" and draw.random() < 0.3:
        line += ["--out", pick(_outs(folder, i), 0.5)]
        line += ["--force"] if draw.random() < 0.3 and line[-1] != str(folder / "plan.json") else []
    return line, right


def fuzz_commands(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    draw, desk = random.Random(seed), Desk()
    verdicts, told = Counter[str](), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _furnish(folder, desk)
        kept = (folder / "plan.json").read_bytes()
        for i in range(count):
            line, right = command_line(draw, folder, i)
            start = time.process_time()
            verdict = _ran(line, right)
            spent = time.process_time() - start
            if not verdict.startswith("done") and spent > LIMIT_S:
                verdict = f"slow: {spent:.1f} s, {verdict}"
            if (folder / "plan.json").read_bytes() != kept or not Path(
                "/dev/null"
            ).is_char_device():
                verdict = "overwritten: a file that was there"
            verdicts[verdict.partition(":")[0]] += 1
            told += [f"command {i} {line}: {verdict}"] if ":" in verdict else []
    return verdicts, told


def _furnish(folder: Path, desk: Desk) -> None:
    for name, value in (("plan", desk.plan), ("cluster", desk.cluster), ("known", desk.known)):
        files.save(value, folder / f"{name}.json")
    (folder / "folder.json").mkdir()
    (folder / "bomb.json").write_bytes(b"[" * 1_000_000)
    (folder / "link.json").symlink_to(folder / "plan.json")


def _ran(line: list[str], right: bool) -> str:
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = autopar(line)
    except SystemExit as error:
        code = int(error.code or 0) if isinstance(error.code, int) else 99
    except BaseException as error:
        return f"foreign: {type(error).__name__}: {error}"
    if any(c not in "\n\t" and not c.isprintable() for c in out.getvalue() + err.getvalue()):
        return "unprintable: control characters reach the terminal"
    if code == 0:
        return "done" if right else "nonsense: it was done"
    known = code in (2, 3, 4, 5) and err.getvalue().strip()
    return f"refused with {code}" if known else f"foreign: exit {code}, {err.getvalue()!r:.200}"


def run(files_count: int, commands: int, seed: int) -> list[str]:
    """Everything that is not as it should be."""
    logging.disable()
    bad = []
    for name, fuzz, count in (("files", fuzz_files, files_count),
                              ("command lines", fuzz_commands, commands)):
        start = time.perf_counter()
        verdicts, told = fuzz(count, seed)
        shown = ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items()))
        print(f"{count} {name}: {shown}; {time.perf_counter() - start:.0f} s")
        bad += told
    logging.disable(logging.NOTSET)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts = (500, 50) if options.quick else (5000, 500)
    wrong_ones = run(*counts, options.seed)
    print(*wrong_ones, f"{counts[0]:,} files, {counts[1]:,} command lines: {len(wrong_ones)} not "
          "as they should be", sep="\n")
    return 1 if wrong_ones else 0
