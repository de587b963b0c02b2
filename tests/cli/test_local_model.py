"""A model that is not on this machine, and a network that does not bring it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waits import PATIENCE_S


def up(what: str, home: Path, hub: str = "http://127.0.0.1:1") -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "diptych.main", "up", what],
        env=os.environ | {"HOME": str(home), "HF_ENDPOINT": hub},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_without_network_a_name_is_told_in_one_line_with_what_is_here(tmp_path: Path) -> None:
    code, said = up("qwen3:0.6b", tmp_path)
    (line,) = said
    assert code == 1
    assert line.startswith("Error: qwen3:0.6b: it is not on this machine, and http://127.0.0.1:1 ")
    assert line.endswith("or serve what is here: smollm2:135m")
    assert "spec." not in line, "who types a name has no fields"


def test_an_address_of_the_hub_that_is_none_is_told_as_it_stands(tmp_path: Path) -> None:
    code, [line] = up("qwen3:0.6b", tmp_path, "mirror.example")
    assert code == 1
    assert "'mirror.example'; HF_ENDPOINT" in line
    assert line.endswith("must begin with https:// or http://")


@pytest.mark.parametrize("uri", ["hf://org/repo", "https://127.0.0.1:1/model.gguf"])
def test_without_network_a_file_is_told_with_its_field(
    uri: str,
    tmp_path: Path,
    service_file: Callable[[Any], Path],
    small_service: Callable[..., Any],
) -> None:
    file = service_file(small_service(model={"uri": uri}))
    code, said = up(str(file), tmp_path)
    (line,) = said
    assert code == 1
    assert line.startswith(f"Error: {file}: spec.model.uri: it is not on this machine, and http")
    assert ("HF_ENDPOINT" in line) == uri.startswith("hf://")


def test_without_network_a_draft_model_is_told_with_its_field(
    tmp_path: Path,
    service_file: Callable[[Any], Path],
    small_service: Callable[..., Any],
) -> None:
    guesses = {"method": "draft_model", "model": "hf://org/small"}
    file = service_file(small_service(engine={"speculativeConfig": guesses}))
    code, said = up(str(file), tmp_path)
    (line,) = said
    assert code == 1
    assert line.startswith(f"Error: {file}: spec.engine.speculativeConfig.model: it is not on this")
