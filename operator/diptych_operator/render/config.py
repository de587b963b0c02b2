"""The configuration files inside the pods, and the ConfigMaps that carry them."""

from __future__ import annotations

import functools
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from diptych_operator.api.base import SpecPart, default_of, snake_case
from diptych_operator.api.engine import Engine, reasoning_parser
from diptych_operator.api.names import ENGINE_FILE, ROUTER_FILE, SERVING_FILE, metadata, object_name
from diptych_operator.api.pools import Pool, PoolName
from diptych_operator.api.service import InferenceService
from diptych_protocol import (
    Batches,
    EngineConfig,
    EngineSettings,
    KVTransferConfig,
    RouterConfig,
    RouterSettings,
    SamplingDefaults,
    Slo,
    SpeculativeConfig,
)
from diptych_protocol.router_settings import Serving
from diptych_protocol.threads import model_threads

S = TypeVar("S", Slo, SamplingDefaults, SpeculativeConfig)

_UNITS = {
    "Ki": Decimal(1 << 10), "Mi": Decimal(1 << 20), "Gi": Decimal(1 << 30), "Ti": Decimal(1 << 40),
    "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12),
}  # fmt: skip


def engine_config(
    service: InferenceService, pool: Pool, revision: str, model: str, draft_model: str = ""
) -> EngineConfig:
    """Return the configuration of one engine pod. `model` is where the pod finds it, `draft_model`
    where it finds that one if it is told by a URI.

    The pools differ in `num_threads` only.
    """
    engine = service.spec.engine
    memory, disk = engine.kv_cache_memory, engine.kv_cache_disk
    settings = {name: getattr(engine, name) for name in EngineSettings.__struct_fields__}
    if engine.speculative_config is not None:
        guesses = _fields_of(engine.speculative_config, SpeculativeConfig)
        guesses = msgspec.structs.replace(guesses, model=draft_model or guesses.model)
        settings["speculative_config"] = guesses
    return EngineConfig(
        model=model,
        served_name=service.served_name,
        kv_cache_bytes=None if memory == "auto" else int(_amount(memory)),
        kv_disk_bytes=0 if disk == "none" else int(_amount(disk)),
        num_threads=cpu_threads(pool, engine.tensor_parallel_size),
        kv_transfer=KVTransferConfig(lease_seconds=service.spec.transfer.lease_seconds),
        revision=revision,
        drain_seconds=service.spec.availability.drain_seconds,
        journey_events=True,  # `diptych trace` shows them
        **settings,
    )


def kept_volume(engine: Engine) -> tuple[str, dict[str, Any]]:
    """Return where KV outlives a container, and the volume: memory of the pod, within its limit."""
    memory = 1 << 30 if engine.kv_cache_memory == "auto" else int(_amount(engine.kv_cache_memory))
    with_seals = memory * engine.tensor_parallel_size * 17 // 16
    limit = f"{-(-with_seals >> 20)}Mi"
    return engine.kv_keep, {"emptyDir": {"medium": "Memory", "sizeLimit": limit}}


def cpu_threads(pool: Pool, ranks: int) -> int | None:
    """Return the threads of a rank by the pod's CPU limit; None: the engine decides."""
    limit = pool.resources.limits.get("cpu")
    return None if limit is None else model_threads(float(_amount(limit)), ranks)


def router_config(service: InferenceService, model: str) -> RouterConfig:
    """Return the configuration of a router pod. `model` is where the pod finds it."""
    router = service.spec.router
    settings = {name: getattr(router, name) for name in RouterSettings.__struct_fields__}
    settings |= {"policy": snake_case(router.policy), "allowed_hosts": _host_names(service)}
    return RouterConfig(
        model=model,
        served_name=service.served_name,
        verify=service.verification,
        cache_per_key=router.api_keys is not None and router.api_keys.cache_per_key,
        batches=_batches(service),
        drain_seconds=service.spec.availability.drain_seconds,
        lora_modules=service.spec.engine.lora_modules,
        reasoning_parser=reasoning_parser(service.spec.engine),
        tool_call_parser=service.spec.engine.tool_call_parser,
        json_schemas=service.spec.engine.json_schemas,
        otlp_traces_endpoint=service.spec.engine.otlp_traces_endpoint,
        slo=_fields_of(service.spec.slo, Slo),
        sampling=_fields_of(service.spec.model.sampling, SamplingDefaults),
        **settings,
    )


def _fields_of(part: SpecPart, kind: type[S]) -> S:
    """The configuration that a part of the spec is made of."""
    return kind(**{name: getattr(part, name) for name in kind.__struct_fields__})


def _host_names(service: InferenceService) -> list[str]:
    """What is asked for, and the one name of the cluster's DNS that somebody might register."""
    own = f"{object_name(service, 'router')}.{service.metadata.namespace}"
    gateway = service.spec.expose.gateway
    asked = [] if gateway is None or gateway.hostname[:1] in ("", "*") else [gateway.hostname]
    return [own, *asked, *service.spec.router.allowed_hosts]


def _batches(service: InferenceService) -> Batches:
    asked = service.spec.router.batches
    if asked is None:
        return Batches()
    return Batches(max_bytes=int(_amount(asked.size)), concurrency=asked.concurrency)


def engine_config_map(
    service: InferenceService, role: PoolName, revision: str, model: str, draft_model: str
) -> dict[str, Any]:
    """Return the ConfigMap of one pool of one revision."""
    config = engine_config(service, service.pools[role], revision, model, draft_model)
    return config_map(metadata(service, role, role, revision), {ENGINE_FILE: _json(config)})


def router_config_map(service: InferenceService, model: str) -> dict[str, Any]:
    """Return the ConfigMap of the routers."""
    files = {ROUTER_FILE: _json(router_config(service, model))}
    return config_map(metadata(service, "router", "router"), files)


def serving_config_map(service: InferenceService, serving: Serving) -> dict[str, Any]:
    """Return the ConfigMap that routers read while they run: which revisions may serve."""
    always = ("revisions", "asleep")
    told = msgspec.structs.asdict(serving)
    said = {name: value for name, value in told.items() if value or name in always}
    files = {SERVING_FILE: msgspec.json.encode(said).decode()}
    return config_map(metadata(service, "serving", "router"), files)


def config_map(meta: dict[str, Any], files: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": files}


def _json(config: msgspec.Struct) -> str:
    """Indented JSON of what differs from the defaults, so that newer operators suit older engines.

    Compared by value: msgspec's own `omit_defaults` goes by identity, and a file that changed with
    the Python version would roll every pod.
    """
    return msgspec.json.format(msgspec.json.encode(_given(config)), indent=2).decode()


def _given(config: msgspec.Struct) -> dict[str, Any]:
    """What differs from the defaults: the text is for people to read, and hashed."""
    values = [(field, getattr(config, field.name)) for field in _fields(type(config))]
    return {
        field.name: _given(value) if isinstance(value, msgspec.Struct) else value
        for field, value in values
        if value != default_of(field)
    }


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return a struct's fields. To read its annotations anew took half the time of rendering."""
    return msgspec.structs.fields(kind)


def _amount(quantity: int | str) -> Decimal:
    """A Kubernetes quantity as a number."""
    text = str(quantity)
    unit = text.lstrip("0123456789.")
    return Decimal(text.removesuffix(unit)) * _UNITS.get(unit, 1)
