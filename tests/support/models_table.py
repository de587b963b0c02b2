"""Writes the table of families in docs/models.md, from tests that ran.

`python tests/support/models_table.py` runs the tests that the table names, at every level of this
machine, and writes what passed. The table's own test fails when it lacks a family or a test.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from gguf import MODEL_ARCH_NAMES
from model_kit.family_gguf import ARCHITECTURES
from told_by_tests import passed, put

from diptych_frontend.model_files.families import FAMILIES, GGUF_ARCHITECTURES
from diptych_kernels.cpu_level import CpuLevel

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
TESTS: Final = "tests/engine/models/"
GGUF: Final = "GGUF, as"
HANDED_OVER: Final = (
    "test_files_handed_over.py::test_a_q4_k_m_file_goes_through_two_engines_with_the_tokens_of_one"
)
COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "folder": (
        "test_model_families.py::test_logits_equal_transformers",
        "test_models_that_see.py::test_features_and_logits_equal_transformers",
    ),
    GGUF: (
        "test_gguf_families.py::test_logits_equal_transformers",
        "test_mixture.py::test_experts_of_a_gguf_file",
        HANDED_OVER,
    ),
    "Q4_K_M, two engines": (HANDED_OVER,),
    "quantised folder": (
        "test_quantised_tensors.py::test_values_are_those_of_the_published_arithmetic",
        "test_quantised_tensors.py::test_matrices_that_a_family_stores_as_one_are_separate_here",
        "test_quantised_tensors.py::test_each_family_is_read_as_it_is_quantised",
        "test_gguf_families.py::test_experts_in_mxfp4",
    ),
}
"""What is told of a family, and the tests that tell it."""
ONLY: Final = {
    "test_experts_of_a_gguf_file": "qwen3_moe",
    "test_values_are_those_of_the_published_arithmetic": "llama",
    "test_matrices_that_a_family_stores_as_one_are_separate_here": "phi3",
    "test_experts_in_mxfp4": "gpt_oss",
}
"""Tests of one family, which their parameters do not name."""
Cells = dict[tuple[str, str], set[str]]
"""(family, column) -> the levels at which tests passed, which may be none by name."""


def cells(node_ids: Iterable[str]) -> Cells:
    """What tests tell, by their names."""
    found: Cells = defaultdict(set)
    for node_id in node_ids:
        test, _, parameters = node_id.rstrip("]").partition("[")
        words = [ONLY.get(test.rpartition("::")[2], ""), *parameters.split("-")]
        family = next((word for word in words if word in FAMILIES), None)
        for column, tests in COLUMNS.items():
            if family is not None and test.removeprefix(TESTS) in tests:
                found[family, column] |= {level.word for level in CpuLevel} & set(words)
    return found


def table(told: Cells) -> str:
    heads = [
        f"[{column}](../{TESTS}{test.partition('::')[0]})" for column, (test, *_) in COLUMNS.items()
    ]
    rows = [f"| family | `model_type` | {' | '.join(heads)} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for family in FAMILIES:
        marks = [_mark(family, column, told.get((family, column))) for column in COLUMNS]
        rows.append(f"| {' | '.join([_name(family), f'`{family}`', *marks])} |")
    return "\n".join(rows) + "\n"


def _name(family: str) -> str:
    """As the row of the family begins."""
    return re.split(r"[:;,]|\.\s", FAMILIES[family].about)[0]


def _architecture(family: str) -> str:
    shared = ARCHITECTURES.get(family)
    if shared is not None:
        return MODEL_ARCH_NAMES[shared]
    return {name: architecture for architecture, name in GGUF_ARCHITECTURES.items()}[family]


def _mark(family: str, column: str, levels: set[str] | None) -> str:
    if levels is None:
        return ""
    if column == GGUF:
        return f"`{_architecture(family)}`"
    return ", ".join(level.word for level in CpuLevel if level.word in levels) or "yes"


def written() -> set[tuple[str, str]]:
    """Families and columns that the page has a mark for."""
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {
        (family, column)
        for family, rest in rows
        if family in FAMILIES
        for column, mark in zip(COLUMNS, rest.split("|"), strict=True)
        if mark.strip()
    }


def main() -> None:
    told = passed(TESTS + test for tests in COLUMNS.values() for test in tests)
    put(PAGE, BEGIN, END, table(cells(told)))


if __name__ == "__main__":
    main()
