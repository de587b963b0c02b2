"""The changes that CONTRIBUTING.md walks through, applied to a copy of the repository and tried."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from free_ports import free_port
from waits import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
PATCHES: list[str] = re.findall(r"```diff\n(.*?)```", GUIDE, re.DOTALL)
PACKAGES = ("protocol", "frontend", "router", "engine", "kv_transfer", "kernels", "operator", "cli")
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
    assert len(PATCHES) == 4


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


def test_a_policy_and_a_setting_of_the_router_reach_a_running_service(copy: Path) -> None:
    """A policy is one file, and a setting is one field with the line that obeys it."""
    for path in ("policies/", "router_settings.py"):
        attempt(copy, patch_of(path), ["-m", "compileall", "-q", "router"])
    asked = {"policy": "fullestFirst", "longestRequest": 64}
    with running(copy, asked) as service:
        answer = service.complete(range(8))
        assert answer.status_code == 200
        why = service.diptych("why", answer.headers["x-request-id"])
        assert "fullest_first" in why
        assert "fullest with room" in why
        refused = service.complete(range(64))
        assert refused.status_code == 400
        assert "64" in refused.text


@dataclass(frozen=True)
class Running:
    """A service of a patched copy of the repository."""

    url: str
    directory: Path
    environment: dict[str, str]

    def complete(self, prompt: Sequence[int]) -> httpx.Response:
        body = {"model": "tried", "prompt": list(prompt), "max_tokens": 4}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)

    def diptych(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "diptych.main", *arguments]
        return subprocess.run(
            command, cwd=self.directory, env=self.environment, stdout=subprocess.PIPE, text=True,
            check=True, timeout=PATIENCE_S,
        ).stdout  # fmt: skip


@contextmanager
def running(copy: Path, router: dict[str, Any]) -> Iterator[Running]:
    """`diptych up` in the copy, once it is ready."""
    model = {"uri": "dummy://?num_hidden_layers=2&hidden_size=64"}
    spec = {"model": model, "prefill": {}, "decode": {}, "router": router}
    about = {"apiVersion": "diptych.dev/v1alpha1", "kind": "InferenceService"}
    (copy / "tried.yaml").write_text(
        yaml.safe_dump({**about, "metadata": {"name": "tried"}, "spec": spec})
    )
    path = os.pathsep.join(str(copy / package) for package in (".", *PACKAGES))
    environment = {**os.environ, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(copy), "COLUMNS": "200"}
    port, output = free_port(), copy / "output"
    with output.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "diptych.main", "up", "tried.yaml", "--port", str(port)],
            cwd=copy, env=environment, stdout=written, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until(lambda: "ready in" in output.read_text() or process.poll() is not None)
        assert process.poll() is None, output.read_text()
        yield Running(f"http://127.0.0.1:{port}", copy, environment)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


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
