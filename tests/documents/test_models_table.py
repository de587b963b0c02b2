"""The table of families in docs/models.md has every family, and a test behind each mark."""

from __future__ import annotations

import subprocess
import sys

from models_table import COLUMNS, ROOT, TESTS, cells, written

from diptych_frontend.model_files.families import FAMILIES


def test_every_family_has_a_row_and_each_mark_a_test() -> None:
    files = {TESTS + test.partition("::")[0] for tests in COLUMNS.values() for test in tests}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only", *sorted(files)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    told = set(cells(line for line in found.stdout.splitlines() if "::" in line))
    assert {family for family, _ in told} == FAMILIES.keys()
    assert written() == told, "run python tests/support/models_table.py"
