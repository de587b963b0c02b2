"""What all parts of the InferenceService's types share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


class SpecPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Common to all parts a user writes: camelCase outside, and no unknown fields."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What several fields must satisfy together: CEL here, Python in `diptych_operator.rules`."""

    cel: str
    """True for a good object; `self` is the object at which the rule stands, with its defaults."""
    message: str
    """What is wanted instead; API servers say it, and so does `parse`."""
    at: str = ""
    """The field to name, seen from that object, such as `.router.holdSeconds`; empty: itself."""


def validations(*rules: Rule) -> dict[str, Any]:
    """The part of a schema with which an API server enforces the rules."""
    return {
        "x-kubernetes-validations": [
            {"rule": rule.cel, "message": rule.message}
            | ({"fieldPath": rule.at} if rule.at else {})
            for rule in rules
        ]
    }
