"""Finds objects of a JSON schema that are too wide for llguidance.

At each place of an answer its parser holds all that may come next in one row of at most 2,000
items. Members that may be left out come next together: as many as there are up to the next one that
is required. The row is found out only when an answer gets there, so it is counted here before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from diptych_frontend.text.schema_circles import escaped
from diptych_frontend.text.schema_parts import References, Schema, all_parts, dict_at, list_at

MAX_ROW: Final = 2000
"""llguidance's `max_items_in_row`."""
ITEMS_OF_OPTIONAL: Final = 4
"""Items for each member of an object that requires none."""
ITEMS_BEFORE_REQUIRED: Final = 3
ITEMS_AFTER_REQUIRED: Final = 2
MEMBERS_OF_OPEN: Final = 2
"""An object that takes further members has as many items more as one with these. The constants
agree with the pinned llguidance up to one member (tests/frontend/test_hopeless_forms.py)."""


def too_wide_part(schema: Schema) -> str | None:
    """Return a JSON pointer to an object that no answer could write; None if there is none.

    schema: as it is compiled.
    """
    references = References(schema)
    known: dict[int, int] = {}
    for path, part in all_parts(schema):
        if _row(part, references, known) > MAX_ROW:
            return "/".join(["#", *(escaped(str(key)) for key in path)])
    return None


def _row(part: Schema, references: References, known: dict[int, int]) -> int:
    """The items at the widest place of a part's own members, with those of its alternatives."""
    if id(part) not in known:
        known[id(part)] = 0  # a part that contains itself adds nothing
        joined = [*_joined(part, references, set())]
        others = (m for each in joined for key in ("anyOf", "oneOf") for m in list_at(each, key))
        rows = [_row(other, references, known) for other in others if isinstance(other, dict)]
        known[id(part)] = _own_row(joined) + sum(rows)
    return known[id(part)]


def _joined(part: object, references: References, met: set[int]) -> Iterator[Schema]:
    """A part, and those that hold of its values as well."""
    if isinstance(part, dict) and id(part) not in met:
        met.add(id(part))
        yield part
        for other in (references.target(part), *list_at(part, "allOf")):
            yield from _joined(other, references, met)


def _own_row(parts: Iterable[Schema]) -> int:
    names: dict[str, None] = {}
    required: set[object] = set()
    is_open = True
    for part in parts:
        names |= dict.fromkeys(dict_at(part, "properties"))
        required |= {name for name in list_at(part, "required") if isinstance(name, str)}
        is_open = is_open and part.get("additionalProperties") is not False
    if not names:
        return 0
    if required.isdisjoint(names):
        return ITEMS_OF_OPTIONAL * (len(names) + MEMBERS_OF_OPEN * is_open)
    runs = [(must, len([*run])) for must, run in groupby(names, key=required.__contains__)]
    rows = [0 if must else ITEMS_AFTER_REQUIRED * length + 1 for must, length in runs]
    must, length = runs[0]
    return max(*rows, 0 if must else ITEMS_BEFORE_REQUIRED * length + min(len(runs), 4))
