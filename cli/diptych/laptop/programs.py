"""Finds the vLLM that the user has installed, and what it lacks of ours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from diptych.errors import BadInputError
from diptych.known_models import Source
from diptych_frontend.installation import this_installation
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


IMPORTED: Final = (
    "diptych_protocol",
    "diptych_frontend",
    "diptych_kernels",
    "diptych_kv_transfer",
    "diptych_vllm",
)
"""Packages of ours that vLLM imports and its environment does not have. Our other packages must not
be importable there, because vLLM has other versions of numpy, ZMQ and torch."""
UCX: Final = "libucx"
"""What only our connector needs besides."""


def connector_packages(source: Source, service: InferenceService) -> Mapping[str, Path]:
    """Return the packages for a folder in vLLM's `PYTHONPATH`: name -> path.

    Empty for a service that needs none. Raises `BadInputError`, saying what to install.
    """
    if service.spec.engine.runtime != "vllm":
        return {}
    needs_ucx = service.connector == "diptych"
    folders: dict[str, Path] = {}
    for name in (*IMPORTED, UCX) if needs_ucx else IMPORTED:
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise BadInputError(
                f"{source}: spec.engine.runtime: vllm needs the package {name}, which is not "
                f"installed here: {this_installation().add_extras('vllm')}"
            )
        folders[name] = Path(spec.submodule_search_locations[0])
    if not needs_ucx:
        return folders
    # Libraries that a wheel brings lie beside its package, where its own look for them.
    beside = folders[UCX].parent.glob("libucx*.libs")
    return folders | {folder.name: folder for folder in beside}
