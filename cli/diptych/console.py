"""The console that tables are printed to."""

from __future__ import annotations

from typing import Final

from rich.console import Console

PIPE_COLUMNS: Final = 240
"""Width of tables that do not go to a terminal."""


def console_for_tables() -> Console:
    """On a terminal as wide as it; else wide enough that tables keep one line for each row."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)
