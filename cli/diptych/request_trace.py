"""The command `diptych trace`, the text of a timeline, and what `why` and `trace` of both programs
share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeVar

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from diptych.router_admin import LIST_PATH, Told, path_of
from diptych.watching import bare_table, console_for_tables, print_json
from diptych_frontend.timeline.lanes import MEANINGS, Kind, Lane, Timeline
from diptych_frontend.timeline.picture import milliseconds
from diptych_protocol.admin import Explanation, RequestList

T = TypeVar("T")


class AskRouters(Protocol):
    """Asks all routers for a path. Returns the answers of those that know it, and the errors of
    others; raises a `ClickException` if none knows it."""

    def __call__(self, path: str, kind: type[T]) -> tuple[list[Told[T]], list[str]]: ...


svg_option = click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw it there, as a picture for pages.",
)


@click.command()
@click.argument("request_id")
@svg_option
@click.option("--json", "as_json", is_flag=True, help="For programs: a list of timelines.")
def trace(request_id: str, svg: Path | None, as_json: bool) -> None:
    """Show when a request was where: its queue, prompt, hand-off, tokens and moves, over time.

    REQUEST_ID is the header X-Request-Id of the answer, or the id in its body; `diptych why` lists
    the newest ones. There is a line for the router and one for each engine that had the request. A
    request for n answers has n timelines. docs/requests.md says how exact the times are.

    \b
    Example:
      diptych trace 0f3c5a7e9b1d2f40
      diptych trace chatcmpl-0f3c5a7e9b1d2f40 --svg trace.svg
      diptych trace 0f3c5a7e9b1d2f40 --json | jq '.[0].lanes[].bars'
    """
    from diptych.why import ask_here

    show_timelines(ask_here, request_id, svg, as_json=as_json)


def show_timelines(ask: AskRouters, request_id: str, svg: Path | None, *, as_json: bool) -> None:
    """Print the timelines from routers' answers, and draw them if a file is given. Raises
    `RunError` if it cannot be written."""
    from diptych_frontend.timeline.lanes import timeline

    told = _told(ask, path_of(request_id), Explanation)
    found = [timeline(request) for one in told for request in one.known.requests]
    if svg is not None:
        _draw(svg, found)
    if as_json:
        print_json(found)
    elif svg is None:
        console = Console()
        parts = [part for one in found for part in (drawn(one, console.width), Text())]
        console.print(Group(*parts[:-1]))


def explain_requests(
    ask: AskRouters, request_id: str | None, *, as_json: bool, limit: int | None = None
) -> None:
    """Print what routers recorded of a request or, without an id, of the newest ones of each."""
    from diptych import explained

    if request_id is None:
        path = LIST_PATH if limit is None else f"{LIST_PATH}?limit={limit}"
        listed = _told(ask, path, RequestList)
        picture, answers = explained.listing(listed), explained.as_json(listed)
    else:
        told = _told(ask, path_of(request_id), Explanation)
        picture, answers = explained.explanation(told), explained.as_json(told)
    if as_json:
        print_json(answers)
    else:
        console_for_tables().print(picture)


def _told(ask: AskRouters, path: str, kind: type[T]) -> Sequence[Told[T]]:
    told, problems = ask(path, kind)
    for problem in problems:
        click.echo(problem, err=True)
    return told


def _draw(path: Path, found: Sequence[Timeline]) -> None:
    from diptych.errors import RunError
    from diptych_frontend.timeline.picture import svg

    for number, one in enumerate(found, start=1):
        own = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            own.write_text(svg(one), encoding="utf-8")
        except OSError as exc:
            raise RunError(f"{own}: {exc.strerror or exc}") from exc
        click.echo(f"drawn: {own}", err=True)


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
