"""The changes that CONTRIBUTING.md walks through, applied to a copy of the repository and tried."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATCHES = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
PACKAGES = ("protocol", "frontend", "router", "engine", "kv_transfer", "kernels")
COPIED = (*PACKAGES, "benchmarks", "tests")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the changes touch, and what trying them needs."""
    for folder in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def patch_of(path: str) -> str:
    (found,) = [patch for patch in PATCHES if path in patch]
    return found


def attempt(copy: Path, patch: str, command: Sequence[str]) -> str:
    """What a command prints in the patched copy."""
    subprocess.run(["git", "apply", "-"], cwd=copy, input=patch, text=True, check=True)
    path = os.pathsep.join(str(copy / package) for package in (".", *PACKAGES))
    done = subprocess.run(
        [sys.executable, *command], cwd=copy, env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_patch_is_tried() -> None:
    assert len(PATCHES) == 2


@pytest.mark.slow
def test_a_model_family_is_one_file_and_its_row(copy: Path) -> None:
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engine/test_model_families.py"]
    printed = attempt(copy, patch_of("families/"), [*tests, "-k", "seed_oss or compared"])
    assert re.search(r"^[3-9] passed", printed, re.MULTILINE), printed


def test_a_routing_policy_is_one_file(copy: Path) -> None:
    fleet = ["--prefill", "4", "--decode", "4", "--rate", "2", "--requests", "200"]
    command = ["-m", "benchmarks.simulate", "run", *fleet, "--policy"]
    printed = attempt(copy, patch_of("policies/"), [*command, "fullest_first"])
    assert "TTFT" in printed
