"""The command line: results on stdout, exit codes that say how it went."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pty
import resource
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from autopar_torch import Plan, api, files, load_plan
from autopar_torch.cli import build_parser, machines, main, shown, subparsers
from autopar_torch.cluster import Cluster, Device, Link
from autopar_torch.find import measuring
from ranks import ROOT

MODEL = """
import torch
from torch import nn

def made():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        return Loss(model), {"x": torch.zeros(2, 64)}

class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()
"""


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """A model, and a cluster of four small devices."""
    (tmp_path / "own.py").write_text(MODEL)
    device = Device("small", 1e12, 1e11, 2**30)
    cluster = Cluster(((device,) * 2,) * 2, Link(1e-5, 1e10), Link(2e-5, 1e9))
    files.save(cluster, tmp_path / "cluster.json")
    return [f"{tmp_path / 'own.py'}:made", "--cluster", str(tmp_path / "cluster.json"),
            "--global-batch-size", "64"]


def _model(place: str) -> tuple[Any, Any]:
    spec = importlib.util.spec_from_file_location("own", place.partition(":")[0])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, inputs = module.made()
    return model, inputs


def test_help_does_not_import_torch() -> None:
    code = "import sys, autopar_torch.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    done = subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"],
                          capture_output=True, timeout=300)
    assert done.returncode == 0


def test_plan_writes_a_plan_that_simulate_and_explain_read(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "plan.json")
    assert main(["plan", *given, "--out", out]) == 0
    assert "best" in capsys.readouterr().out
    assert len(load_plan(out).devices) == 4
    assert main(["simulate", out, *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > 0
    assert main(["explain", *given, "--plan", out]) == 0
    shown = capsys.readouterr().out
    assert "what would change the plan" in shown and "difference" in shown
    assert main(["plan", *given, "--out", out]) == 4  # it is there already
    assert main(["run", "--plan", out, "--print", "train.py"]) == 0
    assert "--nproc-per-node 4 train.py" in capsys.readouterr().err


def test_a_batch_that_is_too_small_for_a_plan_is_said(
    given: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.save(Plan.uniform(dp=4, num_micro_batches=8), tmp_path / "plan.json")
    asked = ["simulate", str(tmp_path / "plan.json"), *given, "--global-batch-size"]
    assert main([*asked, "32"]) == 0 and "row(s)" not in caplog.text
    assert main([*asked, "8"]) == 0
    assert "8 row(s) for 32 micro-batches" in caplog.text


def test_stdout_is_one_json_object(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *given, "--json", "--global_batch_size", "32", "--pin", "tp=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["choices"][0]["plan"]["replicas"][0]["stages"][0]["mesh"] == [2]
    assert found["gap"] == 0


def test_run_leaves_what_follows_as_it_is(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "plan.json")
    main(["plan", *given, "--out", out])
    assert main(["run", "--plan", out, "--print", "own.py", "--batch_size", "8", "--", "x"]) == 0
    assert "--nproc-per-node 4 own.py --batch_size 8 -- x" in capsys.readouterr().err


def test_a_plan_for_other_machines_or_edited_by_halves_is_refused(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files.save(Plan.uniform(dp=8), tmp_path / "eight.json")
    assert main(["simulate", str(tmp_path / "eight.json"), *given]) == 4
    assert "names 8 devices" in capsys.readouterr().err
    out = tmp_path / "plan.json"
    main(["plan", *given, "--pin", "tp=2", "--pin", "pp=2", "--out", str(out)])
    edited = json.loads(out.read_text())
    stages = edited["replicas"][0]["stages"]
    stages[0]["blocks"][1] += 1
    stages[1]["blocks"][0] += 1
    out.write_text(json.dumps(edited))
    capsys.readouterr()
    assert main(["simulate", str(out), *given]) == 4
    assert "leave them out to have them found" in capsys.readouterr().err


def test_what_was_measured_of_another_model_is_refused(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = api.case(*_model(given[0]), given[2], global_batch_size=64)
    own = measuring.Known(tuple(asked.options), asked.profile, measuring.digest(asked.graph))
    for name, known in (("own", own), ("other", structs.replace(own, model="another"))):
        files.save(known, tmp_path / f"{name}.json")
    rest = ["--global-batch-size", "64"]
    assert main(["plan", given[0], "--cluster", str(tmp_path / "own.json"), *rest]) == 0
    assert main(["plan", given[0], "--cluster", str(tmp_path / "other.json"), *rest]) == 5
    assert "another model was measured" in capsys.readouterr().err


def test_measuring_takes_the_precision_and_refuses_other_rows(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(MODEL.replace('"meta"', '"cpu"'))
    model, out = given[0], str(tmp_path / "known.json")
    given = ["measure", model, "--out", out, "--seconds", "0.1"]
    assert main([*given, "--global-batch-size", "4"]) != 0
    assert "make inputs of so many rows" in capsys.readouterr().err
    assert main([*given, "--precision", "bfloat16"]) == 0
    assert main(["plan", model, "--cluster", out, "--precision", "bfloat16"]) == 0


def test_what_has_no_values_is_not_measured(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "meta.py"
    own.write_text(MODEL.replace("zeros(2, 64)", "zeros(2, 64, device='meta')"))
    assert main(["measure", f"{own}:made", "--out", str(tmp_path / "known.json")]) == 4
    assert "there are no values in the inputs (on meta)" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "needs.py").write_text("import no_such_package")
    assert main(["plan", f"{tmp_path / 'needs.py'}:made", *given[1:]]) == 4
    assert "pip install no_such_package" in capsys.readouterr().err


def test_exit_codes_say_what_went_wrong(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *given, "--memory", "20KiB"]) == 3
    told = capsys.readouterr()
    assert "nearest: tp=" in told.err and not told.out
    assert main(["plan", *given, "--pin", "tp=3"]) == 3
    assert main(["plan", *given, "--pin", "pipes=3"]) == 4
    assert main(["plan", *given, "--pin", "zero=7"]) == 4
    assert main(["plan", *given, "--pin", "tp=16"]) == 3
    assert main(["plan", "no.such.module:made", *given[1:]]) == 4
    assert main(["plan", given[0], "--cluster", "8xNothing"]) == 4
    with pytest.raises(SystemExit) as usage:
        main(["plan"])
    assert usage.value.code == 2


GOLDEN = Path(__file__).parent / "golden_errors.txt"


def test_errors_read_as_they_were_meant_to(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the file: a command, what it says on stderr, and its exit code."""
    monkeypatch.chdir(tmp_path)
    files.save(Plan.uniform(dp=8), "eight.json")
    Path("text.json").write_text("{")
    Path("other.json").write_text('{"format": "autopar-plan"}')
    asked = GOLDEN.read_text()
    told = []
    for line in (line for line in asked.splitlines() if line.startswith("$ autopar ")):
        code = main(line.removeprefix("$ autopar ").replace("GIVEN", shlex.join(given)).split())
        said = capsys.readouterr().err.replace(f"{tmp_path}/", "")
        said = "".join(row for row in said.splitlines(True) if not row.startswith("[autopar]"))
        told.append(f"{line}\n{said}exit {code}\n")
    assert "\n".join(told) == asked


