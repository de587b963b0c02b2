"""The command `diptych trace`, and what `why` and `trace` of both programs share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import click

if TYPE_CHECKING:
    from diptych.router_admin import Told
    from diptych_frontend.timeline.lanes import Timeline

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
    from rich.console import Console, Group
    from rich.text import Text

    from diptych.router_admin import path_of
    from diptych.timeline_text import drawn
    from diptych.watching import print_json
    from diptych_frontend.timeline.lanes import timeline
    from diptych_protocol.admin import Explanation

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
    from diptych.router_admin import LIST_PATH, path_of
    from diptych.watching import console_for_tables, print_json
    from diptych_protocol.admin import Explanation, RequestList

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
