"""Commands that start nothing: their output and their exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml
from click.testing import CliRunner
from free_ports import free_port
from waits import PATIENCE_S, wait_until

from diptych.main import main
from diptych_operator.api.parse import parse

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2.yaml"
EXAMPLES = sorted(EXAMPLE.parent.glob("*.yaml"))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


def test_who_waits_for_a_file_that_somebody_else_writes_is_told(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "service.yaml")
    with (said := tmp_path / "said").open("w") as errors:
        command = [sys.executable, "-m", "diptych.main", "render", str(fifo)]
        render = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        wait_until(lambda: f"reading {fifo} until " in said.read_text())
        fifo.write_text(EXAMPLE.read_text())
        told, _ = render.communicate(timeout=PATIENCE_S)
        assert "kind: Deployment" in told
        assert render.returncode == 0
    finally:
        render.kill()


@pytest.mark.parametrize("output", ["yaml", "json"])
def test_render_prints_the_objects_of_a_cluster(output: str) -> None:
    result = run("render", str(EXAMPLE), "-o", output)
    assert result.exit_code == 0
    if output == "yaml":
        objects = list(yaml.safe_load_all(result.stdout))
    else:
        objects = msgspec.json.decode(result.stdout)["items"]
    kinds = [item["kind"] for item in objects]
    assert kinds.count("Deployment") == 3
    assert kinds.count("Secret") == 1


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_render_shows_each_example_with_all_that_is_in_its_file(example: Path) -> None:
    result = run("render", str(example))
    assert result.exit_code == 0, result.output
    objects = list(yaml.safe_load_all(result.stdout))
    for written in yaml.safe_load_all(example.read_text()):
        if written["kind"] != "InferenceService":
            assert written in objects
    assert "Deployment" in {item["kind"] for item in objects}


def test_up_says_what_of_a_file_does_not_run_here(
    service_file: Callable[[Any], Path], small_service: Callable[..., Any]
) -> None:
    file = service_file(small_service(model={"uri": "file:///nowhere.gguf"}))
    file.write_text(file.read_text() + "\n---\nkind: HorizontalPodAutoscaler\n")
    result = run("up", str(file))
    assert "only the InferenceService runs here, not: HorizontalPodAutoscaler" in result.stdout
    assert "/nowhere.gguf" in result.stderr


@pytest.mark.parametrize("command", ["up", "demo", "render"])
def test_wrong_yaml_is_one_line_that_names_the_field(
    command: str,
    service_file: Callable[[Any], Path],
    small_service: Callable[..., Any],
) -> None:
    file = service_file(small_service(engine={"blocksize": 16}))
    result = run(command, str(file))
    assert result.exit_code == 2
    message = "spec.engine.blocksize: unknown field; did you mean blockSize?"
    assert result.stderr == f"Error: {file}: {message}\n"


def test_a_pod_template_that_does_not_fit_is_named(
    service_file: Callable[[Any], Path], small_service: Callable[..., Any]
) -> None:
    file = service_file(small_service(prefill={"spec": {"containers": {}}}))
    result = run("render", str(file))
    assert result.exit_code == 2
    assert "spec.prefill.podTemplate.spec.containers: must be a list" in result.stderr


def test_a_pod_template_that_cannot_run_is_one_line(
    service_file: Callable[[Any], Path], small_service: Callable[..., Any]
) -> None:
    template = {"spec": {"containers": [{"name": "engine", "command": ["python", 5]}]}}
    file = service_file(small_service(decode=template))
    result = run("up", str(file), "--port", str(free_port()))
    field = "spec.decode.podTemplate.spec.containers[engine].command[1]"
    assert result.stderr.startswith(f"Error: {file}: {field}: ")
    assert result.exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("up", "no-such-model"),
        ("up", "/no/such/file"),
        ("up", str(EXAMPLE), "--port", "0"),
        ("render", "/dev/zero"),
        ("x",),
        ("top", "--interval", "nan"),
        ("chat", "--temperature", "nan"),
        ("advise", "--ttft-ms", "nan"),
    ],
)
def test_wrong_usage_ends_with_two(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_the_version_is_that_of_the_distribution() -> None:
    assert run("--version").stdout.endswith("version 0.1.0\n")


def test_every_help_teaches_by_example() -> None:
    assert isinstance(main, click.Group)
    for name in main.commands:
        result = run(name, "--help")
        assert result.exit_code == 0
        assert f"Example:\n    diptych {name}" in result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_DIPTYCH_COMPLETE" in result.stdout


def test_the_example_is_the_one_that_the_help_names() -> None:
    assert parse(EXAMPLE.read_text()).metadata.name == "smollm2"
    assert "examples/smollm2.yaml" in run("--help").stdout
