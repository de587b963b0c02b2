"""Turns rendered Kubernetes objects into plans for processes on one machine. It performs no I/O.

Only this differs from a cluster:

- every container port becomes a free port of 127.0.0.1, in the environment and in probes, and
  neighbours stay neighbours; only the API of routers may listen elsewhere;
- a Service's `name.namespace.svc:port` becomes the list of loopback addresses of its pods;
- mounted ConfigMaps and Secrets are folders of the run directory, and so are the volume that has
  our connector for vLLM and that of files and batches, which all routers share; other volumes are
  left out, and with them the variables that name places in them;
- the first container of a pod runs as a process of the user, with the user's environment below its
  own; init containers, sidecars, resources, security contexts and liveness probes are left out;
- an engine without a CPU limit gets threads by what it does: the prefill engines share them all
  between them, because computing a prompt is arithmetic; a decode engine gets its share of all
  engines, because decoding waits for memory and gains little from a second core.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from diptych.laptop.pod_spec import (
    Container,
    PodSpec,
    Probe,
    UnsupportedPodError,
    Variable,
    Volume,
    container_of,
    spec_of,
)
from diptych_operator.api.names import (
    BATCHES_VOLUME,
    BIND_HOST_VARIABLE,
    COMPONENT_LABEL,
    CONNECTOR_CONTAINER,
    ENGINE_FILE,
    LINGER_VARIABLE,
    PORT_VARIABLES,
    ROLE_LABEL,
    SERVICE_LABEL,
    ZONE_LABEL,
)
from diptych_operator.kube.workloads import deployments_among
from diptych_protocol import EngineConfig

LOOPBACK = "127.0.0.1"
PACKAGES_FOLDER = "packages"
"""A folder of the run directory, with the packages that are copied into pods of vLLM."""
NODE_NAME = "localhost"
NO_PROGRAMS: Mapping[str, str] = MappingProxyType({})
Object = dict[str, Any]
_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")
_PORT_OF_VARIABLE = {variable: port for port, variable in PORT_VARIABLES.items()}


def reached_at(host: str) -> str:
    """Return the host in URLs for a program on this machine that listens at `host`."""
    if host in ("0.0.0.0", "::"):
        return LOOPBACK
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """An `httpGet` probe against a local port."""

    port: int
    path: str
    period_s: float
    timeout_s: float
    failure_threshold: int
    scheme: str = "http"
    host: str = LOOPBACK

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}{self.path}"

    @property
    def patience_s(self) -> float:
        """How long it may fail in a row."""
        return self.failure_threshold * self.period_s


DECODE_NICENESS = 10
"""The niceness of decode engines, so that prefill goes first where both want a core. First tokens
come sooner, and decoding loses little, because it mostly waits for memory. This is for our own
engine, which leaves its cores when it has nothing to do. NIXL's threads in vLLM never do, so a vLLM
decode server with a higher niceness would hardly run."""


@dataclass(frozen=True, slots=True)
class LocalPod:
    """One pod as a process: how to start it, and how to check its health."""

    name: str
    role: str
    command: tuple[str, ...]
    env: dict[str, str]
    """The container's own variables, expanded. They override the user's environment."""
    ports: dict[str, int]
    """The local port for each named container port."""
    startup: HttpProbe | None
    readiness: HttpProbe | None
    grace_s: float
    """Seconds between SIGTERM and SIGKILL."""
    niceness: int
    """The process's niceness, relative to other pods on the same cores."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A replica of a Deployment with its local ports, before its environment is known."""

    name: str
    namespace: str
    labels: dict[str, str]
    spec: PodSpec
    container: Container
    ports: dict[str, int]
    host: str
    """The address at which its API listens."""

    @property
    def role(self) -> str:
        return self.labels.get(ROLE_LABEL, "")

    def port(self, name: int | str) -> int:
        if name not in self.ports:
            raise UnsupportedPodError(
                f"{self.name}: no port of the container is named {name!r}; correct its podTemplate"
            )
        return self.ports[name]


def port_runs(objects: Iterable[Object]) -> list[int]:
    """Return the lengths of the runs of adjacent ports that `local_pods` will take. Raises
    `UnsupportedPodError`."""
    return [
        len(run)
        for deployment in deployments_among(objects)
        for run in _runs(container_of(deployment)) * deployment["spec"]["replicas"]
    ]


