"""The options of commands that talk to an API, here or elsewhere."""

from __future__ import annotations

from typing import Any

import click


def api_options(command: Any) -> Any:
    """Decorates a command that takes `model` and `api_key`; see `find_service`."""
    for option in (
        click.option(
            "--api-key",
            envvar="OPENAI_API_KEY",
            show_envvar=True,
            help="For an API elsewhere; a service on this machine has its own.",
        ),
        click.option("--model", help="Model name; left out, the first one the API lists."),
    ):
        command = option(command)
    return command
