"""The notebook of examples/notebook, executed from its first cell to its last."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ipykernel  # noqa: F401, the kernel that nbclient starts
import matplotlib  # noqa: F401, what they are plotted with
import nbformat
import pandas  # noqa: F401, what the notebook's tables are made of
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "train.ipynb"
DEADLINE = 600


def test_the_notebook_trains_and_shows_metrics_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source += "\nITERATIONS, PROMPTS = 2, 2"
    # Paths of modules may be relative to the directory that the tests were started in.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    NotebookClient(notebook, timeout=DEADLINE, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {cell.id: "".join(map(str, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"}
    assert "iteration" in shown["train"] or "step" in shown["train"], "the progress is printed in the notebook"
    assert "rollout/raw_reward" in shown["metrics"] and "text/html" in shown["metrics"]
    assert "image/png" in shown["plot"]
    assert "response" in shown["samples"] and "model.safetensors" in shown["files"]
