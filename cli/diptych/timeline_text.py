"""Draws a request's timeline for a terminal, and a list of events, without I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diptych.watching import bare_table
from diptych_frontend.timeline.lanes import MEANINGS, Kind, Lane, Timeline
from diptych_frontend.timeline.picture import milliseconds

_LETTERS: Final[dict[Kind, str]] = {
    "wait": "·",
    "queue": "·",
    "prefill": "█",
    "kv": "▒",
    "decode": "▄",
    "preempted": "×",
}
_STYLES: Final[dict[Kind, str]] = {
    "wait": "yellow",
    "queue": "cyan",
    "prefill": "blue",
    "kv": "dark_orange",
    "decode": "green",
    "preempted": "red",
}
GAP: Final = 2


def drawn(timeline: Timeline, columns: int) -> RenderableType:
    """Draw the lanes, below them the meaning of their letters, and then one line for each event."""
    names = max(len(lane.name) for lane in timeline.lanes)
    room = max(20, columns - names - GAP)
    lines = [Text(timeline.title, style="bold")]
    for lane in timeline.lanes:
        lines.append(Text(lane.name.ljust(names + GAP)) + _bars(lane, timeline.seconds, room))
    end = milliseconds(timeline.seconds)
    lines.append(Text(" " * (names + GAP) + "0" + end.rjust(room - 1), style="dim"))
    used = {bar.kind for lane in timeline.lanes for bar in lane.bars}
    legend = Text("  ").join(
        Text(f"{_LETTERS[kind]} {meaning}", style=_STYLES[kind])
        for kind, meaning in MEANINGS.items()
        if kind in used
    )
    return Group(*lines, legend, Text(), _events(timeline))


def _bars(lane: Lane, seconds: float, room: int) -> Text:
    """Each column shows what took most of it, or a bar too short for one if it is free."""
    letters: list[tuple[str, str]] = [(" ", "")] * room
    scale = room / max(seconds, 1e-6)
    for bar in lane.bars:
        first = min(room - 1, int(bar.began_s * scale))
        last = min(room - 1, max(first, round(bar.ended_s * scale) - 1))
        for column in range(first, last + 1):
            if last > first or letters[column][0] == " ":
                letters[column] = _LETTERS[bar.kind], _STYLES[bar.kind]
    return Text.assemble(*letters)


def _events(timeline: Timeline) -> Table:
    table = bare_table("AT", "TOOK", "WHERE", "WHAT", right=("AT", "TOOK"), wrap=("WHAT",))
    for at_s, took_s, where, what, style in sorted(_rows(timeline), key=lambda row: row[0]):
        took = "" if took_s is None else milliseconds(took_s)
        table.add_row(milliseconds(at_s), took, Text(where), Text(what), style=style)
    return table


def _rows(timeline: Timeline) -> Iterator[tuple[float, float | None, str, str, str]]:
    """Time, duration, lane, words and style of each bar and mark."""
    for lane in timeline.lanes:
        for bar in lane.bars:
            yield bar.began_s, bar.ended_s - bar.began_s, lane.name, bar.label, ""
        for mark in lane.marks:
            yield mark.at_s, None, lane.name, mark.label, "red" if mark.is_bad else "bold"
