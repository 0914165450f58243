"""Commands that the docs show are understood, and those of the README run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autopar_torch.cli import build_parser
from ranks import ROOT

PAGES = [ROOT / "README.md", ROOT / "launch" / "README.md", *(ROOT / "docs").rglob("*.md")]
CONTINUED, COMMENT = re.compile(r"\\\n\s*"), re.compile(r"\s+#.*")


def commands(page: Path) -> list[str]:
    """Lines of bash, and what tables of commands show; others name parts of commands."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S))
    lines = [COMMENT.sub("", line) for line in CONTINUED.sub("", blocks).splitlines()]
    whole = page.name in ("README.md", "commands.md")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|") and whole)
    inline = re.findall(r"`((?:autopar|torchrun|python|pip) [^`]+)`", rows)
    return [line.strip() for line in [*lines, *inline] if line.strip()]


def understood(command: str) -> bool:
    """By the command line itself, which ends the program if not."""
    words = shlex.split(command.split(" -m autopar_torch ")[-1].removeprefix("autopar "))
    _, unknown = build_parser().parse_known_args(words)
    return not unknown or words[0] == "run"  # torchrun's options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_autopar_command_of_a_page_is_understood(page: Path) -> None:
    for command in commands(page):
        if re.match(r"autopar [a-z]|torchrun .* -m autopar_torch ", command):
            assert understood(command), command


def test_every_script_that_a_page_starts_is_there() -> None:
    for page in PAGES:
        for script in re.findall(r"\b(?:examples|launch|profiling)/[\w/]+\.(?:py|sh|yaml|sbatch)\b",
                                 "\n".join(commands(page))):
            assert (ROOT / script).is_file(), f"{page}: {script}"


def shown() -> list[str]:
    """What the README has a newcomer run, in its order. What installs is tried by .ci/run."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+ \| (.*`.*) \|$", text.partition("| to | run |")[2], re.M)
    found = [command for row in rows for command in re.findall(r"`([^`]+)`", row)]
    end = next(k for k, command in enumerate(found) if "hf_trainer" in command)
    return [command for command in found[: end + 1] if not command.startswith("pip")]


def test_the_readme_shows_ten_tasks_of_at_most_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("| to | run |")[2]
    rows = re.findall(r"^\| \w.+ \| .*$", text.partition("\n\n")[0], re.M)
    assert len(rows) == 10 and all(row.count("`") // 2 <= 2 for row in rows)


def test_the_readme_states_what_installs_and_trains_and_what_passes_the_tests() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```bash\n(.*?)\n```", text, re.S)
    assert first.startswith("python3 -m venv") and first.endswith(shown()[0])
    assert second == "python -m pytest" and second in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_what_the_readme_shows_a_newcomer_runs(tmp_path: Path) -> None:
    for folder in ("examples", "profiling"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    given = {**os.environ, "PYTHONPATH": str(ROOT), "AUTOPAR_CACHE": str(tmp_path / "cache"),
             "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in shown():
        words = shlex.split(command)
        if words[0] == "autopar":
            words = [sys.executable, "-m", "autopar_torch", *words[1:]]
        done = subprocess.run(words, cwd=tmp_path, env=given, capture_output=True, text=True,
                              timeout=600)
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
    for name in ("report.html", "page.html"):
        assert "<svg" in (tmp_path / name).read_text(encoding="utf-8")
