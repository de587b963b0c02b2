"""The console that tables are printed to."""

from __future__ import annotations

from typing import Final

from rich.console import Console

PIPE_COLUMNS: Final = 240
"""Width of tables that do not go to a terminal."""


def console_for_tables() -> Console:
    """Return a console as wide as the terminal; without one, wide enough to keep each row of a
    table on one line."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)
