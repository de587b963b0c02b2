"""The environments of clients that Diptych is tried with, which `make clients` makes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])
ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent
RUN_S = 540.0
"""A busy machine may need minutes to import some of them."""
FOLDER = Path(os.environ.get("DIPTYCH_CLIENTS") or ROOT / ".clients").absolute()
"""Has a virtual environment for each client, under the client's name."""
_SETTINGS = {
    "PYTHONPATH": str(SCRIPTS.parent),
    "DO_NOT_TRACK": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "VLLM_NO_USAGE_STATS": "1",
}


def needs_client(name: str) -> Callable[[Test], Test]:
    """Marks a test that `make test-clients` runs, and skips it, by the client's name, where the
    client is not installed."""
    skipped = pytest.mark.skipif(
        not (FOLDER / name / "bin" / "python").exists(),
        reason=f"{name} is not installed: `make clients` installs it, or DIPTYCH_CLIENTS names the "
        "folder that has its environment",
    )
    return lambda test: pytest.mark.clients(skipped(test))


def surroundings() -> dict[str, str]:
    """The environment variables of a client, which is to ask nobody but Diptych."""
    # With this one, aiperf takes a directory for the name of a repository.
    inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return inherited | _SETTINGS


def program(name: str, command: str) -> str:
    """The path of a command in a client's environment."""
    return str(FOLDER / name / "bin" / command)
