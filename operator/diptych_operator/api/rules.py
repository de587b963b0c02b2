"""Checks a service against the rules over several fields where no API server has: on a laptop, and
in clusters older than CEL.

Each rule is declared at the field whose type it belongs to (`base.ruled`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

import msgspec
from msgspec import inspect

from diptych_operator.api.base import Rule
from diptych_operator.api.errors import SpecError
from diptych_operator.api.service import InferenceService
from diptych_protocol import InvalidRequestError
from diptych_protocol.model_uri import parse_model_uri


def check(service: InferenceService) -> None:
    """Raise `SpecError` for the first rule that the service breaks."""
    rules = next(rules for name, _, rules in _fields(InferenceService) if name == "spec")
    for where, rule in _broken("spec", service.spec, rules):
        raise SpecError(where + rule.at, rule.message)
    try:
        parse_model_uri(service.spec.model.uri)
    except InvalidRequestError as exc:
        # Beyond regular expressions, such as a port that does not exist.
        raise SpecError("spec.model.uri", str(exc).removeprefix("model: ")) from exc


def _broken(where: str, value: Any, rules: Sequence[Rule]) -> Iterator[tuple[str, Rule]]:
    """Path of the object at which a rule stands, and the rule; inner objects come first."""
    if isinstance(value, msgspec.Struct):
        for name, written, own in _fields(type(value)):
            child = getattr(value, name)
            if child is not None:
                yield from _broken(f"{where}.{written}", child, own)
    for rule in rules:
        if not rule.kept(value):
            yield where, rule


@lru_cache(64)
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, str, list[Rule]]]:
    """Each field: its name, as it is written, and the rules that stand at it."""
    info = cast(inspect.StructType, inspect.type_info(kind))
    return [(field.name, field.encode_name, list(_rules(field.type))) for field in info.fields]


def _rules(info: inspect.Type) -> Iterator[Rule]:
    match info:
        case inspect.Metadata(type=inner, extra=extra):
            yield from (extra or {}).get("rules", ())
            yield from _rules(inner)
        case inspect.UnionType(types=types):
            for each in types:
                yield from _rules(each)