# --- the surface: a new option is a decision, not an accident -------------------------------------

ASKING = "--force --global-batch-size --json --memory --pin --precision"
SURFACE = {
    "env": "--json",
    "doctor": "--ranks --timeout",
    "measure": f"model {ASKING} --out --seconds",
    "estimate": f"model --cluster --network {ASKING}",
    "plan": f"model --cluster --network {ASKING} --out --top",
    "explain": f"model --cluster --network {ASKING} --plan",
    "simulate": f"plan model --cluster --network {ASKING} --out --trace",
    "report": f"plan model --cluster --network {ASKING} --measured --out",
    "diff": f"plan other model --cluster --network {ASKING}",
    "validate": "plan --devices",
    "run": "rest --elastic --head --plan --print",
}


def verbs() -> dict[str, argparse.ArgumentParser]:
    return subparsers(build_parser())


def test_the_commands_and_their_options_are_these() -> None:
    found = {name: {(a.option_strings or [a.dest])[-1] for a in verb._actions} - {"--help"}
             for name, verb in verbs().items()}
    assert found == {name: set(text.split()) for name, text in SURFACE.items()}


@pytest.mark.parametrize("name", SURFACE)
def test_the_example_in_the_help_of_a_command_is_understood_by_it(name: str) -> None:
    example = (verbs()[name].epilog or "").split(f" {name}", 1)[1].split()
    options = build_parser().parse_args([name, *example])
    assert options.command is verbs()[name].get_default("command")


