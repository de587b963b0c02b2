"""What commands take when nothing else is said."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEFAULT_PORT: Final = 8080
"""Of the OpenAI API."""
MODEL_CACHE: Final = Path("~/.cache/diptych/models")
"""Where fetched models are kept."""
