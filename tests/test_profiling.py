"""`python profiling NAME` opens every script, and the docs name none that is not there."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOOR = ROOT / "profiling"
SCRIPTS = runpy.run_path(str(DOOR / "__main__.py"))["SCRIPTS"]
DOCS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *DOOR.rglob("*.md"),
        *DOOR.rglob("*.py")]
# One process asks them all: torch is imported once.
HELP = """
import runpy, sys
door, *names = sys.argv[1:]
for name in names:
    sys.argv = [door, name, "--help"]
    try:
        runpy.run_path(door, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, name
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


def test_the_door_lists_every_script_with_its_question() -> None:
    shown = run(str(DOOR)).stdout.splitlines()
    questions = dict(re.findall(r"^  (\w+) +(\S.*\?)$", "\n".join(shown), re.MULTILINE))
    assert questions.keys() == SCRIPTS.keys()
    assert max(map(len, shown)) <= 100


@pytest.mark.slow
def test_every_script_tells_its_options() -> None:
    done = run("-c", HELP, str(DOOR), *SCRIPTS)
    assert done.returncode == 0, done.stderr
    assert [f"usage: profiling {name} " in done.stdout for name in SCRIPTS] == [True] * len(SCRIPTS)


def test_an_unknown_name_is_refused_with_the_list() -> None:
    done = run(str(DOOR), "nothing")
    assert done.returncode == 2
    assert "'nothing'" in done.stderr and "accuracy" in done.stderr


def test_the_docs_name_what_is_there() -> None:
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"python profiling ([a-z]\w*)", text)) <= SCRIPTS.keys(), path
        for script in re.findall(r"\bprofiling/[\w/]+\.py\b", text):
            assert (ROOT / script).is_file(), f"{path}: {script}"
