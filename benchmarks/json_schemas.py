"""How many published JSON schemas become forms of answers, exact and lenient, and in what time.

`python -m benchmarks.json_schemas [FOLDER ...]` takes all schemas in files `*.json` under the
folders; without one, those of the wheels that `make clients` fetches for this.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diptych_frontend.text.structured_outputs import LENIENT_HELPS, check_structured_outputs
from diptych_protocol import InvalidRequestError, StructuredOutputsParams

WHEELS: Final = ("check-jsonschema", "validate-pyproject-schema-store")
KEYWORDS: Final = frozenset(
    ("type", "properties", "$ref", "anyOf", "oneOf", "allOf", "definitions", "$defs")
)
"""A file is a schema if its object has one of these."""
CLIENTS: Final = Path(__file__).parents[1] / ".clients"


@dataclass(frozen=True, slots=True)
class Tally:
    """What came of all schemas in one way."""

    taken: int
    refused: Counter[str]
    """By the beginnings of the reasons."""
    ms: list[float]


def schemas_in(folders: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in sorted(path for folder in folders for path in folder.rglob("*.json")):
        schema = json.loads(path.read_text())
        if isinstance(schema, dict) and KEYWORDS & schema.keys():
            yield schema


def judge(schemas: Iterable[dict[str, Any]], *, lenient: bool) -> Tally:
    refused: Counter[str] = Counter()
    times = []
    for schema in schemas:
        form = StructuredOutputsParams(json=schema, lenient=lenient)
        started = time.perf_counter()
        try:
            check_structured_outputs(form)
        except InvalidRequestError as refusal:
            reason = str(refusal).partition(": ")[2].removesuffix(f"; {LENIENT_HELPS}")
            refused[reason.partition("\n")[0][:72]] += 1
        times.append((time.perf_counter() - started) * 1e3)
    return Tally(len(times) - refused.total(), refused, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    given = parser.parse_args().folders
    schemas = list(schemas_in(given or [CLIENTS / name for name in WHEELS]))
    if not schemas:
        parser.error(f'no schemas: `make clients CLIENTS="{" ".join(WHEELS)}"` fetches some')
    for lenient in (True, False):  # whoever is refused when exact was tried as lenient, too
        tally = judge(schemas, lenient=lenient)
        way = "lenient" if lenient else "exact"
        middle, longest = statistics.median(tally.ms), max(tally.ms)
        print(f"{way}: {tally.taken} of {len(schemas)}, {middle:.0f} ms, at most {longest:.0f} ms")
        for reason, count in tally.refused.most_common():
            print(f"  {count:3} {reason}")


if __name__ == "__main__":
    main()
