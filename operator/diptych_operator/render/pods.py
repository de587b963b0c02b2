"""The pods of our own programs: engines, with their configuration, and routers."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

from diptych_operator.api.base import digest
from diptych_operator.api.names import (
    API_KEYS_DIR,
    BATCHES_DIR,
    BATCHES_VOLUME,
    CONFIG_DIR,
    CURRENT_KEYS_ANNOTATION,
    ENGINE_FILE,
    KEYS_DIR,
    KEYS_LABEL,
    LINGER_VARIABLE,
    PORT_VARIABLES,
    PREVIOUS_KEYS_ANNOTATION,
    ROUTER_FILE,
    SERVING_DIR,
    SERVING_FILE,
    TLS_DIR,
    TLS_VOLUME,
    dns_target,
    engine_ports,
    object_name,
    router_ports,
)
from diptych_operator.api.pools import PoolName
from diptych_operator.api.route import RouteSpec
from diptych_operator.api.router import Batches, Router
from diptych_operator.api.service import InferenceService
from diptych_operator.render.config import engine_config_map, kept_volume
from diptych_operator.render.deployment import (
    LINGER_SECONDS,
    Pods,
    container_ports,
    deployment,
    engine_environment,
    environment,
    probe,
    variable,
)
from diptych_operator.render.keys import KeySets, keys_volume
from diptych_operator.render.model import ModelMount, resources_of

UCX_TLS = {
    "rdma": "ib,self,cuda_copy,gdr_copy",
    "tcp": "tcp,self,cuda_copy",
    # Shared memory cannot open a connection by address, so TCP stays for the handshake.
    "shm": "shm,tcp,self,cuda_copy,cuda_ipc",
}

FOLDERS = {"DIPTYCH_CONFIG_DIR": CONFIG_DIR, "DIPTYCH_KEYS_DIR": KEYS_DIR}
"""The folders of our own programs' mounts, by variable."""

_ENGINE_COMMAND = ["python", "-m", "diptych_engine"]
_ENGINE_ARGUMENTS = [
    *("--config", f"$(DIPTYCH_CONFIG_DIR)/{ENGINE_FILE}"),
    *("--keys", "$(DIPTYCH_KEYS_DIR)"),
    *("--engine-id", "$(POD_NAME)"),
    *("--node", "$(NODE_NAME)"),
    *("--zone", "$(NODE_ZONE)"),
    *("--host", "$(DIPTYCH_BIND_HOST)"),
    *("--advertise-host", "$(POD_IP)"),
    *("--port", "$(DIPTYCH_HTTP_PORT)"),
    *("--admin-port", "$(DIPTYCH_ADMIN_PORT)"),
    *("--core-port", "$(DIPTYCH_CORE_PORT)"),
    *("--kv-port", "$(DIPTYCH_KV_PORT)"),
]
_ENGINE_API_ARGUMENTS = ["--api-port", "$(DIPTYCH_API_PORT)"]
_ROUTER_COMMAND = ["python", "-m", "diptych_router"]
_ROUTER_ARGUMENTS = [
    *("--config", f"$(DIPTYCH_CONFIG_DIR)/{ROUTER_FILE}"),
    *("--keys", "$(DIPTYCH_KEYS_DIR)"),
    *("--host", "$(DIPTYCH_BIND_HOST)"),
    *("--port", "$(DIPTYCH_HTTP_PORT)"),
    *("--admin-port", "$(DIPTYCH_ADMIN_PORT)"),
    *("--serving", f"{SERVING_DIR}/{SERVING_FILE}"),
    *("--linger-seconds", f"$({LINGER_VARIABLE})"),
]
_PICKER_ARGUMENTS = (
    *("--picker-port", f"$({PORT_VARIABLES['picker']})"),
    *("--advertise-host", "$(POD_IP)"),
)
_TARGETS: dict[PoolName, str] = {
    "prefill": "DIPTYCH_PREFILL_TARGETS",
    "decode": "DIPTYCH_DECODE_TARGETS",
}
"""The variable that tells routers where the engines of a pool are."""
SCHEME_ANNOTATION = {"prometheus.io/scheme": "https"}
"""Tells scrapers the scheme. The chart's PodMonitor and most others read this annotation."""

_ENGINE_PROBES: dict[str, Any] = {
    # Ten minutes to load weights; until then neither of the others is asked.
    "startupProbe": probe("/health", period_s=1, timeout_s=2, failures=600),
    # A program that a starved node keeps waiting is ready all the same: taking it out of service
    # would hand its load to pods that are starved too. Routers notice by themselves who is dead.
    "readinessProbe": probe("/health", period_s=5, timeout_s=10, failures=3),
    # Says no to a dead or stalled core only, never to a busy one.
    "livenessProbe": probe("/live", period_s=10, timeout_s=10, failures=6),
}
ROUTER_PROBES: dict[str, Any] = {
    # Starting takes a second on a quiet node and half a minute on one that starts six pods at once.
    "startupProbe": probe("/live", period_s=1, timeout_s=2, failures=180),
    # One that says no leaves soon, one that says nothing late: where all are starved, nobody would
    # be left, and connections would be refused.
    "readinessProbe": probe("/health", period_s=2, timeout_s=10, failures=3),
    # /health of a router also speaks of its pools, and no restart of a router heals a pool.
    "livenessProbe": probe("/live", period_s=10, timeout_s=10, failures=6),
}


