"""One InferenceService to the Kubernetes objects that are it. Pure: no client, no clock, no chance.

`diptych up` runs exactly these objects as local processes.
"""

from __future__ import annotations

from typing import Any

from diptych_operator.api_types import InferenceService
from diptych_operator.render.config import ServiceSecrets, config_hash, config_map, secret
from diptych_operator.render.pods import engine_deployment, router_deployment
from diptych_operator.render.services import pool_service, router_service

__all__ = ["ServiceSecrets", "render"]


def render(service: InferenceService, secrets: ServiceSecrets) -> list[dict[str, Any]]:
    """All objects of a service, each before those that refer to it.

    Raises `SpecError` for a podTemplate that does not fit the pod it is laid over.
    """
    prefill, decode, router = (
        config_map(service, role) for role in ("prefill", "decode", "router")
    )
    spec = service.spec
    return [
        secret(service, secrets),
        prefill,
        decode,
        router,
        pool_service(service, "prefill"),
        pool_service(service, "decode"),
        router_service(service),
        engine_deployment(service, "prefill", spec.prefill, config_hash(prefill)),
        engine_deployment(service, "decode", spec.decode, config_hash(decode)),
        router_deployment(service, config_hash(router)),
    ]
