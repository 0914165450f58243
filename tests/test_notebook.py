"""The notebook under examples/ runs from its first cell to its last, and draws what it says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from ranks import ROOT

NOTEBOOK = ROOT / "examples" / "explore_plan.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(name)
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(NOTEBOOK.parent)]))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    asyncio.run(NotebookClient(notebook, timeout=600).async_execute())
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    drawing = [cell for cell in code if "plt.show" in cell.source]
    assert len(drawing) == 3 and all(
        any("image/png" in out.get("data", {}) for out in cell.outputs) for cell in drawing)
    if folder := os.environ.get("KEEP_NOTEBOOK"):
        nbformat.write(notebook, Path(folder) / "executed.ipynb")
    assert not any(cell.get("outputs") for cell in nbformat.read(NOTEBOOK, as_version=4).cells)
