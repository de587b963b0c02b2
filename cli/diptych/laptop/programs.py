"""Programs of other projects that pods run: an image has them, here somebody installs them."""

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
"""In the user's environment: the virtual environment that has vLLM."""


def other_programs(source: Source, service: InferenceService) -> Mapping[str, str]:
    """Where each program is that the engines of a service need: name -> path.

    Raises `BadInputError`, saying what to install, if it is not on this machine.
    """
    if service.spec.engine.runtime != "vllm":
        return {}
    named = os.environ.get(VLLM_VARIABLE, "")
    folder = str(Path(named).expanduser().absolute() / "bin") if named else ""
    found = shutil.which("vllm", path=folder or os.environ.get("PATH", ""))
    if found is None:
        where = f"there is no program vllm in {folder}" if named else "no vllm is on the PATH"
        raise BadInputError(
            f"{source}: spec.engine.runtime: vLLM is not installed here: {where}. Install it into "
            f"a virtual environment of its own, such as ~/vllm, and set {VLLM_VARIABLE}=~/vllm"
        )
    return {"vllm": found}
