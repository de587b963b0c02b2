"""The pods of a service whose engines are vLLM: stock images, told by arguments and variables.

How vLLM speaks to routers, and our connector, are no part of its image. An init container copies
them into a volume, from which `PYTHONPATH` gives them to vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from diptych_operator.api.names import (
    BIND_HOST_VARIABLE,
    CONNECTOR_CONTAINER,
    CONNECTOR_DIR,
    KEYS_DIR,
    KEYS_LABEL,
    PORT_VARIABLES,
    engine_ports,
)
from diptych_operator.api.pools import PoolName
from diptych_operator.api.service import InferenceService
from diptych_operator.render.deployment import (
    LINGER_SECONDS,
    Pods,
    container_ports,
    deployment,
    engine_environment,
    probe,
    variable,
)
from diptych_operator.render.keys import KeySets, hinge_keys_volume
from diptych_operator.render.model import CONFINED, ModelMount, resources_of

VLLM_COMMAND = ["vllm", "serve"]
HOME_DIR = "/home/vllm"
"""The home directory of stock images' own user. What vLLM compiles is kept below it."""
SHARED_MEMORY_OF_A_RANK_GIB = 2
"""Most of /dev/shm, in which the processes of an engine pass messages to each other."""

_VARIABLES = {
    # The image may know no user of the pod's id: these two say what libraries ask of one.
    "HOME": HOME_DIR,
    "USER": "vllm",
    "VLLM_CACHE_ROOT": f"{HOME_DIR}/.cache/vllm",
    "VLLM_HOST_IP": "$(POD_IP)",
    # vLLM tells decode engines this address as it is.
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "$(POD_IP)",
    # The model is a folder in the pod; nothing is to be looked up elsewhere, and nothing told.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_MIDDLEWARE: Final = "--middleware=diptych_vllm.serve.middleware.Wire"
"""How vLLM speaks to routers. vLLM adds it to the middleware of the service's own arguments."""
_COPY_DIR: Final = "/var/lib/diptych/connector"
"""Where the init container has the volume that is to be filled."""
_NIXL_ROLES: Final[Mapping[PoolName, str]] = {"prefill": "kv_producer", "decode": "kv_consumer"}
_KV_PORT: Final = f"$({PORT_VARIABLES['kv']})"
_PROBES: dict[str, Any] = {
    # An hour to load and compile; until then neither of the others is asked. A rollout gives up
    # after its progressDeadlineSeconds in any case.
    "startupProbe": probe("/health", period_s=5, timeout_s=5, failures=720),
    "readinessProbe": probe("/health", period_s=5, timeout_s=5, failures=3),
    # Says no when the core has died; vLLM then mostly ends by itself. A busy one may answer late.
    "livenessProbe": probe("/health", period_s=10, timeout_s=10, failures=6),
}


def vllm_objects(
    service: InferenceService,
    role: PoolName,
    revision: str,
    replicas: int,
    keys: KeySets,
    model: ModelMount,
) -> list[dict[str, Any]]:
    """One pool of one revision. Raises `SpecError` for a podTemplate that does not fit."""
    pool, engine = service.pools[role], service.engine_of(role)
    ports, brought = engine_ports(service), _is_brought(service, role)
    folder = unquote(urlsplit(model.uri).path)  # to the program in a pod, every URI is a file://
    variables = _VARIABLES | {"DIPTYCH_REVISION": revision}
    if brought:
        variables = variables | {"PYTHONPATH": CONNECTOR_DIR}
    container = {
        "name": "engine",
        "image": engine.image,
        "command": VLLM_COMMAND,
        "args": [
            *map(_as_it_is, (folder, *engine.args)),
            *_arguments(service, engine.tensor_parallel_size),
            *_handoff(service, role, revision),
        ],
        "env": [
            *engine_environment(ports, {"DIPTYCH_KEYS_DIR": KEYS_DIR}),
            *(variable(name, value) for name, value in variables.items()),
        ],
        "ports": container_ports(ports),
        **_PROBES,
        **resources_of(pool.resources),
    }
    shared_memory = f"{SHARED_MEMORY_OF_A_RANK_GIB * engine.tensor_parallel_size}Gi"
    scratch: dict[str, tuple[str, dict[str, Any]]] = {
        "home": (HOME_DIR, {"emptyDir": {}}),
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}}),
    }
    pods = Pods(
        role,
        pool,
        replicas,
        container,
        [hinge_keys_volume(service, keys.current)],
        "",
        model,
        revision,
        LINGER_SECONDS,
        scratch=scratch,
        init_containers=[_copy(service, role)] if brought else [],
        read_only={CONNECTOR_CONTAINER: (CONNECTOR_DIR, {"emptyDir": {}})} if brought else {},
    )
    made = deployment(service, pods)
    made["metadata"]["labels"][KEYS_LABEL] = keys.current
    return [made]


