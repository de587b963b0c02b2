"""The notebooks of `examples/` run from top to bottom, and print what their texts promise.

Each runs in a process of its own, as in Jupyter. What a model says differs a little between
processors, so only what has to be so is looked for.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
PRINTED = {
    "offline": r"'The capital of France is' +-> ' Paris",
    "structured_output": r"\{'name': 'Maria', 'age': 31, 'likes': \[",
    "lora": r"\[1, 2\]\s*$",
    "embeddings_search": r"cheetah[\s\S]*Paris[\s\S]*boils[\s\S]*diptych",
    "rag": r"answer: .*\b17\b",
}
CELL_S = 300
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_each_notebook_is_tried() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_a_notebook_runs_and_keeps_what_it_shows(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    as_shown = printed(notebook)
    NotebookClient(
        notebook, timeout=CELL_S, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    for text in (as_shown, printed(notebook)):
        assert re.search(PRINTED[name], text), text


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    assert all(one.output_type == "stream" and one.name == "stdout" for one in outputs)
    return "".join(one.text for one in outputs)