def test_help_comes_at_once() -> None:
    took = []
    for _ in range(5):
        before = _children_s()
        subprocess.run([sys.executable, "-m", "autopar_torch", "--help"], capture_output=True,
                       check=True, timeout=300)
        took.append(_children_s() - before)
    assert min(took) < 0.4


def _children_s() -> float:
    """Of the processor: what else runs here may make the wait longer."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_wrong_usage_says_what_where_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as usage:
        main(["plan", "own.py:made"])
    told = capsys.readouterr()
    assert usage.value.code == 2 and not told.out
    assert "--cluster" in told.err and "where: autopar plan" in told.err and "fix:" in told.err
    assert "example:" in told.err


@pytest.mark.parametrize(("name", "said"), [
    ("report", {"--precision"}), ("diff", {"--precision", "--pin", "--memory"})])
def test_what_a_plan_says_itself_is_not_offered(name: str, said: set[str]) -> None:
    words = set(verbs()[name].format_help().split())
    assert not words & said and {"--cluster", "--json"} <= words


def test_a_shell_completes_commands_options_and_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    assert not ended.value.code
    script = capsys.readouterr().out + """
complete -p autopar
ask() { COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _shtab_autopar autopar "${@: -1}"
        echo "${COMPREPLY[@]}"; }
ask autopar ""; ask autopar plan --gl
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[0].endswith("autopar"), done.stderr
    found = done.stdout.split()
    assert set(SURFACE) <= set(found) and "--global-batch-size" in found


# --- progress: on stderr, and only there ----------------------------------------------------------


def tell(what: str, done: int, total: int) -> None:
    shown.progress.tell(what, done, total)


def test_off_a_terminal_a_line_comes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: now[0])
    with shown.showing():
        for second in range(30):
            now[0] = float(second)
            tell("tracing" if second < 5 else "searching", second, 30)
    told = capsys.readouterr()
    assert not told.out and told.err.splitlines() == [
        "[autopar] tracing: 2 of 30, about 28 s left", "[autopar] searching: 12 of 30, about 10 s "
        "left", "[autopar] searching: 22 of 30, about 6 s left"]
    tell("nobody listens", 0, 1)
    assert not capsys.readouterr().err