def engine_objects(
    service: InferenceService,
    role: PoolName,
    revision: str,
    replicas: int,
    keys: KeySets,
    model: ModelMount,
) -> list[dict[str, Any]]:
    """Return the objects of one pool of one revision: its configuration and its pods.

    Raises `SpecError` for a podTemplate that does not fit.
    """
    pool = service.pools[role]
    transport = service.spec.transfer.transport
    ports = engine_ports(service)
    variables = [
        *engine_environment(ports, FOLDERS | model.folders),
        *([variable("UCX_TLS", UCX_TLS[transport])] if transport in UCX_TLS else []),
    ]
    container = {
        "name": "engine",
        "image": service.spec.engine.image,
        "command": _ENGINE_COMMAND,
        "args": [*_ENGINE_ARGUMENTS, *(_ENGINE_API_ARGUMENTS if "api" in ports else [])],
        "env": variables,
        "ports": container_ports(ports),
        **_ENGINE_PROBES,
        **resources_of(pool.resources),
    }
    config = engine_config_map(service, role, revision, model.uri, model.draft_uri)
    volumes = [
        _config_volume("config", object_name(service, role, revision)),
        keys_volume(service, KeySets(keys.current)),
    ]
    pods = Pods(role, pool, replicas, container, volumes, digest(config["data"]), model, revision)
    if service.spec.engine.kv_keep:
        pods = replace(pods, scratch={"kept-kv": kept_volume(service.spec.engine)})
    made = deployment(service, pods)
    made["metadata"]["labels"][KEYS_LABEL] = keys.current
    return [config, made]


def router_deployment(
    service: InferenceService,
    replicas: int,
    keys: KeySets,
    config: dict[str, Any],
    model: ModelMount,
) -> dict[str, Any]:
    """Return the Deployment of the routers; `config` is their ConfigMap.

    Raises `SpecError` for a podTemplate that does not fit.
    """
    router, ports = service.spec.router, router_ports(service)
    variables = [
        *environment(ports, FOLDERS),
        variable(LINGER_VARIABLE, str(LINGER_SECONDS)),
        *(variable(_TARGETS[role], dns_target(service, role)) for role in service.pools),
    ]
    container = {
        "name": "router",
        "image": router.image,
        "command": _ROUTER_COMMAND,
        "args": [
            *_ROUTER_ARGUMENTS,
            *chain.from_iterable((f"--{role}", f"$({_TARGETS[role]})") for role in service.pools),
            *door_arguments(router),
            *(("--batch-directory", BATCHES_DIR) if router.batches is not None else ()),
            *(_PICKER_ARGUMENTS if "picker" in ports else ()),
        ],
        "env": variables,
        "ports": container_ports(ports),
        **door_probes(router),
        **resources_of(router.resources),
    }
    volumes = [
        _config_volume("config", object_name(service, "router")),
        keys_volume(service, keys),
        _config_volume("serving", object_name(service, "serving")),
        *door_volumes(router),
    ]
    pods = Pods("router", router, replicas, container, volumes, digest(config["data"]), model)
    if router.tls is not None:
        pods = replace(pods, annotations=SCHEME_ANNOTATION)
    if router.batches is not None:
        pods = replace(pods, scratch={BATCHES_VOLUME: (BATCHES_DIR, _batch_volume(router.batches))})
    made = deployment(service, pods)
    made["metadata"]["annotations"] = {
        CURRENT_KEYS_ANNOTATION: keys.current,
        PREVIOUS_KEYS_ANNOTATION: keys.previous,
    }
    return made


def _batch_volume(batches: Batches) -> dict[str, Any]:
    if batches.pvc is None:
        return {"emptyDir": {}}
    return {"persistentVolumeClaim": {"claimName": batches.pvc.claim_name}}


# --- who may use the API of a router or a route -----------------------------------------------


def door_arguments(part: Router | RouteSpec) -> list[str]:
    keys = ["--api-keys", API_KEYS_DIR] if part.api_keys is not None else []
    return [*keys, *(["--tls", TLS_DIR] if part.tls is not None else [])]


def door_volumes(part: Router | RouteSpec) -> list[dict[str, Any]]:
    return [
        {"name": name, "secret": {"secretName": source.secret_name, "defaultMode": 0o440}}
        for name, source in (("api-keys", part.api_keys), (TLS_VOLUME, part.tls))
        if source is not None
    ]


def door_probes(part: Router | RouteSpec) -> dict[str, Any]:
    """The kubelet takes any certificate."""
    scheme = {} if part.tls is None else {"scheme": "HTTPS"}
    return {
        kind: {**probe, "httpGet": {**probe["httpGet"], **scheme}}
        for kind, probe in ROUTER_PROBES.items()
    }


def _config_volume(name: str, config_map: str) -> dict[str, Any]:
    return {"name": name, "configMap": {"name": config_map}}
