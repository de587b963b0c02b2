"""A row's own test fails when the row does not hold: one fault a row is planted in a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import each
from contract_page import ROOT, proofs_by_row
from fork_server import ForkServer

FAULTS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("planted_faults.toml").read_text()
)
ROWS = {
    tests: [row for row, fault in FAULTS.items() if fault["tests"] == tests]
    for tests in sorted(fault["tests"] for fault in FAULTS.values())
}
"""The rows whose tests are in a file. They are tried together, so that services start once."""
PACKAGES = ("protocol", "frontend", "router", "engine", "kv_transfer", "kernels")
IMPORTED = ("torch", "pytest", "pytest_asyncio", "hypothesis", "openai")
"""What is dear to import and has no fault planted."""
FAILED = 1
"""What pytest returns when tests have run, and some of them failed."""


def test_every_row_has_a_fault() -> None:
    assert FAULTS.keys() == proofs_by_row().keys()


@each("row", FAULTS)
def test_a_fault_fits_the_code_and_its_row(row: str) -> None:
    fault = FAULTS[row]
    assert (ROOT / fault["file"]).read_text().count(fault["old"]) == 1
    assert fault["new"] != fault["old"]
    assert fault["tests"] in proofs_by_row()[row]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("planted")
    # What was compiled is good for the copy, too, but not what pytest has rewritten, nor what
    # another worker is writing.
    ignored = shutil.ignore_patterns("*-pytest-*.pyc", "*.pyc.*")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    server = ForkServer(programs=["pytest"], imported=IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "_fork_exec", server.fork_exec)
        yield folder
    server.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tests", ROWS)
def test_rows_own_tests_catch_their_faults(copy: Path, tests: str) -> None:
    """Each fault by itself makes a test of its row fail. What has failed passes without them."""
    for row in ROWS[tests]:
        fault = FAULTS[row]
        place = copy / fault["file"]
        sound = place.read_text()
        assert sound.count(fault["old"]) == 1
        place.write_text(sound.replace(fault["old"], fault["new"]))
        try:
            done = run_proofs(copy, tests, "-x", "-k", f"contract_{row}")
        finally:
            place.write_text(sound)
        assert done.returncode == FAILED, f"{row}: {done.stdout}"
    done = run_proofs(copy, tests, "--last-failed", "--last-failed-no-failures", "none")
    assert done.returncode == 0, done.stdout


def run_proofs(copy: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run some of a file's tests in the copy."""
    path = os.pathsep.join(str(copy / package) for package in PACKAGES)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-W", "ignore:Module already imported",
         *options, tests],
        cwd=copy, timeout=600, stdout=subprocess.PIPE, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
