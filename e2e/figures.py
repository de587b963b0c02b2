"""What the tests measured, as JSON and as a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
ARTIFACTS = Path(__file__).with_name("artifacts")
"""What helps to understand one run: each request of the traffic, dumps of failures."""
Figure = float | int | str


class Figures:
    """Rows of figures, written at once: a run that is cut short keeps what it has.

    Rows that a run does not measure stay as an earlier run left them.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        self._folder = folder
        known = folder / "latest.json"
        self._rows: dict[str, dict[str, Figure]] = (
            json.loads(known.read_text()) if known.exists() else {}
        )

    def add(self, row: str, figures: Mapping[str, Figure]) -> None:
        """More figures of one row, such as a disruption."""
        self._rows.setdefault(row, {}).update(figures)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "latest.json").write_text(json.dumps(self._rows, indent=2) + "\n")
        (self._folder / "latest.md").write_text(self._table())

    def _table(self) -> str:
        columns = list(dict.fromkeys(key for row in self._rows.values() for key in row))
        heads = ["", *(column.replace("_", " ") for column in columns)]
        lines = [heads, ["---"] * len(heads)]
        for name, row in self._rows.items():
            lines.append([name, *(str(row.get(column, "")) for column in columns)])
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)
