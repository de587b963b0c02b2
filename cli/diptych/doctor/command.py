"""The command `diptych doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from diptych.doctor.checks import Check

COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs: a list of checks.")
def doctor(as_json: bool) -> None:
    """Look at this machine, and say what will work and what to do about the rest.

    Checks the system, the packages, the processor, memory, UCX, ports, a GPU, vLLM, and the disk.
    `warn` means that Diptych works, but something is slower or missing. `fail` means that
    `diptych up` cannot work; then the exit code is 1.

    \b
    Example:
      diptych doctor
      diptych doctor --json | jq -r '.[] | select(.state != "ok") | .remedy'
    """
    from diptych.defaults import DEFAULT_PORT, MODEL_CACHE
    from diptych.doctor.checks import State, examine, verdict
    from diptych.doctor.gather import gather
    from diptych.watching import console_for_tables, print_json

    checks = examine(gather(DEFAULT_PORT, MODEL_CACHE))
    if as_json:
        print_json(checks)
    else:
        console = console_for_tables()
        console.print(table(checks))
        console.print(verdict(checks), markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(1 if any(check.state is State.FAIL for check in checks) else 0)


def table(checks: Sequence[Check]) -> RenderableType:
    """One row for each check, with the remedy below what was found."""
    from rich.text import Text

    from diptych.watching import bare_table

    shown = bare_table("CHECK", "", "FOUND", wrap=("FOUND",))
    shown.columns[-1].overflow = "fold"
    for check in checks:
        found = Text(check.found)
        if check.remedy:
            found.append(f"\n-> {check.remedy}", style="dim")
        shown.add_row(check.name, Text(check.state, style=COLOURS[check.state]), found)
    return shown
