"""The figures of the README are those of the page that it links to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())
PAGE = (ROOT / "benchmarks" / "results" / "latest.md").read_text()
SYSTEMS = ("diptych", "vllm-cpu", "llama.cpp")


def medians(case: str) -> list[float]:
    """The first figure of a case's rows, system by system."""
    rows = (re.search(rf"^\| {case} \| {system} \| ([\d.]+)", PAGE, re.M) for system in SYSTEMS)
    return [float(row[1]) for row in rows if row is not None]


@pytest.mark.parametrize(
    ("case", "sentence", "places"),
    [
        ("128/1", "streams {} tokens a second to one user (vLLM's CPU build {})", 0),
        ("128/16", "and {} to sixteen ({})", 0),
        ("first token", "comes {} s after the start of the process (vLLM's {}, llama.cpp's {})", 1),
    ],
)
def test_the_readme_says_what_was_measured(case: str, sentence: str, places: int) -> None:
    figures = [f"{figure:.{places}f}" for figure in medians(case)]
    assert sentence.format(*figures) in README
