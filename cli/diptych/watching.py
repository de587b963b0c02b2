"""Shows tables once or repeatedly until Ctrl-C, and measures loads over an interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NoReturn

from rich.console import Console, RenderableType

if TYPE_CHECKING:
    from diptych.engine_load import Load, Sample


PIPE_COLUMNS: Final = 240
"""Width of tables that do not go to a terminal."""
WATCH_INTERVAL_S: Final = 2.0


def console_for_tables() -> Console:
    """Return a console as wide as the terminal; without one, wide enough to keep each row of a
    table on one line."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def loads_over(
    interval_s: float, read: Callable[[], Mapping[str, Sample]]
) -> Callable[[], list[Load]]:
    """Take samples now. Each call of the result waits for the interval and returns the loads since
    the last samples."""
    from diptych.engine_load import loads

    before, seen_at = read(), time.monotonic()

    def look() -> list[Load]:
        nonlocal before, seen_at
        time.sleep(interval_s)
        now, at = read(), time.monotonic()
        found = loads(before, now, at - seen_at)
        before, seen_at = now, at
        return found

    return look


def show(
    picture: Callable[[], RenderableType], watch: bool, pause_s: float = WATCH_INTERVAL_S
) -> None:
    """Print a table once, or update it repeatedly on a terminal; elsewhere print it again each
    time."""
    console = console_for_tables()
    if not watch:
        console.print(picture())
        return
    try:
        if console.is_terminal:
            _keep_up(picture, console, pause_s)
        while True:
            console.print(picture())
            time.sleep(pause_s)
    except KeyboardInterrupt:
        return


def _keep_up(picture: Callable[[], RenderableType], console: Console, pause_s: float) -> NoReturn:
    from rich.live import Live

    with Live(picture(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(pause_s)
            live.update(picture(), refresh=True)
