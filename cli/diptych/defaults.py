"""Defaults of the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEFAULT_PORT: Final = 8080
"""The port of the OpenAI API."""
MODEL_CACHE: Final = Path("~/.cache/diptych/models")
"""Where fetched models are stored."""
TOP_INTERVAL_S: Final = 4.0
"""Metrics are up to two seconds old. Over a shorter interval, tokens per second would jump."""
