"""A row's own test fails when the row does not hold: one fault a row is planted in a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from contract_page import ROOT, proofs_by_row

FAULTS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("planted_faults.toml").read_text()
)
PACKAGES = ("protocol", "frontend", "router", "engine", "kv_transfer", "kernels")
FAILED = 1
"""What pytest returns when tests have run, and some of them failed."""


def test_every_row_has_a_fault() -> None:
    assert FAULTS.keys() == proofs_by_row().keys()


@pytest.mark.parametrize("row", FAULTS)
def test_a_fault_fits_the_code_and_its_row(row: str) -> None:
    fault = FAULTS[row]
    assert (ROOT / fault["file"]).read_text().count(fault["old"]) == 1
    assert fault["new"] != fault["old"]
    assert fault["tests"] in proofs_by_row()[row]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    # What was compiled is good for the copy, too, but not what pytest has rewritten, nor what
    # another worker is writing.
    ignored = shutil.ignore_patterns("*-pytest-*.pyc", "*.pyc.*")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_without_a_fault_the_same_tests_pass(copy: Path) -> None:
    done = run_proofs(copy, FAULTS, timeout_s=1800)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("row", FAULTS)
def test_a_row_s_own_test_catches_its_fault(copy: Path, row: str) -> None:
    fault = FAULTS[row]
    place = copy / fault["file"]
    sound = place.read_text()
    assert sound.count(fault["old"]) == 1
    place.write_text(sound.replace(fault["old"], fault["new"]))
    try:
        done = run_proofs(copy, [row], timeout_s=300)
    finally:
        place.write_text(sound)
    assert done.returncode == FAILED, done.stdout


def run_proofs(
    copy: Path, rows: Iterable[str], *, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run the tests of these rows in the copy, until one fails."""
    files = {FAULTS[row]["tests"] for row in rows}
    names = " or ".join(f"contract_{row}" for row in rows)
    path = os.pathsep.join(str(copy / package) for package in PACKAGES)
    command = ("-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-k", names)
    return subprocess.run(
        [sys.executable, *command, *sorted(files)], cwd=copy, timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
