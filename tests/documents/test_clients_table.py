"""The table of clients in docs/clients.md says what its tests say, and they are there."""

from __future__ import annotations

import re

from clients_table import CLIENTS, ROOT, row, table, written


def test_the_table_has_every_client_as_its_tests_tell_it() -> None:
    assert written().splitlines(keepends=True)[2:] == [row(name) for name in CLIENTS], (
        "run PYTHONPATH=tests/support python -m clients_table"
    )


def test_each_client_has_its_tests() -> None:
    for test in {test for client in CLIENTS.values() for test in client.tests}:
        path, _, name = test.partition("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_a_row_is_written_when_all_its_tests_passed_and_stays_otherwise() -> None:
    old = written().replace(CLIENTS["LangChain"].version, "`langchain-openai` 1.0")
    first, *others = CLIENTS["OpenAI's client"].tests
    assert table(old, [first]) == old != written()
    assert table(old, [f"{CLIENTS['LangChain'].tests[0]}[one]", *others]) == written()
