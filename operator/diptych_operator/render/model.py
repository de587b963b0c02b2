"""How a pod gets its model: read in place, mounted, or fetched by an init container.

Credentials are mounted into that init container alone; one that serves requests never gets them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from diptych_operator.api.base import SpecError
from diptych_operator.api.model import ModelCache
from diptych_operator.api.names import (
    CONFIG_DIR,
    ENGINE_FILE,
    KEYS_DIR,
    KEYS_VOLUME,
    MODEL_CONTAINER,
    Role,
)
from diptych_operator.api.pools import Resources
from diptych_operator.api.service import InferenceService
from diptych_protocol.model_uri import ModelUri, Reader, cached_path, parse_model_uri

MODEL_CACHE_DIR = "/var/cache/diptych/models"
MODEL_DIR = "/var/lib/diptych/model"
"""Where a mounted model appears; one that is fetched appears elsewhere."""
CREDENTIALS_DIR = "/etc/diptych/credentials"
NODE_WEIGHTS = {"DIPTYCH_NODE_WEIGHTS": f"{MODEL_CACHE_DIR}/.packed"}
"""Where the init container packs weights for all engines of the service on its node."""
PACK_AHEAD = f"diptych_engine.serving.pack_ahead --config {CONFIG_DIR}/{ENGINE_FILE}"

CONFINED: Final[dict[str, Any]] = {
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    },
    # A program that fails says why in its last line; status shows it.
    "terminationMessagePolicy": "FallbackToLogsOnError",
}
"""The security context of each container."""

_DIVISIBLE = ("cpu", "memory", "ephemeral-storage")
"""The resources that a container which only copies files can have; devices are not among them."""


@dataclass(frozen=True, slots=True)
class ModelMount:
    """What one role's pods need in order to read the model."""

    uri: str
    """The model's address in the pod, for EngineConfig or RouterConfig."""
    init_containers: list[dict[str, Any]] = field(default_factory=list)
    volumes: list[dict[str, Any]] = field(default_factory=list)
    volume_mounts: list[dict[str, Any]] = field(default_factory=list)
    """The volume mounts of the container in which the engine or the router runs."""
    folders: dict[str, str] = field(default_factory=dict)
    """Folders of these mounts that it reads, by variable."""


def model_mount(
    service: InferenceService, role: Role, *, cluster_has_image_volumes: bool
) -> ModelMount:
    """Return the mounts for a service that keeps `check_rules`.

    Raises `SpecError` for a model that this cluster cannot mount, naming a remedy.
    """
    uri = parse_model_uri(service.spec.model.uri)
    if uri.is_fetched:
        return _fetched(service, role, uri)
    if uri.scheme == "pvc":
        source = {"persistentVolumeClaim": {"claimName": uri.host, "readOnly": True}}
        return _mounted(uri, source)
    if uri.scheme == "oci":
        if not cluster_has_image_volumes:
            raise SpecError(
                "spec.model.uri",
                "oci:// needs a cluster with image volumes (Kubernetes 1.31 with the feature gate "
                "ImageVolume, which 1.35 has on); use hf://, s3:// or pvc://",
            )
        return _mounted(uri, {"image": {"reference": uri.host, "pullPolicy": "IfNotPresent"}})
    return ModelMount(uri.text)


def _mounted(uri: ModelUri, source: dict[str, Any]) -> ModelMount:
    path = f"{MODEL_DIR}/{uri.path}".rstrip("/")
    return ModelMount(
        _file_uri(path),
        volumes=[{"name": "model", **source}],
        volume_mounts=[{"name": "model", "mountPath": MODEL_DIR, "readOnly": True}],
    )


def _fetched(service: InferenceService, role: Role, uri: ModelUri) -> ModelMount:
    model = service.spec.model
    reader: Reader = "router" if role == "router" else "engine"
    path = cached_path(uri, model.revision, model.sha256, reader)
    source = _cache_volume(model.cache, service.metadata.namespace, reader)
    volumes: list[dict[str, Any]] = [{"name": "model-cache", **source}]
    if model.credentials is not None:
        secret = {"secretName": model.credentials.secret_name, "defaultMode": 0o440}
        volumes.append({"name": "model-credentials", "secret": secret})
    return ModelMount(
        _file_uri(f"{MODEL_CACHE_DIR}/{path}"),
        init_containers=[_init_container(service, role, reader)],
        volumes=volumes,
        volume_mounts=[{"name": "model-cache", "mountPath": MODEL_CACHE_DIR, "readOnly": True}],
        folders=NODE_WEIGHTS if _packs(service, role) else {},
    )


