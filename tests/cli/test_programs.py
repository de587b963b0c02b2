"""`diptych up` finds the program of another project, or says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from cluster_kit.crds import inference_service, vllm_spec
from waits import PATIENCE_S

from diptych.errors import BadInputError
from diptych.laptop.programs import IMPORTED, UCX, VLLM_VARIABLE, connector_packages, other_programs
from diptych_operator.api.images import Images
from diptych_operator.api.parse import parse_object
from diptych_operator.api.service import InferenceService

OF_VLLM = (
    "msgspec", "numpy", "numpy.libs", "zmq", "pyzmq.libs", "prometheus_client", "starlette",
    "anyio", "idna", "sniffio", "typing_extensions.py",
)  # fmt: skip
"""What vLLM's environment has, and the connector imports."""
FILE = Path("service.yaml")
VLLM = parse_object(inference_service(vllm_spec()), Images())
OURS = parse_object(inference_service({}), Images())
POOLS = parse_object(inference_service(vllm_spec(prefill={})), Images())
BY_NIXL = parse_object(
    inference_service(vllm_spec(prefill={}, transfer={"connector": "nixl"})), Images()
)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with a program `vllm`."""
    program = tmp_path / "vllm" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path / "vllm"


def test_our_own_engine_needs_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VLLM_VARIABLE, "/nowhere")
    assert other_programs(FILE, OURS) == {}


def test_vllm_is_that_of_the_named_environment(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VLLM_VARIABLE, str(environment))
    monkeypatch.setenv("PATH", "")
    assert other_programs(FILE, VLLM) == {"vllm": str(environment / "bin" / "vllm")}


def test_a_named_environment_may_begin_with_a_tilde(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(environment.parent))
    monkeypatch.setenv(VLLM_VARIABLE, "~/vllm")
    assert other_programs(FILE, VLLM) == {"vllm": str(environment / "bin" / "vllm")}


def test_without_a_name_it_is_the_one_on_the_path(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VLLM_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(environment / "bin"))
    assert other_programs(FILE, VLLM) == {"vllm": str(environment / "bin" / "vllm")}


@pytest.mark.parametrize(
    ("named", "where"),
    [("/nowhere", "there is no program vllm in /nowhere/bin"), ("", "no vllm is on the PATH")],
)
def test_where_it_is_not_the_error_says_what_to_do(
    named: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VLLM_VARIABLE, named)
    monkeypatch.setenv("PATH", "/nowhere-else")
    with pytest.raises(BadInputError) as caught:
        other_programs(FILE, VLLM)
    assert str(caught.value) == (
        f"service.yaml: spec.engine.runtime: vLLM is not installed here: {where}. Install it into "
        "a virtual environment of its own, such as ~/vllm, and set DIPTYCH_VLLM=~/vllm"
    )


def test_our_own_engine_needs_no_packages_beside_those_that_it_is_installed_with() -> None:
    assert connector_packages(FILE, OURS) == {}


@pytest.mark.parametrize("service", [VLLM, BY_NIXL], ids=["one pool", "nixl"])
def test_only_our_connector_needs_ucx(service: InferenceService) -> None:
    assert connector_packages(FILE, service).keys() == set(IMPORTED)


def test_vllm_is_given_what_the_connector_imports_and_nothing_of_its_own(tmp_path: Path) -> None:
    """Imported by a Python that finds nothing else; neither vLLM nor its torch is there."""
    for name, folder in connector_packages(FILE, POOLS).items():
        (tmp_path / name).symlink_to(folder, target_is_directory=True)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name in OF_VLLM:
        found = Path(msgspec.__file__).parents[1] / name
        if found.exists():
            (libraries / name).symlink_to(found, target_is_directory=found.is_dir())
    package = (tmp_path / "diptych_vllm").resolve()
    of_vllm = ("from vllm", "from diptych_kernels")
    modules = [
        ".".join(("diptych_vllm", *path.relative_to(package).with_suffix("").parts))
        for path in sorted(package.rglob("*.py"))
        if path.stem != "__init__" and not any(f"\n{name}" in path.read_text() for name in of_vllm)
    ]
    beneath = ["diptych_kv_transfer.connector", "diptych_kv_transfer.transports.ucx", "libucx"]
    beneath.append("diptych_frontend.core_client.curve")
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import {', '.join([*modules, *beneath])}"],
        env={"PYTHONPATH": f"{tmp_path}:{libraries}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert {*IMPORTED, UCX} <= {path.name for path in tmp_path.iterdir()}


def test_where_a_package_is_missing_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diptych.laptop.programs.IMPORTED", ("libucx_of_nobody",))
    with pytest.raises(BadInputError, match=r"libucx_of_nobody.* -m pip install .*libucx-cu13=="):
        connector_packages(FILE, POOLS)
