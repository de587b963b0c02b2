"""`diptych models`: lists the models with a short name, and which of them are on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from diptych.known_models import KNOWN, KnownModel, size_text
from diptych.manifest import in_package
from diptych.watching import bare_table
from diptych_frontend.model_files.fetch.fetch import is_cached


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of the list."""

    model: KnownModel
    here: bool
    """Whether its files are on this machine, so that `up` fetches nothing."""
    fits: bool
    """Whether this machine has as much memory free as its service may take."""


def listed(cache: Path, memory: int) -> list[Listed]:
    """Look each model up in the cache, or among the installed packages. What fits comes first.

    memory: the bytes that are free on this machine.
    """
    rows = [Listed(m, is_here(m, cache), m.memory_bytes <= memory) for m in KNOWN.values()]
    return sorted(rows, key=lambda row: not row.fits)


def is_here(model: KnownModel, cache: Path) -> bool:
    if model.package:
        return in_package(model)
    return is_cached(model.uri, cache, revision=model.revision, sha256=model.sha256)


def table(rows: Iterable[Listed], default: KnownModel) -> Table:
    """Format one line for each model."""
    columns = ("NAME", "SIZE", "MEMORY", "FITS", "HERE", "LICENSE", "WHERE")
    shown = bare_table(*columns, right=("SIZE", "MEMORY"))
    for row in rows:
        model = row.model
        name = f"{model.name} (default)" if model == default else model.name
        sizes = size_text(model.size_bytes), size_text(model.memory_bytes)
        fits, here = ("yes" if said else "no" for said in (row.fits, row.here))
        shown.add_row(name, *sizes, fits, here, model.license, model.where)
    return shown


def as_json(rows: Iterable[Listed], default: KnownModel) -> list[dict[str, Any]]:
    """Return whole values, for programs."""
    return [
        asdict(row.model)
        | {"memory_bytes": row.model.memory_bytes, "fits": row.fits}
        | {"default": row.model == default, "here": row.here}
        for row in rows
    ]