def fetcher_image(service: InferenceService, role: Role) -> str:
    """Return the fetcher's image: the pod's own, unless that is another project's."""
    spec = service.spec
    ours = role != "router" and spec.engine.runtime == "diptych"
    return spec.engine.image if ours else spec.router.image


def _init_container(service: InferenceService, role: Role, reader: Reader) -> dict[str, Any]:
    model = service.spec.model
    arguments = ["--uri", model.uri, "--for", reader, "--cache", MODEL_CACHE_DIR]
    cache = {"name": "model-cache", "mountPath": MODEL_CACHE_DIR}
    mounts: list[dict[str, Any]] = [
        cache | {"readOnly": True} if _read_only(model.cache) else cache,
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if model.revision:
        arguments += ["--revision", model.revision]
    if model.sha256:
        arguments += ["--sha256", model.sha256]
    if _on_node(model.cache, reader):
        arguments.append("--shared")
    if model.credentials is not None:
        arguments += ["--credentials", CREDENTIALS_DIR]
        mounts.append({"name": "model-credentials", "mountPath": CREDENTIALS_DIR, "readOnly": True})
    # The hub's client wants a home directory; the root file system is read-only.
    env = {"HF_HOME": "/tmp/huggingface"}
    if _packs(service, role):
        env |= NODE_WEIGHTS | {"DIPTYCH_KEYS_DIR": KEYS_DIR, "DIPTYCH_AFTER_FETCH": PACK_AHEAD}
        mounts += [
            {"name": name, "mountPath": path, "readOnly": True}
            for name, path in (("config", CONFIG_DIR), (KEYS_VOLUME, KEYS_DIR))
        ]
    return {
        "name": MODEL_CONTAINER,
        "image": fetcher_image(service, role),
        "command": ["python", "-m", "diptych_frontend.model_files.fetch"],
        # Kubernetes expands $(NAME); a doubled dollar is one.
        "args": [argument.replace("$(", "$$(") for argument in arguments],
        "env": [{"name": name, "value": value} for name, value in env.items()],
        **CONFINED,
        "volumeMounts": mounts,
        **without_devices(_resources(service, role)),
    }


def _packs(service: InferenceService, role: Role) -> bool:
    """Whether weights are packed for the engines of a node. A GPU packs into its own memory."""
    resources = _resources(service, role)
    return (
        role != "router"
        and service.spec.engine.runtime == "diptych"
        and service.spec.model.cache.host_path is not None
        and not {*resources.limits, *resources.requests} - set(_DIVISIBLE)
    )


def _resources(service: InferenceService, role: Role) -> Resources:
    return (service.spec.router if role == "router" else service.pools[role]).resources


def _on_node(cache: ModelCache, reader: Reader) -> bool:
    """Whether the cache is the node's. A router has its own copy of the little that it reads: what
    it takes of a GGUF file, no checksum covers."""
    return cache.host_path is not None and reader == "engine"


def _cache_volume(cache: ModelCache, namespace: str, reader: Reader) -> dict[str, Any]:
    """A node's cache has a folder for each namespace: pods of all namespaces are the same user, so
    in one folder each could write what the others read."""
    if cache.pvc is not None:
        claim: dict[str, Any] = {"claimName": cache.pvc.claim_name}
        if cache.pvc.read_only:
            claim["readOnly"] = True
        return {"persistentVolumeClaim": claim}
    if _on_node(cache, reader):
        path = f"{cache.host_path}/{namespace}"
        return {"hostPath": {"path": path, "type": "DirectoryOrCreate"}}
    return {"emptyDir": {"sizeLimit": cache.ephemeral} if cache.ephemeral else {}}


def _read_only(cache: ModelCache) -> bool:
    return cache.pvc is not None and cache.pvc.read_only


def without_devices(resources: Resources) -> dict[str, Any]:
    """Return the resources of the pod's main container without devices, for a container that copies
    files. So quotas and the QoS class stay the same."""
    given = {
        kind: {name: str(amount) for name, amount in amounts.items() if name in _DIVISIBLE}
        for kind, amounts in (("limits", resources.limits), ("requests", resources.requests))
    }
    given = {kind: amounts for kind, amounts in given.items() if amounts}
    return {"resources": given} if given else {}


def _file_uri(path: str) -> str:
    return f"file://{quote(path)}"
