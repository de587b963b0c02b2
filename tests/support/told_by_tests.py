"""What tables of docs/ that tests write have in common. On the import path of the tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest


class _Passed:
    """A plugin that keeps the names of tests that passed."""

    def __init__(self) -> None:
        self.node_ids: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.node_ids.append(report.nodeid)


def passed(tests: Iterable[str]) -> list[str]:
    """Run tests, and return the names of those that passed; some may be skipped. One that fails
    ends the program."""
    plugin = _Passed()
    if pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *tests], [plugin]):
        raise SystemExit("tests failed: the page stays as it is")
    return plugin.node_ids


def put(page: Path, begin: str, end: str, table: str) -> None:
    """Write a table between two lines of a page."""
    before, _, rest = page.read_text().partition(begin)
    page.write_text(f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}")
