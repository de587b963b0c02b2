"""The command `diptych top`: what the engines of a service on this machine do now; and what it
shares with `kubectl diptych top`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import click

from diptych.service_argument import Number

if TYPE_CHECKING:
    from diptych.engine_load import Load, Sample

TOP_INTERVAL_S: Final = 4.0
"""Metrics are up to two seconds old. Over a shorter interval, tokens per second would jump."""
interval_option = click.option(
    "--interval",
    type=Number(0.5, 60),
    default=TOP_INTERVAL_S,
    show_default=True,
    help="Seconds over which tokens per second are counted.",
)
watch_option = click.option("-w", "--watch", is_flag=True, help="Show it anew until Ctrl-C.")


@click.command()
@click.argument("name", required=False)
@interval_option
@watch_option
@click.option("--json", "as_json", is_flag=True, help="For programs: a list of engines.")
def top(name: str | None, interval: float, watch: bool, as_json: bool) -> None:
    """Show what each engine of service NAME does now; without NAME, of the newest one.

    The table is the one of `kubectl diptych top`: requests that run and wait, prompt tokens that
    wait, KV blocks in use and pinned, leases, and tokens computed per second.

    \b
    Example:
      diptych top --watch
      diptych top smollm2 --json | jq '[.[].running] | add'
    """
    show_loads(lambda: _read_engines(name), interval, watch=watch, as_json=as_json)


def show_loads(
    read: Callable[[], Mapping[str, Sample]], interval_s: float, *, watch: bool, as_json: bool
) -> None:
    """Print what engines do in an interval, or in one after the other."""
    from diptych import engine_load
    from diptych.watching import print_json, show

    before, seen_at = read(), time.monotonic()

    def look() -> list[Load]:
        nonlocal before, seen_at
        time.sleep(interval_s)
        now, at = read(), time.monotonic()
        found = engine_load.loads(before, now, at - seen_at)
        before, seen_at = now, at
        return found

    if as_json:
        print_json(engine_load.as_json(look()))
        return
    show(lambda: engine_load.table(look()), watch, pause_s=0.0)


def _read_engines(name: str | None) -> Mapping[str, Sample]:
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
