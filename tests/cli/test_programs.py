"""`diptych up` finds the program of another project, or says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_kit.crds import inference_service, vllm_spec

from diptych.errors import BadInputError
from diptych.laptop.programs import VLLM_VARIABLE, other_programs
from diptych_operator.api.images import Images
from diptych_operator.api.parse import parse_object

FILE = Path("service.yaml")
VLLM = parse_object(inference_service(vllm_spec()), Images())
OURS = parse_object(inference_service({}), Images())


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
