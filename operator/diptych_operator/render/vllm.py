"""The pods of a service whose engines are vLLM: stock images, told by arguments and variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from diptych_operator.api.names import KEYS_LABEL, PORT_VARIABLES, engine_ports
from diptych_operator.api.pools import PoolName
from diptych_operator.api.service import InferenceService
from diptych_operator.render.deployment import (
    Pods,
    container_ports,
    deployment,
    environment,
    resources_of,
    variable,
)
from diptych_operator.render.keys import KeySets
from diptych_operator.render.model import ModelMount
from diptych_operator.render.vllm_handoff import handoff
from diptych_protocol.config import SERVED_REVISION

VLLM_COMMAND = ["vllm", "serve"]
HOME_DIR = "/home/vllm"
"""The home directory of stock images' own user. What vLLM compiles is kept below it."""
LINGER_SECONDS = 7
"""Clusters' DNS may keep a pod that is to go for 5 s, and routers ask each second. After SIGTERM
vLLM takes no new request, so that comes when nobody sends one any more."""
SHARED_MEMORY_OF_A_RANK_GIB = 2
"""Most of /dev/shm, in which the processes of an engine pass messages to each other."""

_VARIABLES = {
    # The image may know no user of the pod's id: these two say what libraries ask of one.
    "HOME": HOME_DIR,
    "USER": "vllm",
    "VLLM_CACHE_ROOT": f"{HOME_DIR}/.cache/vllm",
    "VLLM_HOST_IP": "$(POD_IP)",
    # The model is a folder in the pod; nothing is to be looked up elsewhere, and nothing told.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_HEALTH = {"path": "/health", "port": "http"}
_PROBES: dict[str, Any] = {
    # An hour to load and compile; until then neither of the others is asked. A rollout gives up
    # after its progressDeadlineSeconds in any case.
    "startupProbe": {
        "httpGet": _HEALTH, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 720,
    },
    "readinessProbe": {
        "httpGet": _HEALTH, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3,
    },
    # Says no when the core has died; vLLM then mostly ends by itself. A busy one may answer late.
    "livenessProbe": {
        "httpGet": _HEALTH, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6,
    },
}  # fmt: skip


def vllm_objects(
    service: InferenceService,
    role: PoolName,
    revision: str,
    replicas: int,
    keys: KeySets,
    model: ModelMount,
) -> list[dict[str, Any]]:
    """One pool of one revision. Of the service's `keys` only our connector in vLLM knows.

    Raises `SpecError` for a podTemplate that does not fit.
    """
    pool, engine = service.pools[role], service.engine_of(role)
    ports, told = engine_ports(service), handoff(service, role, revision, keys)
    container = {
        "name": "engine",
        "image": engine.image,
        "command": VLLM_COMMAND,
        "args": [
            *map(_as_it_is, (_path(model.uri), *engine.args)),
            *_arguments(service, engine.tensor_parallel_size, revision),
            *told.arguments,
        ],
        "env": [
            *environment(ports, {}),
            *(variable(name, value) for name, value in {**_VARIABLES, **told.variables}.items()),
        ],
        "ports": container_ports(ports),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LINGER_SECONDS)]}}},
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
        list(told.keys),
        "",
        model,
        revision,
        LINGER_SECONDS,
        scratch=scratch,
        init_containers=told.init_containers,
        read_only=told.read_only,
    )
    made = deployment(service, pods)
    if told.keys:
        made["metadata"]["labels"][KEYS_LABEL] = keys.current
    return [made]


def _arguments(service: InferenceService, ranks: int, revision: str) -> Iterator[str]:
    """What the operator decides: `OWNED_ARGUMENTS` keeps services from giving it otherwise. Of an
    argument that is there twice, vLLM takes the last."""
    yield "--host=$(DIPTYCH_BIND_HOST)"
    yield "--port=$(DIPTYCH_HTTP_PORT)"
    yield from ("--served-model-name", _as_it_is(service.served_name))
    yield f"{SERVED_REVISION}{revision}"
    yield f"--tensor-parallel-size={ranks}"
    yield f"--shutdown-timeout={service.spec.availability.drain_seconds}"
    yield "--enable-scale-out"
    yield f"--kv-events-config={_events(engine_ports(service))}"


def _events(ports: Mapping[str, int]) -> str:
    """Routers ask vLLM for the ports, so it may choose those that are not given."""
    events, replay = (
        f"tcp://*:$({PORT_VARIABLES[name]})" if name in ports else "tcp://*:0"
        for name in ("events", "replay")
    )
    return (
        '{"enable_kv_cache_events":true,"publisher":"zmq",'
        f'"endpoint":"{events}","replay_endpoint":"{replay}"}}'
    )


def _path(uri: str) -> str:
    """What a `file://` URI names; every model is one to the program in a pod."""
    return unquote(urlsplit(uri).path)


def _as_it_is(text: str) -> str:
    """Kubernetes expands $(NAME); a doubled dollar is one."""
    return text.replace("$", "$$")
