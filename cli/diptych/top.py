"""The command `diptych top`: what the engines of a service on this machine do now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from diptych.defaults import TOP_INTERVAL_S

if TYPE_CHECKING:
    from diptych.engine_load import Sample


@click.command()
@click.argument("name", required=False)
@click.option(
    "--interval",
    type=click.FloatRange(0.5, 60),
    default=TOP_INTERVAL_S,
    show_default=True,
    help="Seconds over which tokens per second are counted.",
)
@click.option("-w", "--watch", is_flag=True, help="Show it anew until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="For programs: a list of engines.")
def top(name: str | None, interval: float, watch: bool, as_json: bool) -> None:
    """Show what each engine of service NAME does now; without NAME, of the newest one.

    The table is the one of `kubectl diptych top`: requests that run and wait, prompt tokens that
    wait, KV blocks in use, leases, and tokens computed per second.

    \b
    Example:
      diptych top --watch
      diptych top smollm2 --json | jq '[.[].running] | add'
    """
    from diptych import engine_load
    from diptych.watching import loads_over, print_json, show

    look = loads_over(interval, lambda: read_engines(name))
    if as_json:
        shown = engine_load.as_json(look())
        print_json(shown)
        return
    show(lambda: engine_load.table(look()), watch, pause_s=0.0)


def read_engines(name: str | None) -> Mapping[str, Sample]:
    """Return the state of each engine of a service, from its router. Raises `RunError`."""
    import httpx

    from diptych.engine_load import items_of, read_samples
    from diptych.errors import RunError
    from diptych.laptop.rundir import find, read_metrics

    state = find(name)
    try:
        return read_samples(items_of(read_metrics(state)))
    except (httpx.HTTPError, OSError) as exc:
        why = str(exc) or type(exc).__name__
        raise RunError(f"the router of {state.service} does not answer: {why}") from exc
    except ValueError as exc:
        raise RunError(f"the metrics of {state.service} cannot be read: {exc}") from exc
