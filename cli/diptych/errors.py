"""How a command ends when it cannot do what was asked: with one line and an exit code."""

from __future__ import annotations

import click


class BadInputError(click.ClickException):
    """The user's input can never work as written: exit code 2."""

    exit_code = 2


class RunError(click.ClickException):
    """It could have worked but failed: exit code 1."""

    exit_code = 1
