"""docs/contract.md says what is: each row has tests, and each place it names exists."""

from __future__ import annotations

import re

from cases import each
from contract_page import PAGE, Row, page, proofs_by_row, read_rows, resolve

ROWS = {row.name: row for row in read_rows()}
SECTIONS = {"C": 27, "M": 10, "A": 11, "L": 13, "Q": 20, "B": 18}


def test_no_row_is_missing() -> None:
    wanted = [f"{letter}{n:02}" for letter, count in SECTIONS.items() for n in range(1, count + 1)]
    assert list(ROWS) == wanted


@each("row", ROWS.values(), ids=ROWS)
def test_a_row_has_a_test_and_the_places_it_names_exist(row: Row) -> None:
    assert row.tests, f"no test is named test_contract_{row.name}_…"
    assert row.where
    for place in row.where:
        resolve(place)


def test_no_test_is_named_for_a_row_that_is_none() -> None:
    assert proofs_by_row().keys() <= ROWS.keys()


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python tests/support/contract_page.py"


def test_the_page_s_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
