"""What all parts of the InferenceService's types share, and the error about a wrong service."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from diptych_protocol import DiptychError

Raw = Mapping[str, Any]
"""An object as the API server has it."""
Object = dict[str, Any]
"""One that is made here."""
ServiceKey = tuple[str, str]
"""Namespace and name."""


def digest(value: object, length: int = 16) -> str:
    """Return hexadecimal digits that are others for another value."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:length]


class SpecError(DiptychError, ValueError):
    """An InferenceService that can never work as written. `str()` is `field: problem`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        """Dotted path of the field from the object's root, such as `spec.prefill.replicas`."""
        self.problem = problem


OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
"""Pattern of the name of a Kubernetes object."""
ClaimName = Annotated[
    str, Meta(pattern=OBJECT_NAME, max_length=253, title="the name of a PersistentVolumeClaim")
]
SecretName = Annotated[str, Meta(pattern=OBJECT_NAME, max_length=253, title="the name of a Secret")]
ImageReference = Annotated[str, Meta(pattern=r"^\S*$", max_length=512, title="an image reference")]


class SpecPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The base of all parts that a user writes: camelCase outside, unknown fields rejected."""


def camel_case(name: str) -> str:
    """A name as Python writes it -> as the custom resource does."""
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def snake_case(name: str) -> str:
    """A name as the custom resource writes it, or as Python does -> as Python does."""
    return re.sub("(?<!^)([A-Z])", r"_\1", name).lower()


def spec_part(
    name: str, settings: type[msgspec.Struct], names: Collection[str] = (), **own: tuple[Any, Any]
) -> type[msgspec.Struct]:
    """Make a part of the spec from a configuration's fields, in camelCase, and its own.

    names: fields whose values are names of ours, in camelCase too.
    own: the type and default of each further field, or of one that is another here, by name.
    """
    hints = get_type_hints(settings, include_extras=True)
    shared = [
        (field.name, hints[field.name], msgspec.field(default_factory=field.default_factory))
        if field.default_factory is not msgspec.NODEFAULT
        else (
            field.name,
            hints[field.name],
            camel_case(field.default) if field.name in names else field.default,
        )
        for field in msgspec.structs.fields(settings)
        if field.name not in own
    ]
    fields = [(key, *about) for key, about in own.items()]
    return msgspec.defstruct(
        name, [*fields, *shared], bases=(SpecPart,), frozen=True, kw_only=True, rename="camel"
    )


def default_of(field: msgspec.structs.FieldInfo | msgspec.inspect.Field) -> Any:
    """Return the default of a field; one that is a list or a mapping is made anew each time."""
    if field.default_factory is msgspec.NODEFAULT:
        return field.default
    return field.default_factory()


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition over several fields, in CEL for API servers and in Python elsewhere."""

    cel: str
    """True for a good object; `self` is the object at which the rule stands, with its defaults."""
    kept: Callable[[Any], bool]
    """The same condition in Python."""
    message: str
    """What is wanted instead, phrased about the field. API servers and `parse` report it."""
    at: str = ""
    """The path of the field to name, relative to that object, such as `.router.holdSeconds`. Empty
    means the object itself."""

    @property
    def told_at_its_object(self) -> str:
        """The message for an error that names the object and not the field."""
        return f"{self.at} {self.message}".lstrip(". ")


def ruled(*rules: Rule, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of a `Meta` whose field keeps the rules. API servers enforce them
    through its schema, `api/rules.py` through their Python.

    schema: further keywords of the field's schema.
    """
    validations = [
        # A rule can name the field itself (`fieldPath`) only since Kubernetes 1.28.
        {"rule": rule.cel, "message": rule.told_at_its_object}
        for rule in rules
    ]
    return {
        "extra_json_schema": {**(schema or {}), "x-kubernetes-validations": validations},
        "extra": {"rules": rules},
    }
