"""A row's own test fails when the row does not hold: one fault a row is planted in a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from contract_page import ROOT, proofs_by_row

FAULTS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("planted_faults.toml").read_text()
)
PACKAGES = ("protocol", "frontend", "router", "engine", "kv_transfer", "kernels")
FAILED = 1
"""What pytest returns when tests have run, and some of them failed."""


@pytest.mark.parametrize("row", FAULTS)
def test_a_fault_fits_the_code_and_its_row(row: str) -> None:
    fault = FAULTS[row]
    assert (ROOT / fault["file"]).read_text().count(fault["old"]) == 1
    assert fault["new"] != fault["old"]
    assert fault["tests"] in proofs_by_row()[row]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("row", FAULTS)
def test_a_row_s_own_test_catches_its_fault(copy: Path, row: str) -> None:
    fault = FAULTS[row]
    place = copy / fault["file"]
    sound = place.read_text()
    assert sound.count(fault["old"]) == 1
    place.write_text(sound.replace(fault["old"], fault["new"]))
    path = os.pathsep.join(str(copy / package) for package in PACKAGES)
    command = ("-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", fault["tests"])
    try:
        done = subprocess.run(
            [sys.executable, *command, "-k", f"contract_{row}"], cwd=copy, timeout=300,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    finally:
        place.write_text(sound)
    assert done.returncode == FAILED, done.stdout
