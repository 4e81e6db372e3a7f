"""The notebook runs from top to bottom, and its policy learns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples/first_run.ipynb"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own event loop
def test_the_first_run_learns_to_answer_with_one_word(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "the notebook is kept without outputs"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output
    )
    first, last = re.search(r"first and last collection: (\S+) (\S+)", printed).groups()
    assert float(first) < 0.4
    assert float(last) > 0.9
