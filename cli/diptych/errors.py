"""How a command ends when it cannot do what was asked: one line and an exit code."""

from __future__ import annotations

import click


class BadInputError(click.ClickException):
    """What the user gave can never work as written: exit code 2."""

    exit_code = 2


class RunError(click.ClickException):
    """It could have worked, and did not: exit code 1."""

    exit_code = 1
