"""The command `diptych trace`, and what it shares with `kubectl diptych trace`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from diptych.router_admin import Told
    from diptych_frontend.timeline.lanes import Timeline
    from diptych_protocol.admin import Explanation

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
    from diptych.why import explain

    told, problems = explain(request_id)
    for problem in problems:
        click.echo(problem, err=True)
    show_timelines(told, svg, as_json=as_json)


def show_timelines(told: Sequence[Told[Explanation]], svg: Path | None, *, as_json: bool) -> None:
    """Print the timelines from routers' answers, and draw them if a file is given. Raises
    `RunError` if it cannot be written."""
    from rich.console import Console, Group
    from rich.text import Text

    from diptych.timeline_text import drawn
    from diptych.watching import print_json
    from diptych_frontend.timeline.lanes import timeline

    found = [timeline(request) for one in told for request in one.known.requests]
    if svg is not None:
        _draw(svg, found)
    if as_json:
        print_json(found)
    elif svg is None:
        console = Console()
        parts = [part for one in found for part in (drawn(one, console.width), Text())]
        console.print(Group(*parts[:-1]))


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
