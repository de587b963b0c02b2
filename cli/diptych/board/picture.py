"""The table of pods and figures, and the line of the router below it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Group
from rich.table import Table
from rich.text import Text

from diptych.board.figures import Figures, Pace
from diptych.laptop.lifecycle import Phase

T = TypeVar("T")

WIDE_COLUMNS = 100
"""From so many columns on, there is room for wider gaps."""
MIN_NAME_COLUMNS = 12
_HEADS = ("ROLE", "STATE", "RESTARTS", "QUEUE", "ROWS", "BLOCKS", "TOKENS/S")
_STYLES = {
    Phase.READY: "green",
    Phase.STARTING: "yellow",
    Phase.NOT_READY: "yellow",
    Phase.BACKING_OFF: "red",
    Phase.CRASHED: "bold red",
}


@dataclass(frozen=True, slots=True)
class PodRow:
    """One pod, as its supervisor knows it."""

    name: str
    role: str
    phase: Phase
    restarts: int
    address: str = ""
    """Host and port, by which routers call engines that have no name."""
    waited_s: int | None = None
    """In this phase, if somebody waits for its end."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that is shown."""

    pods: Sequence[PodRow]
    figures: Figures = field(default_factory=Figures)
    pace: Pace = field(default_factory=Pace)
    ended: bool = False
    """The service has ended; these are its last figures."""


def drawn(picture: Picture, columns: int) -> Group:
    """The picture for a terminal of so many columns."""
    return Group(_table(picture, columns), Text(_router(picture.figures, picture.pace)))


def _table(picture: Picture, columns: int) -> Table:
    gap = 2 if columns >= WIDE_COLUMNS else 1
    rows = [_cells(pod, picture) for pod in picture.pods]
    others = sum(max(map(len, column)) + gap for column in zip(_HEADS, *rows, strict=True))
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    # On a narrow terminal the names give way, not the figures; their ends tell pods apart.
    room = max(MIN_NAME_COLUMNS, columns - others - gap)
    table.add_column("POD", no_wrap=True)
    for head in _HEADS:
        right = head not in ("ROLE", "STATE")
        table.add_column(head, no_wrap=True, justify="right" if right else "left")
    for pod, (role, state, *numbers) in zip(picture.pods, rows, strict=True):
        style = "dim" if picture.ended else _STYLES.get(pod.phase, "dim")
        name = pod.name if len(pod.name) <= room else f"…{pod.name[1 - room :]}"
        table.add_row(Text(name), role, Text(state, style=style), *numbers)
    return table


def _cells(pod: PodRow, picture: Picture) -> list[str]:
    """What stands beside the name of a pod."""
    figures = _figures_of(pod, picture.figures.engines)
    rate = _figures_of(pod, picture.pace.tokens_per_s)
    numbers = ["-"] * 3
    if figures is not None:
        blocks = f"{figures.blocks_used}/{figures.blocks}"
        numbers = [str(figures.waiting), str(figures.running), blocks]
    state = _state(pod, ended=picture.ended)
    speed = "-" if rate is None else f"{rate:.1f}"
    return [pod.role, state, str(pod.restarts), *numbers, speed]


def _figures_of(pod: PodRow, known: Mapping[str, T]) -> T | None:
    return known.get(pod.name, known.get(pod.address))


def _state(pod: PodRow, *, ended: bool) -> str:
    if ended and pod.phase is not Phase.CRASHED:
        return "ended"
    waited = "" if pod.waited_s is None else f" {pod.waited_s}s"
    return f"{pod.phase.value}{waited}"


def _router(figures: Figures, pace: Pace) -> str:
    first = "-" if pace.first_token_s is None else f"{1000 * pace.first_token_s:.0f} ms"
    return (
        f"requests {figures.answered}, hand-offs {figures.hand_offs}, "
        f"moved {_bytes(figures.moved_bytes)}, first token {first}, "
        f"{sum(pace.tokens_per_s.values()):.1f} tokens/s"
    )


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
