"""docs/tutorial.ipynb runs: on random weights in this process, on the pretrained model in a kernel (slow)."""

from __future__ import annotations

import contextlib
import io
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PATH = ROOT / "docs" / "tutorial.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
    return found


def test_it_is_committed_without_outputs_and_without_paths_of_a_machine() -> None:
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert len(code) >= 8
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert not re.search(r"/(home|root|tmp|usr|var|work|Users)/", PATH.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)#]+)\)", "".join("".join(cell["source"]) for cell in cells())):
        assert (PATH.parent / link).is_file(), link


def test_its_cells_run_on_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    monkeypatch.setenv("JAXKV_TUTORIAL_MODEL", "tiny-random")
    monkeypatch.setattr(plt.Figure, "show", None, raising=False)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, cell in enumerate(cells()):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    plt.close("all")
    kl = {(name, place): value for name, place, value, _, _ in names["rows"]}
    assert all(kl["exact", place] < 1e-9 for place in names["edits"])
    assert all(kl["scr", place] > 1e-9 for place in names["edits"])
    assert names["work"]["scr"] < names["work"]["scr|first_k(32)"] < names["work"]["exact"]
    assert names["sequence"].exact
    assert re.search(r"exact: matched 4\d\d, computed \d\d;", printed.getvalue())


@pytest.mark.slow
@pytest.mark.network
def test_it_runs_in_a_kernel_on_the_pretrained_model() -> None:
    """On CPU, as a reader's would: a fresh process, every cell, every output."""
    nbclient = pytest.importorskip("nbclient", reason="no nbclient: pip install '.[test]'")
    nbformat = pytest.importorskip("nbformat", reason="no nbformat: pip install '.[test]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the messaging library, about its own event loop
        notebook = nbformat.read(PATH, as_version=4)
        nbclient.NotebookClient(
            notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
        ).execute()
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert not [out for out in outputs if out.output_type == "error"]
    assert [out for out in outputs if "image/png" in out.get("data", {})], "the plot is shown"
