"""The page about the hand-off names a test for each failure; they have to be there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADING = "## The failures others have, and the test that excludes each"
_, _, SECTION = (ROOT / "docs/handoff.md").read_text().partition(f"{HEADING}\n")
ROWS = re.findall(r"^\| (\d+) \| (.*) \|$", SECTION.partition("\n## ")[0], re.M)


def test_every_failure_has_a_row_and_every_row_a_test() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 35))
    assert all("::test_" in row for _, row in ROWS)


def test_every_test_that_the_rows_name_exists() -> None:
    for number, row in ROWS:
        for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row):
            text = (ROOT / file).read_text()
            assert re.search(rf"^(async )?def {name}\(", text, re.M), f"{number}: {file}::{name}"
