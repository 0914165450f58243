"""What is installed is whole: data, types, license, and a command that works from anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from ranks import ROOT

BUILT = "import setuptools.build_meta as b; b.build_{}({!r})"
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", "*.egg-info", ".*_cache", "build", "dist",
                                  "shared", ".venv", ".hypothesis")
USER_SCRIPT = """
import torch
from torch import nn

import autopar_torch as ap


def train(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> float:
    parallel = ap.parallelize(model, constraints={"tp": 2}, guards=ap.Guards())
    optimizer = torch.optim.AdamW(parallel.parameters())
    log, last = ap.TrainingLog(parallel), 0.0
    for batch in batches:
        loss = parallel(**batch)
        loss.backward()
        norm = parallel.clip_grad_norm_(1.0)
        optimizer.step()
        log.step(loss, grad_norm=norm)
        last = float(loss)
    parallel.save("out", optimizer, step=len(batches))
    parallel.report("report.html")
    return last


def choose(model: nn.Module, batch: dict[str, torch.Tensor]) -> ap.Plan:
    found = ap.plan(model, batch, "8xH100", global_batch_size=64)
    ap.report("report.html", found, model, batch, "8xH100", global_batch_size=64)
    step_s: float = ap.simulate(found.plan, model, batch, "8xH100").step_s
    if step_s > 1:
        raise ap.AutoparError("too slow")
    return found.plan
"""
MODEL = """
import torch
from torch import nn

class Loss(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()

def made():
    return Loss(64, 64), {"x": torch.zeros(8, 64)}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)
    for what in ("wheel", "sdist"):
        code = BUILT.format(what, str(folder))
        subprocess.run([sys.executable, "-c", code], cwd=folder / "source", capture_output=True,
                       check=True, timeout=300)
    return folder


def test_the_wheel_holds_all_that_is_not_python(built: Path) -> None:
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    there = {f"autopar_torch/{path.relative_to(ROOT / 'autopar_torch')}"
             for path in (ROOT / "autopar_torch").rglob("*")
             if path.is_file() and "__pycache__" not in path.parts}
    there |= {f"autopar_torch/{path.relative_to(ROOT / 'profiling')}"
              for path in (ROOT / "profiling" / "hardware").rglob("*.json")}
    assert there <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"autopar_torch"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_holds_what_a_reader_needs(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    wanted = {"LICENSE", "README.md", "setup.py", "tests/ranks.py", "examples/train_gpt.py",
              "docs/guide/quickstart.md", "profiling/big_models.py", "launch/one_node.sh"}
    assert wanted <= names


def test_issues_ask_for_what_runs_where() -> None:
    templates = list((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
    assert templates and all("autopar env" in path.read_text() for path in templates)


@pytest.mark.slow
def test_the_wheel_plans_and_reports_in_a_clean_environment(built: Path, tmp_path: Path) -> None:
    """torch and the like are borrowed from here: the package itself comes from the wheel."""
    own = tmp_path / "env"
    venv.create(own, with_pip=True)
    python = str(own / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet",
                    str(next(built.glob("*.whl")))], check=True, timeout=300)
    packages = next((own / "lib").glob("python*/site-packages"))
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"])
    (tmp_path / "own.py").write_text(MODEL)
    clean = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    for command in (["plan", "own.py:made", "--cluster", "8xH100", "--out", "plan.json"],
                    ["report", "plan.json", "own.py:made", "--cluster", "8xH100", "--out",
                     "report.html"]):
        subprocess.run([str(own / "bin" / "autopar"), *command], cwd=tmp_path, env=clean,
                       check=True, timeout=300)
    assert "prefers-color-scheme" in (tmp_path / "report.html").read_text()
    where = subprocess.run([python, "-c", "import autopar_torch as a; print(a.__file__)"],
                           cwd=tmp_path, env=clean, check=True, capture_output=True, text=True)
    assert where.stdout.startswith(str(own))


@pytest.mark.slow
def test_a_script_that_uses_the_public_names_passes_strict_mypy(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(USER_SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "script.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=600)
    assert done.returncode == 0, done.stdout
