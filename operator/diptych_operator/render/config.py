"""The configuration files inside the pods, and the objects that carry them."""

from __future__ import annotations

import base64
import hashlib
import math
from decimal import Decimal
from typing import Any

import msgspec

from diptych_operator.api_types import InferenceService, Pool
from diptych_operator.errors import SpecError
from diptych_operator.render.names import (
    ENGINE_FILE,
    PUBLIC_KEY_FILE,
    ROUTER_FILE,
    SECRET_KEY_FILE,
    Role,
    labels,
    object_name,
)
from diptych_protocol import (
    CurveKeys,
    EngineConfig,
    InvalidRequestError,
    KVTransferConfig,
    RouterConfig,
)

_UNITS = {
    "Ki": Decimal(1 << 10), "Mi": Decimal(1 << 20), "Gi": Decimal(1 << 30), "Ti": Decimal(1 << 40),
    "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12),
}  # fmt: skip
_FIELDS = {
    "model": "spec.model.uri",
    "kv_cache_bytes": "spec.engine.kvCacheMemory",
}
"""Fields of EngineConfig that are not `spec.engine` in camelCase."""


class ServiceSecrets(msgspec.Struct, frozen=True):
    """What a service must not share with others; made once and kept."""

    curve: CurveKeys


def engine_config(service: InferenceService, pool: Pool) -> EngineConfig:
    """What one engine pod reads. The pools differ in `num_threads` only."""
    engine = service.spec.engine
    return EngineConfig(
        model=service.spec.model.uri,
        served_name=service.served_name,
        device=engine.device,
        dtype=engine.dtype,
        block_size=engine.block_size,
        kv_cache_bytes=int(_amount(engine.kv_cache_memory)),
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_waiting=engine.max_num_waiting,
        enable_prefix_caching=engine.enable_prefix_caching,
        num_threads=cpu_threads(pool),
        kv_transfer=KVTransferConfig(lease_seconds=service.spec.transfer.lease_seconds),
    )


def check_engine(service: InferenceService) -> None:
    """Raise `SpecError` for values that are right one by one but not together."""
    try:
        engine_config(service, service.spec.prefill).check()
    except InvalidRequestError as exc:
        name = exc.param or "model"
        field = _FIELDS.get(name, f"spec.engine.{_camel(name)}")
        problem = str(exc).removeprefix(f"{name} ").replace("max_num_seqs", "maxNumSeqs")
        raise SpecError(field, problem) from exc


def cpu_threads(pool: Pool) -> int | None:
    """Whole CPUs that the pod's limit allows, at least one; None without a limit."""
    limit = pool.resources.limits.get("cpu")
    if limit is None:
        return None
    return max(1, math.floor(_amount(limit)))


def config_map(service: InferenceService, role: Role) -> dict[str, Any]:
    """The ConfigMap that one role's pods mount."""
    if role == "router":
        config = RouterConfig(model=service.spec.model.uri, served_name=service.served_name)
        files = {ROUTER_FILE: _json(config)}
    else:
        pool = service.spec.prefill if role == "prefill" else service.spec.decode
        files = {ENGINE_FILE: _json(engine_config(service, pool))}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": object_name(service, role),
            "namespace": service.metadata.namespace,
            "labels": labels(service, role),
        },
        "data": files,
    }


def config_hash(config: dict[str, Any]) -> str:
    """Changes exactly when the files of a ConfigMap change."""
    data = msgspec.json.encode(config["data"], order="sorted")
    return hashlib.sha256(data).hexdigest()[:16]


def secret(service: InferenceService, secrets: ServiceSecrets) -> dict[str, Any]:
    """The Secret with the CURVE pair that all pods of the service share."""
    files = {PUBLIC_KEY_FILE: secrets.curve.public, SECRET_KEY_FILE: secrets.curve.secret}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": object_name(service, "curve"),
            "namespace": service.metadata.namespace,
            "labels": labels(service, "curve"),
        },
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in files.items()},
    }


def _json(config: msgspec.Struct) -> str:
    """Indented JSON of what differs from the defaults, so that newer operators suit older engines.

    Compared by value: msgspec's own `omit_defaults` goes by identity, and a file that changed with
    the Python version would roll every pod.
    """
    return msgspec.json.format(msgspec.json.encode(_given(config)), indent=2).decode()


def _given(config: msgspec.Struct) -> dict[str, Any]:
    fields = msgspec.structs.fields(config)
    values = [(field, getattr(config, field.name)) for field in fields]
    return {
        field.name: _given(value) if isinstance(value, msgspec.Struct) else value
        for field, value in values
        if value != field.default
    }


def _amount(quantity: int | str) -> Decimal:
    """A Kubernetes quantity as a number."""
    text = str(quantity)
    unit = text.lstrip("0123456789.")
    return Decimal(text.removesuffix(unit)) * _UNITS.get(unit, 1)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
