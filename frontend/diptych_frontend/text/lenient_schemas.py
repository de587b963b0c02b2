"""Finds what of a JSON schema is not enforced when the caller asks to be lenient.

llguidance can ignore keywords that it does not support, and warns of each. What it still refuses is
removed here: references to other documents, and patterns that it cannot read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from llguidance import LLMatcher

from diptych_frontend.text.schema_parts import References, Schema, all_parts

_SUSPECT: Final = ("(?=", "(?!", "(?<", "\\1", "\\2", "\\3", "\\p", "\\c", "\\u")
"""Only patterns with one of these are tried: the others are read by everybody."""
_TIMES: Final = re.compile(r" \(\d+ times\)$")
_KEYS: Final = "Unimplemented keys: "
_FORMAT: Final = "Unknown format: "
_ONE_OF: Final = "oneOf"
_COUNTS: Final = "min/maxProperties"


def loosened(schema: Schema) -> tuple[Schema, list[str]]:
    """Return a schema without what llguidance refuses even when lenient, and the removed keywords.

    Raises `RecursionError`.
    """
    references = References(schema)
    flaws: dict[int, str] = {}
    for _, part in all_parts(schema):
        if "$ref" in part and references.target(part) is None:
            flaws[id(part)] = "$ref"
        elif isinstance(part.get("pattern"), str) and not _is_readable(part["pattern"]):
            flaws[id(part)] = "pattern"
    return (_without(schema, flaws), sorted(set(flaws.values()))) if flaws else (schema, [])


def left_out(warnings: Sequence[str]) -> list[str]:
    """Return the keywords that llguidance warns of."""
    names: list[str] = []
    for warning in warnings:
        told = _TIMES.sub("", warning.partition("\n")[0])
        if told.startswith(_KEYS):
            names += json.loads(told.removeprefix(_KEYS))
        elif told.startswith(_FORMAT):
            names.append(f"format {told.removeprefix(_FORMAT)}")
        elif told.startswith(_ONE_OF):
            names.append("oneOf")
        elif told.startswith(_COUNTS):
            names += ["minProperties", "maxProperties"]
        else:
            names.append(told)
    return names


def _is_readable(pattern: str) -> bool:
    if not any(sign in pattern for sign in _SUSPECT):
        return True
    schema = json.dumps({"type": "string", "pattern": pattern})
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


def _without(value: Any, flaws: dict[int, str]) -> Any:
    if isinstance(value, list):
        return [_without(item, flaws) for item in value]
    if not isinstance(value, dict):
        return value
    gone = flaws.get(id(value))
    return {key: _without(inner, flaws) for key, inner in value.items() if key != gone}
