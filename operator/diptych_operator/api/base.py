"""What all parts of the InferenceService's types share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
"""Of a Kubernetes object."""


class SpecPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Common to all parts a user writes: camelCase outside, and no unknown fields."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What several fields must satisfy together: CEL here, Python in `api/rules.py`."""

    cel: str
    """True for a good object; `self` is the object at which the rule stands, with its defaults."""
    message: str
    """What is wanted instead, said of the field; API servers say it, and so does `parse`."""
    at: str = ""
    """The field to name, seen from that object, such as `.router.holdSeconds`; empty: itself."""

    @property
    def told_at_its_object(self) -> str:
        """The message for where the object is named, and not the field."""
        return f"{self.at} {self.message}".lstrip(". ")


def validations(*rules: Rule) -> dict[str, Any]:
    """The part of a schema with which an API server enforces the rules."""
    return {
        "x-kubernetes-validations": [
            # A rule can name the field itself (`fieldPath`) only since Kubernetes 1.28.
            {"rule": rule.cel, "message": rule.told_at_its_object}
            for rule in rules
        ]
    }
