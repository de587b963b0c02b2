"""Finds programs of other projects that pods run. Images contain them; here the user
installs them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from diptych.errors import BadInputError
from diptych.known_models import Source
from diptych_operator.api.service import InferenceService

VLLM_VARIABLE: Final = "DIPTYCH_VLLM"
"""In the user's environment: the path of the virtual environment that has vLLM."""
_INSTALL: Final = (
    "Install it into a virtual environment of its own, such as ~/vllm, and set "
    f"{VLLM_VARIABLE}=~/vllm"
)


def other_programs(source: Source, service: InferenceService) -> Mapping[str, str]:
    """Return the path of each such program that the engines of a service need, by name.

    Raises `BadInputError`, saying what to install, if it is not on this machine.
    """
    if service.spec.engine.runtime != "vllm":
        return {}
    try:
        found = vllm_program()
    except BadInputError as exc:
        raise BadInputError(f"{source}: spec.engine.runtime: {exc}") from exc
    if found is None:
        raise BadInputError(
            f"{source}: spec.engine.runtime: vLLM is not installed here: no vllm is on the PATH. "
            f"{_INSTALL}"
        )
    return {"vllm": found}


def vllm_program() -> str | None:
    """Return the program `vllm` that services here run; None if it is not installed.

    Raises `BadInputError` if `$DIPTYCH_VLLM` names a folder without it.
    """
    named = os.environ.get(VLLM_VARIABLE, "")
    if not named:
        return shutil.which("vllm")
    folder = str(Path(named).expanduser().absolute() / "bin")
    found = shutil.which("vllm", path=folder)
    if found is None:
        raise BadInputError(
            f"vLLM is not installed here: there is no program vllm in {folder}. {_INSTALL}"
        )
    return found
