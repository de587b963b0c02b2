"""Finds objects of a JSON schema that are too wide for llguidance.

At each place of an answer its parser holds all that may come next in one row of at most 2,000
items. Members that may be left out come next together: as many as there are up to the next one that
is required. The row is found out only when an answer gets there, so it is counted here before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Final, NamedTuple

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


class Rows(NamedTuple):
    """Items in the rows of an object."""

    first: int
    """Behind its bracket."""
    later: int
    """In the widest row behind a required member."""


def too_wide_part(schema: Schema) -> str | None:
    """Return a JSON pointer to an object that no answer could write; None if there is none.

    schema: as it is compiled.
    """
    references = References(schema)
    known: dict[int, Rows] = {}
    for path, part in all_parts(schema):
        if max(_rows(part, references, known)) > MAX_ROW:
            return "/".join(["#", *(escaped(str(key)) for key in path)])
    return None


def _rows(part: Schema, references: References, known: dict[int, Rows]) -> Rows:
    """The rows of a part's own members, with those of its alternatives. Alternatives that begin
    with different constants share no row behind them."""
    if id(part) not in known:
        known[id(part)] = Rows(0, 0)  # a part that contains itself adds nothing
        joined = [*_joined(part, references, set())]
        first, later = _own_rows(joined)
        behind: dict[object, int] = {}
        for each in joined:
            for other in (*list_at(each, "anyOf"), *list_at(each, "oneOf")):
                if isinstance(other, dict):
                    rows = _rows(other, references, known)
                    first += rows.first
                    constant = _first_constant([*_joined(other, references, set())])
                    behind[constant] = behind.get(constant, 0) + rows.later
        later += behind.pop(None, 0) + max(behind.values(), default=0)
        known[id(part)] = Rows(first, later)
    return known[id(part)]


def _joined(part: object, references: References, met: set[int]) -> Iterator[Schema]:
    """A part, and those that hold of its values as well."""
    if isinstance(part, dict) and id(part) not in met:
        met.add(id(part))
        yield part
        for other in (references.target(part), *list_at(part, "allOf")):
            yield from _joined(other, references, met)


def _first_constant(parts: Sequence[Schema]) -> tuple[str, str] | None:
    """The first member and the one value that it must have, if it must have one."""
    for part in parts:
        for name, value in islice(dict_at(part, "properties").items(), 1):
            if not (isinstance(value, dict) and any(name in list_at(p, "required") for p in parts)):
                return None
            allowed = [value["const"]] if "const" in value else list_at(value, "enum")
            return (name, repr(allowed[0])) if len(allowed) == 1 else None
    return None


def _own_rows(parts: Sequence[Schema]) -> Rows:
    names: dict[str, None] = {}
    required: set[object] = set()
    is_open = True
    for part in parts:
        names |= dict.fromkeys(dict_at(part, "properties"))
        required |= {name for name in list_at(part, "required") if isinstance(name, str)}
        is_open = is_open and part.get("additionalProperties") is not False
    if not names:
        return Rows(0, 0)
    if required.isdisjoint(names):
        return Rows(ITEMS_OF_OPTIONAL * (len(names) + MEMBERS_OF_OPEN * is_open), 0)
    runs = [(must, len([*run])) for must, run in groupby(names, key=required.__contains__)]
    later = max(0 if must else ITEMS_AFTER_REQUIRED * length + 1 for must, length in runs)
    must, length = runs[0]
    return Rows(0 if must else ITEMS_BEFORE_REQUIRED * length + min(len(runs), 4), later)
