"""Writes docs/contract.md: the rows of the engine's contract, where they stand, and their tests.

Run `python tests/support/contract_page.py` after changing `rows.toml` or naming a test for a row. A
test named `test_contract_C08_…` proves row C8, and `test_contract_C13_C14_…` two rows. The page's
own test fails when a row has no such test, when a place that `rows.toml` names is gone, or when the
page is old.
"""

from __future__ import annotations

import functools
import importlib
import re
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "tests" / "contract" / "rows.toml"
PAGE = ROOT / "docs" / "contract.md"
PROOF = re.compile(r"^ *(?:async )?def test_contract_((?:[A-Z]\d\d_)+)\w", re.MULTILINE)
"""The definition of a test, with the rows that it is named for."""

HEAD = """# The engine's contract, row by row

What users of vLLM's engine rely on, and where it stands here. Rows C are members of `EngineClient`,
M the messages of the wire, A `AsyncLLM`, L `LLMEngine`, Q the failure semantics of
`MQLLMEngineClient`, B what holds across them all. Every row has tests named for it; run those of
one with `pytest -k contract_C08`.

`python tests/support/contract_page.py` writes this page from `tests/contract/rows.toml` and the
names of the tests, and a test keeps it true.
"""


@dataclass(frozen=True)
class Row:
    name: str
    says: str
    missing: str
    """What the row asks for and is not there. Empty: the row is met."""
    where: tuple[str, ...]
    """Places as `module:Qualified.name`."""
    tests: tuple[str, ...]
    """Files that hold its tests, from the root."""


def read_rows() -> list[Row]:
    """All rows, in the order of the file."""
    tests = proofs_by_row()
    table: dict[str, dict[str, Any]] = tomllib.loads(ROWS.read_text())
    return [
        Row(
            name,
            row["says"],
            row.get("missing", ""),
            tuple(row["where"]),
            tuple(sorted(tests.get(name, ()))),
        )
        for name, row in table.items()
    ]


@functools.cache
def proofs_by_row() -> dict[str, set[str]]:
    """Row -> files with a test named for it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for rows in PROOF.findall(path.read_text()):
            for row in rows.rstrip("_").split("_"):
                found[row].add(str(path.relative_to(ROOT)))
    return dict(found)


def resolve(place: str) -> Any:
    """The object at `module:Qualified.name`. Raises `ImportError` or `AttributeError`."""
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in filter(None, name.split(".")):
        fields = getattr(found, "__struct_fields__", ()) or getattr(found, "__annotations__", ())
        found = None if part in fields else getattr(found, part)
    return found


def page() -> str:
    """The text of docs/contract.md."""
    rows = read_rows()
    met = sum(not row.missing for row in rows)
    lines = [HEAD, f"{met} of {len(rows)} rows are met. The others are met in part, and say so.\n"]
    lines += ["| row | what it says | implemented in | tests |", "|---|---|---|---|"]
    for row in rows:
        says = row.says + (f"<br>**In part.** {row.missing}" if row.missing else "")
        where = "<br>".join(f"`{place}`" for place in row.where)
        tests = "<br>".join(f"[{Path(test).name}](../{test})" for test in row.tests)
        lines.append(f"| {row.name} | {says} | {where} | {tests} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
