"""Defaults of the commands, and the files that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEFAULT_PORT: Final = 8080
"""The port of the OpenAI API."""
MODEL_CACHE: Final = Path("~/.cache/diptych/models")
"""Where fetched models are stored."""


def own_file(name: str) -> Path:
    """Return where a file of docs/, examples/ or charts/diptych/ is. In a clone the folders are
    links, and a wheel has what these lead to."""
    return (Path(__file__).parent / "files" / name).resolve()