def local_pods(
    objects: Sequence[Object],
    run_dir: Path,
    free_ports: Sequence[int],
    router_port: int,
    router_host: str = LOOPBACK,
    programs: Mapping[str, str] = NO_PROGRAMS,
) -> list[LocalPod]:
    """Return every pod of every Deployment.

    `free_ports` holds the runs of `port_runs(objects)`, one after the other. The first router takes
    `router_port`, and all routers' APIs listen at `router_host`. `programs`: paths of programs that
    an image would have. Raises `UnsupportedPodError` naming pod and field.
    """
    placed = _place(objects, free_ports, router_port, router_host)
    targets = _targets(objects, placed)
    return [_local_pod(pod, run_dir, targets, programs) for pod in placed]


def files(objects: Sequence[Object], threads: int) -> dict[str, bytes]:
    """Return the contents of all ConfigMaps and Secrets by their path below the run directory.

    `threads` are shared out to the engines without a CPU limit.
    """
    replicas = {
        deployment["spec"]["template"]["metadata"]["labels"].get(ROLE_LABEL): deployment["spec"][
            "replicas"
        ]
        for deployment in deployments_among(objects)
    }
    prefill, decode = replicas.get("prefill", 0), replicas.get("decode", 0)
    result: dict[str, bytes] = {}
    for config in _of_kind(objects, "ConfigMap"):
        role = config["metadata"]["labels"][COMPONENT_LABEL]
        sharers = prefill if role == "prefill" else prefill + decode
        for file, text in config["data"].items():
            content = text.encode()
            if file == ENGINE_FILE:
                content = _with_threads(content, max(1, threads // max(1, sharers)))
            result[f"configmaps/{config['metadata']['name']}/{file}"] = content
    for secret in _of_kind(objects, "Secret"):
        for file, encoded in secret["data"].items():
            result[f"secrets/{secret['metadata']['name']}/{file}"] = base64.b64decode(encoded)
    return result


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand variables as Kubernetes does: `$(NAME)` if NAME is known; `$$` is one `$`."""

    def replacement(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return _REFERENCE.sub(replacement, text)


def _place(
    objects: Sequence[Object], free_ports: Sequence[int], router_port: int, router_host: str
) -> list[_Placed]:
    ports = iter(free_ports)
    front_door_taken = False
    placed: list[_Placed] = []
    for deployment in deployments_among(objects):
        template = deployment["spec"]["template"]
        labels, container = template["metadata"]["labels"], container_of(deployment)
        spec = spec_of(deployment)
        for index in range(deployment["spec"]["replicas"]):
            own = {name: next(ports) for run in _runs(container) for name in run}
            if labels.get(ROLE_LABEL) == "router" and not front_door_taken:
                own["http"] = router_port
                front_door_taken = True
            namespace = deployment["metadata"]["namespace"]
            # Here is one revision only, so no name needs to tell it.
            name = f"{labels[SERVICE_LABEL]}-{labels[ROLE_LABEL]}-{index}"
            host = router_host if labels.get(ROLE_LABEL) == "router" else LOOPBACK
            placed.append(_Placed(name, namespace, labels, spec, container, own, host))
    return placed


def _targets(objects: Sequence[Object], placed: Sequence[_Placed]) -> dict[str, str]:
    """What each `name.namespace.svc:port` stands for: the pods its Service selects."""
    targets: dict[str, str] = {}
    for service in _of_kind(objects, "Service"):
        selector = service["spec"]["selector"].items()
        chosen = [pod for pod in placed if selector <= pod.labels.items()]
        host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
        for port in service["spec"]["ports"]:
            targets[f"{host}:{port['port']}"] = ",".join(
                f"{LOOPBACK}:{pod.port(port['targetPort'])}" for pod in chosen
            )
    return targets


def _local_pod(
    pod: _Placed, run_dir: Path, targets: Mapping[str, str], programs: Mapping[str, str]
) -> LocalPod:
    container = pod.container
    folders = _mounted_folders(pod, run_dir)
    missing = {mount.mount_path for mount in container.volume_mounts} - folders.keys()

    def localised(text: str) -> str:
        for mount, folder in folders.items():
            if text == mount or text.startswith(f"{mount}/"):
                return str(folder) + text.removeprefix(mount)
        return targets.get(text, text)

    env: dict[str, str] = {}
    for variable in container.env:
        value = _value(pod, variable)
        if not any(value == mount or value.startswith(f"{mount}/") for mount in missing):
            env[variable.name] = expand(localised(value), env)
    command = [*container.command, *container.args]
    if pod.host != LOOPBACK:
        command += ["--admin-host", LOOPBACK]
    if not container.command:
        raise UnsupportedPodError(f"{pod.name}: command is missing; images do not run on a laptop")
    of_an_image = command[0] in programs
    return LocalPod(
        name=pod.name,
        role=pod.role,
        command=(
            programs.get(command[0], command[0]),
            *(localised(expand(part, env)) for part in command[1:]),
        ),
        env=env,
        ports=pod.ports,
        startup=_probe(pod, "startupProbe", container.startup_probe),
        readiness=_probe(pod, "readinessProbe", container.readiness_probe),
        grace_s=pod.spec.termination_grace_period_seconds,
        niceness=DECODE_NICENESS if pod.role == "decode" and not of_an_image else 0,
    )


def _value(pod: _Placed, variable: Variable) -> str:
    name = variable.name
    if name == BIND_HOST_VARIABLE:
        return pod.host
    if name == LINGER_VARIABLE:
        return "0"  # nobody but the user sends requests here, and the user said stop
    if name in _PORT_OF_VARIABLE:
        return str(pod.port(_PORT_OF_VARIABLE[name]))
    if variable.value_from is None:
        return variable.value
    fields: dict[str, str] = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "status.podIP": LOOPBACK,
        "spec.nodeName": NODE_NAME,
        f"metadata.labels['{ZONE_LABEL}']": "",
    }
    path = variable.value_from.field_ref.field_path
    if path not in fields:
        raise UnsupportedPodError(
            f"{pod.name}: env {name}: a laptop knows only fieldRef of {', '.join(fields)}"
        )
    return fields[path]


def _mounted_folders(pod: _Placed, run_dir: Path) -> dict[str, Path]:
    volumes = {volume.name: volume for volume in pod.spec.volumes}
    folders: dict[str, Path] = {}
    for mount in pod.container.volume_mounts:
        volume = volumes.get(mount.name, Volume(mount.name))
        if volume.config_map is not None:
            folders[mount.mount_path] = run_dir / "configmaps" / volume.config_map.name
        elif volume.secret is not None:
            folders[mount.mount_path] = run_dir / "secrets" / volume.secret.secret_name
        elif mount.name == CONNECTOR_CONTAINER:
            folders[mount.mount_path] = run_dir / PACKAGES_FOLDER
        elif mount.name == BATCHES_VOLUME:
            folders[mount.mount_path] = run_dir / BATCHES_VOLUME
    return folders


def _probe(pod: _Placed, kind: str, probe: Probe | None) -> HttpProbe | None:
    if probe is None:
        return None
    asked = probe.http_get
    if asked is None:
        raise UnsupportedPodError(f"{pod.name}: {kind}: a laptop knows only httpGet")
    numbers: dict[int | str, str] = {
        number: name for name, number in pod.container.port_names.items()
    }
    return HttpProbe(
        port=pod.port(numbers.get(asked.port, asked.port)),
        path=asked.path,
        period_s=probe.period_seconds,
        timeout_s=probe.timeout_seconds,
        failure_threshold=probe.failure_threshold,
        scheme=asked.scheme.lower(),
        host=reached_at(pod.host),
    )


def _with_threads(engine_json: bytes, threads: int) -> bytes:
    config = msgspec.json.decode(engine_json, type=EngineConfig)
    if config.num_threads is None:
        config = msgspec.structs.replace(config, num_threads=threads)
    return msgspec.json.encode(config)


def _runs(container: Container) -> list[list[str]]:
    """Names of ports, those with neighbouring numbers together: a program may be told the first."""
    runs: list[list[str]] = []
    before = -1
    for number, name in sorted((number, name) for name, number in container.port_names.items()):
        if number != before + 1:
            runs.append([])
        runs[-1].append(name)
        before = number
    return runs


def _of_kind(objects: Iterable[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]
