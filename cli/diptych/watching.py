"""How commands show tables and values, once or until Ctrl-C."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Container
from typing import Any, Final, Literal, NoReturn

import click
import msgspec
from rich.console import Console, RenderableType
from rich.table import Table

PIPE_COLUMNS: Final = 240
"""Width of tables that do not go to a terminal."""
WATCH_INTERVAL_S: Final = 2.0
_CONTROL: Final = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)"
)
"""All but tabs and ends of lines, and what turns the direction of text around."""


def harmless(text: str) -> str:
    """Return a text of others with its control characters spelled out: a terminal obeys them. It
    would change its title, hide lines, or fill the clipboard."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def console_for_tables() -> Console:
    """Return a console as wide as the terminal; without one, wide enough to keep each row of a
    table on one line."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def bare_table(*columns: str, right: Container[str] = (), wrap: Container[str] = ()) -> Table:
    """Return a table without lines, in which only the columns of `wrap` take several lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        side: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, no_wrap=name not in wrap, justify=side)
    return table


def show(
    picture: Callable[[], RenderableType], watch: bool, pause_s: float = WATCH_INTERVAL_S
) -> None:
    """Print a table once, or again and again: in its place on a terminal."""
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
