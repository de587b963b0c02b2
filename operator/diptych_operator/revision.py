"""The name of everything that must be equal in both pools.

Engines of one revision exchange KV; engines of two never do. What may differ between pods of one
revision (replicas, resources, podTemplate, the lease's length) is not part of it, so that a change
there replaces the pods of one Deployment and needs no second pair of pools.
"""

from __future__ import annotations

import hashlib

import msgspec

from diptych_operator.api.names import ROTATE_ANNOTATION
from diptych_operator.api.service import Engine, InferenceService

_LENGTH = 8


def revision(service: InferenceService) -> str:
    """Eight hexadecimal digits; equal for specs whose engines may be paired."""
    spec = service.spec
    model = spec.model
    return _digest(
        {
            "model": [model.uri, model.revision, model.sha256],
            "engine": _decided(spec.engine),
            "transport": spec.transfer.transport,
            "keys": key_set(service),
        }
    )


def _decided(engine: Engine) -> dict[str, object]:
    """What the spec says of engines. A field that leaves the decision to them may be new to this
    operator: that an upgrade knows of it must not roll out anything."""
    fields = msgspec.structs.asdict(engine)
    return {name: value for name, value in fields.items() if value not in ("auto", None)}


def key_set(service: InferenceService) -> str:
    """Which keys the service asks for: a new value of the rotation annotation is a new name."""
    return _digest(service.metadata.annotations.get(ROTATE_ANNOTATION, ""))


def _digest(value: object) -> str:
    text = msgspec.json.encode(value, order="sorted")
    return hashlib.sha256(text).hexdigest()[:_LENGTH]
