"""The changes that CONTRIBUTING.md walks through, applied to a copy of the repository whose service
is started, and looked for there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from free_ports import free_port
from processes import running
from waits import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
PATCHES: list[str] = re.findall(r"```diff\n(.*?)```", GUIDE, re.DOTALL)
PACKAGES = ("protocol", "frontend", "router", "engine", "kv_transfer", "kernels", "operator", "cli")
COPIED = (*PACKAGES, "benchmarks", "tests", "examples", "crds", "docs")
NICENESS = 3
SPEC: dict[str, Any] = {
    "model": {"uri": "dummy://?architecture=seed_oss"},
    "engine": {"niceness": NICENESS},
    "prefill": {},
    "decode": {},
    "router": {"policy": "fullestFirst", "longestRequest": 64},
}
"""A service that needs what the patches add."""


@dataclass(frozen=True)
class Copy:
    """The repository with all of the patches."""

    path: Path

    @cached_property
    def environment(self) -> dict[str, str]:
        packages = os.pathsep.join(str(self.path / package) for package in (".", *PACKAGES))
        return {
            **os.environ, "PYTHONPATH": packages, "XDG_RUNTIME_DIR": str(self.path),
            "COLUMNS": "200", "UNUSUAL": "1",  # a fork would have what is not patched
        }  # fmt: skip

    def run(self, *command: str) -> str:
        """What a Python program prints there."""
        done = subprocess.run(
            [sys.executable, *command], cwd=self.path, env=self.environment,
            stdout=subprocess.PIPE, text=True, check=False, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def pytest(self, file: str, names: str) -> None:
        printed = self.run(
            "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", file, "-k", names
        )
        assert re.search(r"^[3-9] passed", printed, re.MULTILINE), printed


@dataclass(frozen=True)
class Service:
    """`diptych up` in the copy."""

    copy: Copy
    url: str
    pid: int

    def complete(self, num_tokens: int) -> httpx.Response:
        body = {"model": "tried", "prompt": list(range(num_tokens)), "max_tokens": 4}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)

    @cached_property
    def state(self) -> dict[str, Any]:
        (file,) = self.copy.path.glob("diptych-*/state.json")
        state: dict[str, Any] = yaml.safe_load(file.read_text())
        return state


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    path = tmp_path_factory.mktemp("copy")
    for folder in COPIED:
        # What Python has compiled is good for the copy, too, but not what pytest has rewritten.
        ignored = shutil.ignore_patterns(
            *(("__pycache__",) if folder == "tests" else ()), "results"
        )
        shutil.copytree(ROOT / folder, path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", path)
    for patch in PATCHES:
        subprocess.run(["git", "apply", "-"], cwd=path, input=patch, text=True, check=True)
    return Copy(path)


@pytest.fixture(scope="module")
def service(copy: Copy) -> Iterator[Service]:
    about = {"apiVersion": "diptych.dev/v1alpha1", "kind": "InferenceService"}
    written = {**about, "metadata": {"name": "tried"}, "spec": SPEC}
    (copy.path / "tried.yaml").write_text(yaml.safe_dump(written))
    port, output = free_port(), copy.path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "diptych.main", "up", "tried.yaml", "--port", str(port)],
            cwd=copy.path, env=copy.environment, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until(lambda: "ready in" in output.read_text() or process.poll() is not None)
        assert process.poll() is None, output.read_text()
        yield Service(copy, f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def files_of(patch: str) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)", patch, re.MULTILINE)


def test_each_change_touches_as_few_files_as_the_guide_says() -> None:
    own = ("tests/", "examples/", "docs/")
    touched = [[f for f in files_of(patch) if not f.startswith(own)] for patch in PATCHES]
    family, policy, engine_setting, router_setting, control_call, metric = map(len, touched)
    assert (family, policy) == (1, 1)
    # Where it is declared, and where it is obeyed, carried out or counted.
    assert (engine_setting, router_setting, control_call, metric) == (2, 2, 2, 2)


def test_a_family_is_served(service: Service) -> None:
    answer = service.complete(8)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_a_family_is_compared_with_its_class(copy: Copy) -> None:
    copy.pytest("tests/engine/models/test_model_families.py", "seed_oss or compared")


def test_a_policy_chooses_engines(service: Service) -> None:
    answer = service.complete(8)
    why = service.copy.run("-m", "diptych.main", "why", answer.headers["x-request-id"])
    assert "fullest_first" in why
    assert "fullest with room" in why


def test_a_setting_of_the_engine_is_obeyed(service: Service) -> None:
    processes = psutil.Process(service.pid).children(recursive=True)
    own = {each.nice() for each in running(processes, "diptych_engine")}
    assert os.nice(0) + NICENESS in own, own


def test_a_setting_of_the_router_is_obeyed(service: Service) -> None:
    refused = service.complete(64)
    assert refused.status_code == 400
    assert "64" in refused.json()["error"]["message"]


def test_a_control_call_is_a_route(service: Service) -> None:
    token = Path(service.state["admin_token_file"]).read_text().strip()
    engine = next(pod for pod in service.state["pods"] if pod["role"] == "decode")
    answer = httpx.post(
        f"http://127.0.0.1:{engine['ports']['admin']}/admin/collect_garbage",
        headers={"Authorization": f"Bearer {token}"},
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["is_paused"] is False


def test_a_control_call_has_every_face(copy: Copy) -> None:
    copy.pytest("tests/contract/control/test_every_control_call.py", "collect_garbage")


def test_a_metric_is_shown(service: Service) -> None:
    service.complete(8)

    def received() -> bool:
        text = httpx.get(f"{service.url}/metrics", timeout=PATIENCE_S).text
        name = "diptych:kv_transfer_messages_received_total"
        return any(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    wait_until(received)


def test_settings_are_in_the_definition_the_reference_and_the_arguments(copy: Copy) -> None:
    copy.run("-m", "diptych_operator.api.crd")
    copy.run("docs/reference_pages.py")
    crd = (copy.path / "crds" / "diptych.dev_inferenceservices.yaml").read_text()
    reference = (copy.path / "docs" / "reference.md").read_text()
    for name in ("niceness", "longestRequest"):
        assert f"{name}:" in crd
        assert f"`{name}`" in reference
    use = """
from argparse import ArgumentParser
from diptych_frontend.core_client.engine_args import EngineArgs
from diptych_operator.api.parse import parse
from diptych_operator.render.config import engine_config
from diptych_protocol import InvalidRequestError

text = open("examples/full.yaml").read().replace("niceness: 0", "niceness: 9")
service = parse(text)
print(engine_config(service, service.spec.prefill, "r", "m").niceness)
parser = EngineArgs.add_cli_args(ArgumentParser())
args = EngineArgs.from_cli_args(parser.parse_args(["--model", "m", "--niceness", "20"]))
try:
    args.create_engine_config()
except InvalidRequestError as error:
    print(error)
"""
    assert copy.run("-c", use) == "9\nniceness must be between 0 and 19, not 20\n"