def _arguments(service: InferenceService, ranks: int) -> Iterator[str]:
    """What the operator decides: `OWNED_ARGUMENTS` keeps services from giving it otherwise. Of an
    argument that is there twice, vLLM takes the last."""
    yield f"--host=$({BIND_HOST_VARIABLE})"
    yield f"--port=$({PORT_VARIABLES['http']})"
    yield from ("--served-model-name", _as_it_is(service.served_name))
    yield f"--tensor-parallel-size={ranks}"
    yield f"--shutdown-timeout={service.spec.availability.drain_seconds}"
    # Events name the tokens of prompts, so they stay in the pod. On a laptop pods share /tmp, and
    # have ports of their own.
    place = f"ipc:///tmp/diptych-$({PORT_VARIABLES['core']})"
    yield (
        '--kv-events-config={"enable_kv_cache_events":true,"publisher":"zmq",'
        f'"endpoint":"{place}.events","replay_endpoint":"{place}.replay"}}'
    )
    yield _MIDDLEWARE


def _handoff(service: InferenceService, pool: PoolName, revision: str) -> list[str]:
    """How engines hand KV over; nothing in a service of one pool."""
    match service.connector:
        case "none":
            return []
        case "nixl":
            return [_transfer_config(_nixl(service, pool))]
        case "diptych":
            return [_transfer_config(_diptych(service, revision))]


def _nixl(service: InferenceService, pool: PoolName) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": _NIXL_ROLES[pool],
        "kv_connector_extra_config": {"kv_lease_duration": int(service.lease_seconds)},
    }


def _diptych(service: InferenceService, revision: str) -> dict[str, Any]:
    return {
        "kv_connector": "DiptychConnector",
        "kv_connector_module_path": "diptych_vllm.connector",
        # What an engine does is decided for each request.
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "listen_host": f"$({BIND_HOST_VARIABLE})",
            "listen_port": _KV_PORT,
            "advertise_host": "$(POD_IP)",
            "lease_seconds": service.lease_seconds,
            "keys": "$(DIPTYCH_KEYS_DIR)",
            "revision": revision,
        },
    }


def _transfer_config(config: dict[str, Any]) -> str:
    # A request whose KV did not come fails: computing it anew would hide that nothing is handed
    # over. `kv_buffer_device` is left to vLLM, which takes the device that it runs on.
    whole = config | {"kv_load_failure_policy": "fail"}
    text = json.dumps(whole, separators=(",", ":")).replace(f'"{_KV_PORT}"', _KV_PORT)
    return f"--kv-transfer-config={text}"


def _is_brought(service: InferenceService, pool: PoolName) -> bool:
    """What vLLM lacks is copied into the pod: its image does not have it."""
    return service.spec.transfer.connector_image != service.engine_of(pool).image


def _copy(service: InferenceService, pool: PoolName) -> dict[str, Any]:
    return {
        "name": CONNECTOR_CONTAINER,
        "image": service.spec.transfer.connector_image,
        "command": ["cp", "--recursive", "--no-target-directory", CONNECTOR_DIR, _COPY_DIR],
        **CONFINED,
        "volumeMounts": [{"name": CONNECTOR_CONTAINER, "mountPath": _COPY_DIR}],
        **resources_of(service.pools[pool].resources, devices=False),
    }


def _as_it_is(text: str) -> str:
    """Kubernetes expands $(NAME); a doubled dollar is one."""
    return text.replace("$", "$$")
