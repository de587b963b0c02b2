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
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
PATCHES: list[str] = re.findall(r"```diff\n(.*?)```", GUIDE, re.DOTALL)
PACKAGES = ("protocol", "frontend", "router", "engine", "kv_transfer", "kernels", "operator")
COPIED = (*PACKAGES, "benchmarks", "tests", "examples", "crds", "docs")


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
    if patch:
        subprocess.run(["git", "apply", "-"], cwd=copy, input=patch, text=True, check=True)
    path = os.pathsep.join(str(copy / package) for package in (".", *PACKAGES))
    done = subprocess.run(
        [sys.executable, *command], cwd=copy, env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_patch_is_tried() -> None:
    assert len(PATCHES) == 3


@pytest.mark.slow
def test_a_model_family_is_one_file_and_its_row(copy: Path) -> None:
    tests = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/engine/models/test_model_families.py",
    ]
    printed = attempt(copy, patch_of("families/"), [*tests, "-k", "seed_oss or compared"])
    assert re.search(r"^[3-9] passed", printed, re.MULTILINE), printed


def test_a_routing_policy_is_one_file(copy: Path) -> None:
    fleet = ["--prefill", "4", "--decode", "4", "--rate", "2", "--requests", "200"]
    command = ["-m", "benchmarks.simulate", "run", *fleet, "--policy"]
    printed = attempt(copy, patch_of("policies/"), [*command, "fullest_first"])
    assert "TTFT" in printed


def test_a_setting_of_the_engine_is_one_field(copy: Path) -> None:
    attempt(copy, patch_of("engine_settings.py"), ["-m", "diptych_operator.api.crd"])
    crd = (copy / "crds" / "diptych.dev_inferenceservices.yaml").read_text()
    assert "maxOutputTokens:" in crd
    assert "| `maxOutputTokens` |" in (copy / "docs" / "reference.md").read_text()
    use = """
from argparse import ArgumentParser
from diptych_frontend.core_client.engine_args import EngineArgs
from diptych_operator.api.parse import parse
from diptych_operator.render.config import engine_config
from diptych_protocol import InvalidRequestError

text = open("examples/full.yaml").read().replace("16777216", "99")
service = parse(text)
print(engine_config(service, service.spec.prefill, "r", "m").max_output_tokens)
parser = EngineArgs.add_cli_args(ArgumentParser())
args = EngineArgs.from_cli_args(parser.parse_args(["--model", "m", "--max-output-tokens", "0"]))
try:
    args.create_engine_config()
except InvalidRequestError as error:
    print(error)
"""
    printed = attempt(copy, "", ["-c", use])
    assert printed == "99\nmax_output_tokens must be between 1 and 16777216, not 0\n"
