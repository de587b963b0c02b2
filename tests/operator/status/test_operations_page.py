"""The page about operations names tests as evidence; they have to be there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operations.md").read_text()


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:tests|e2e)/[\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) >= 20
    for file, name in named:
        text = (ROOT / file).read_text()
        assert re.search(rf"^(async )?def {name}\(", text, re.M), f"{file}::{name}"


def test_each_of_the_ten_needs_has_a_test() -> None:
    rows = PAGE.partition("## Ten needs")[2].strip().splitlines()
    needs = [row for row in rows if row.startswith("| ") and "need | shown by" not in row]
    assert len(needs) == 10
    assert all("::test_" in row for row in needs)
