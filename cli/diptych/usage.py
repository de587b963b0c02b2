"""`diptych usage`: checks what a router wrote of the tokens of keys, and adds it up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from diptych.errors import BadInputError, RunError
from diptych.watching import bare_table, console_for_tables, harmless

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--key", type=FILE, required=True, help="The signing key, as in the Secret of keys.")
def usage(files: tuple[Path, ...], key: Path) -> None:
    """Check the signatures of FILES, one for each day, and add up the tokens of each API key.

    \b
    Example:
      diptych usage --key signing-key usage/2026-11-*.jsonl
    """
    from diptych_frontend.quotas.books import verified
    from diptych_protocol import InvalidRequestError

    secret = _content(key).strip()
    if not secret:
        raise BadInputError(f"{key} is empty")
    totals: dict[str, Counter[str]] = {}
    read: dict[tuple[object, ...], Path] = {}
    for file in files:
        try:
            lines = verified(_content(file), secret)
        except InvalidRequestError as exc:
            raise RunError(f"{file}: {exc}") from exc
        if (twin := read.setdefault(tuple(lines), file)) is not file:
            raise BadInputError(
                f"{file}: the same as {twin}, and would be billed twice; leave one out"
            )
        for line in lines:
            totals.setdefault(line.key, Counter()).update(
                REQUESTS=line.requests, PROMPT=line.prompt_tokens, GENERATED=line.generated_tokens
            )
    columns = ("REQUESTS", "PROMPT", "GENERATED")
    table = bare_table("KEY", *columns, right=columns)
    for name, total in sorted(totals.items()):
        table.add_row(harmless(name), *(str(total[column]) for column in columns))
    console_for_tables().print(table)


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as exc:
        raise BadInputError(f"{file} cannot be read: {exc.strerror or exc}") from exc
