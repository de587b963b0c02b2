"""Bring the chart up to date with what it is made from: `python charts/generate.py`.

The CRDs in the chart are copies of those in crds/, the limits of its admission policy are the
operator's, and the table of values in the chart's README is made from values.schema.json and
values.yaml. `generated()` says what should be where, so that a test can tell whether it was
forgotten.
"""

# ruff: noqa: INP001 (a script; charts/ is no package)

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from diptych_operator.api.limits import validations

CHART = Path(__file__).parent / "diptych"
CRDS = CHART.parent.parent / "crds"
BEGIN = "<!-- values: written by charts/generate.py -->"
END = "<!-- end of values -->"


def leaves(
    schema: dict[str, Any], values: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, str]]:
    """Path, default and description of every value that can be set, in the schema's order."""
    for name, child in schema["properties"].items():
        if name not in values:
            continue  # Helm's own `global`
        if "properties" in child:
            yield from leaves(child, values[name], f"{prefix}{name}.")
            continue
        yield f"{prefix}{name}", values[name], child["description"]


def values_table() -> str:
    """The README's table, as Markdown."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for path, default, description in leaves(schema, values):
        rows.append(f"| `{path}` | `{json.dumps(default)}` | {description} |")
    return "\n".join(rows)


def generated() -> dict[Path, bytes]:
    """The whole contents of each file that this script writes."""
    readme = CHART / "README.md"
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"{readme} lacks the lines {BEGIN!r} and {END!r}, between which the table goes"
        )
    return {
        **{CHART / "files" / "crds" / crd.name: crd.read_bytes() for crd in CRDS.glob("*.yaml")},
        CHART / "files" / "limits.yaml": yaml.safe_dump(
            validations(), sort_keys=False, width=100
        ).encode(),
        readme: f"{before}{BEGIN}\n{values_table()}\n{END}{after}".encode(),
    }


def main() -> None:
    for path, content in generated().items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
            print(f"wrote {path.relative_to(CHART.parent.parent)}")


if __name__ == "__main__":
    main()
