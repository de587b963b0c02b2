"""Computes the name of a revision: of everything that must be equal in both pools.

Engines of one revision exchange KV; engines of two never do. What may differ between pods of one
revision (replicas, resources, podTemplate, the lease's length) is not part of the name. A change of
it replaces the pods of one Deployment and needs no second pair of pools.
"""

from __future__ import annotations

from typing import Final

import msgspec

from diptych_operator.api.base import digest
from diptych_operator.api.engine import Engine, reasoning_parser
from diptych_operator.api.names import ROTATE_ANNOTATION
from diptych_operator.api.service import InferenceService
from diptych_protocol.model_uri import parse_model_uri

_LENGTH = 8


def revision(service: InferenceService) -> str:
    """Return eight hexadecimal digits, equal for specs whose engines may be paired."""
    spec = service.spec
    model = spec.model
    decided = {
        "model": [model.uri, model.revision, model.sha256],
        "engine": _decided(spec.engine),
        "transport": spec.transfer.transport,
        **_beside(service),
        # Another one is a rollout, too: what makes the pods does not hand them over.
        **({"workload": spec.workload} if spec.workload != "Deployment" else {}),
    }
    return digest(decided, _LENGTH)


def _beside(service: InferenceService) -> dict[str, object]:
    """What engines have beside their own image and settings.

    The router's image fetches vLLM's model: another one replaces its pods, which is to happen as
    `rollout` says.
    """
    spec = service.spec
    beside: dict[str, object] = {"keys": key_set(service)}
    if spec.engine.runtime != "vllm":
        return beside
    beside["connector_image"] = spec.transfer.connector_image
    if parse_model_uri(spec.model.uri).is_fetched:
        beside["fetcher"] = spec.router.image
    if service.connector != "none":
        beside["connector"] = service.connector
    if service.engine_of("prefill") != spec.engine:
        beside["prefill"] = _decided(service.engine_of("prefill"))
    return beside


_COUNTED_AT_THEIR_DEFAULTS = frozenset(
    {
        "image", "block_size", "kv_cache_memory", "max_num_seqs", "max_num_batched_tokens",
        "max_num_waiting", "enable_prefix_caching",
    }
)  # fmt: skip
"""Fields that have always been part of the name, with whatever value."""


_FIRST_DEFAULTS: Final = {"reasoning_parser": "none"}
"""Defaults that are others now. Stored services have them written out and keep their names, and
today's default is another name: engines of a pair must read an answer in the same way."""


def _decided(engine: Engine) -> dict[str, object]:
    """What the spec says of engines. A field at its first default may be new to this operator: that
    an upgrade knows of it must make no new revision."""
    fields = msgspec.structs.asdict(engine) | {"reasoning_parser": reasoning_parser(engine)}
    defaults = msgspec.structs.asdict(Engine()) | _FIRST_DEFAULTS
    return {
        name: value
        for name, value in fields.items()
        if value != defaults[name] or name in _COUNTED_AT_THEIR_DEFAULTS
    }


def key_set(service: InferenceService) -> str:
    """Return the name of the service's keys. A new rotation annotation gives a new name."""
    return digest(service.metadata.annotations.get(ROTATE_ANNOTATION, ""), _LENGTH)
