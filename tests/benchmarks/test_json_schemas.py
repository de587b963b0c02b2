"""The rate at which schemas compile."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.json_schemas import judge, schemas_in


def test_schemas_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    for name, content in {
        "plain": {"type": "object"},
        "a set": {"type": "array", "uniqueItems": True},
        "never": {"$ref": "#"},
        "no schema": {"name": "x"},
        "a list": [1],
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    schemas = list(schemas_in([tmp_path]))
    assert len(schemas) == 3
    exact, lenient = (judge(schemas, lenient=lenient) for lenient in (False, True))
    assert (exact.taken, lenient.taken) == (1, 2)
    assert sorted(exact.refused) == ['Unimplemented keys: ["uniqueItems"]', "no answer fits it"]
    assert len(exact.ms) == 3
