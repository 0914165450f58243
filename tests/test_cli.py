"""The command line: results on stdout, exit codes that say how it went."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from autopar_torch import Plan, api, files, load_plan
from autopar_torch.cli import main
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(ROOT / "profiling" / "models.py") + ":gpt", str(tmp_path / "known.json")
    given = ["measure", model, "--out", out, "--seconds", "0.1"]
    assert main([*given, "--global-batch-size", "4"]) != 0
    assert "make inputs of so many rows" in capsys.readouterr().err
    assert main([*given, "--precision", "bfloat16"]) == 0
    assert main(["plan", model, "--cluster", out, "--precision", "bfloat16"]) == 0


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
