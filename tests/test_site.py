"""The docs as a site: it builds without a warning, and fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autopar_torch as ap
from autopar_torch.cli import build_parser, subparsers
from ranks import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1",
                               "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_in_the_site_and_no_link_leads_nowhere(site: Path) -> None:
    """Strict building holds the links; here: what docs/ has is there."""
    for page in (ROOT / "docs").rglob("*.md"):
        own = page.relative_to(ROOT / "docs").with_suffix("")
        assert (site / own / "index.html").is_file(), own


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'(?:src|<link[^>]+href)="https?://[^"]+"', text), page


@pytest.mark.slow
def test_every_public_name_and_every_command_has_an_entry(site: Path) -> None:
    shown = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert all(f">ap.{name}<" in shown for name in ap.__all__)
    lines = (site / "command_line" / "index.html").read_text(encoding="utf-8")
    assert all(f"usage: autopar {name} " in lines for name in subparsers(build_parser()))