def test_on_a_terminal_a_bar_moves_and_is_gone_before_the_result(
    given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, inside = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    drawn = bytearray()
    reader = threading.Thread(target=_all_of, args=(outside, drawn))
    reader.start()
    with open(inside, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        assert main(["plan", *given, "--json"]) == 0
    reader.join(60)
    assert json.loads(capsys.readouterr().out)["choices"]
    assert b"tracing the model" in drawn and b"searching" in drawn
    assert drawn.count(b"\x1b[?25h") == drawn.count(b"\x1b[?25l") == 1  # the cursor is back


def _all_of(terminal: int, drawn: bytearray) -> None:
    with contextlib.suppress(OSError):  # the other end was closed
        while part := os.read(terminal, 4096):
            drawn += part


@pytest.mark.slow
def test_a_plan_for_seven_billion_parameters_takes_less_than_half_a_minute() -> None:
    pytest.importorskip("transformers")
    before = _children_s()
    at_once = ("import sys; from autopar_torch.cli import main, shown; shown.FIRST_S = 0.0; "
               "sys.exit(main())")  # a quick machine has nothing to tell within two seconds
    command = [sys.executable, "-c", at_once, "plan",
               f"{ROOT / 'profiling' / 'big_models.py'}:llama_7b", "--cluster", "8xH100",
               "--global-batch-size", "64", "--precision", "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert _children_s() - before < 30 and "[autopar] tracing the model" in done.stderr


# --- plans beside each other ----------------------------------------------------------------------


@pytest.fixture
def two(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Files of two plans for the model."""
    made = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for out, tp in zip(made, (1, 2), strict=True):
        assert main(["plan", *given, "--pin", f"tp={tp}", "--out", out]) == 0
    capsys.readouterr()
    return made


def test_diff_names_what_differs_and_what_it_costs(
    given: list[str], two: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *two, *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("devices" in path for path, _, _ in found["fields"])
    for path, own in zip(two, found["costs"], strict=True):
        assert main(["simulate", path, *given, "--json"]) == 0
        assert own["step, ms"] == pytest.approx(
            1e3 * json.loads(capsys.readouterr().out)["step_s"])
    assert main(["diff", two[0], two[0], *given]) == 0
    shown = capsys.readouterr().out
    assert "the plans are equal" in shown and "+0.000" in shown
    assert main(["diff", *two, *given, "--pin", "tp=2"]) == 4


def test_the_same_question_gives_the_same_bytes(given: list[str], tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        assert main(["plan", *given, "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize("command", ["plan", "explain", "estimate"])
def test_what_is_printed_holds_nothing_that_a_terminal_would_obey(
    command: str, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *given]) == 0
    told = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in told.out + told.err)


def test_report_writes_a_page_or_tables(
    given: list[str], two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    assert main(["report", two[1], *given, "--out", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert main(["report", two[1], *given, "--out", str(out)]) == 4  # it is there already
    capsys.readouterr()
    assert main(["report", two[1], *given]) == 0
    shown = capsys.readouterr().out
    assert "The candidates, and why they lost" in shown
    assert main(["report", two[1], *given, "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)
    assert all(section["title"] in shown for section in sections)
    timeline = str(tmp_path / "timeline.json")
    assert main(["simulate", two[1], *given, "--out", timeline]) == 0
    assert main(["report", two[1], *given, "--measured", timeline]) == 0
    assert "A real step took" in capsys.readouterr().out


def test_estimate_says_where_a_model_fits(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["estimate", *given, "--cluster", "8xH100"]
    assert main([*command, "--json"]) == 0
    own, large = json.loads(capsys.readouterr().out)
    assert own["fits"] == large["fits"] == "yes" and large["memory per device"]
    assert main([*command, "--memory", "20KiB"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("nearest") == 2 and " yes " not in shown


def test_validate_refuses_a_plan_that_cannot_run(
    two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", two[0], "--devices", "4"]) == 0
    assert "valid:" in capsys.readouterr().out
    assert main(["validate", two[0], "--devices", "2"]) == 4
    assert main(["validate", str(tmp_path / "none.json")]) == 4


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m autopar_torch env | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert not done.stderr


def test_env_is_a_block_of_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert str(torch.__version__).startswith(found["torch"]) and found["python"] in sys.version


def test_doctor_tells_what_fails_and_how_to_mend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("AUTOPAR_CACHE", str(blocked))
    monkeypatch.setattr(machines, "_ranks", lambda count, timeout_s: "")
    assert main(["doctor"]) == 6
    shown = capsys.readouterr().out
    assert "FAILED  files can be kept" in shown and "fix: set AUTOPAR_CACHE" in shown
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    assert main(["doctor"]) == 0 and "You are ready." in capsys.readouterr().out


@pytest.mark.slow
def test_doctor_gives_up_on_ranks_that_do_not_answer() -> None:
    assert machines._ranks(1, 0.0) == "no answer within 0 s"
    assert machines._ranks(1, 120.0) == ""
