"""How a pod gets its models: read in place, mounted, or fetched by an init container.

Credentials are mounted into that init container alone; one that serves requests never gets them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import quote

from diptych_operator.api.base import SpecError
from diptych_operator.api.engine import draft_uri
from diptych_operator.api.model import ModelCache, ModelCredentials
from diptych_operator.api.names import (
    CONFIG_DIR,
    DRAFT_MODEL_CONTAINER,
    DRAFT_MODEL_FIELD,
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
MOUNTED_DIR = "/var/lib/diptych"
"""Where mounted models appear; one that is fetched appears elsewhere."""
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
    draft_uri: str = ""
    """That of the model that guesses tokens; empty: there is none, or the spec has its path."""
    init_containers: list[dict[str, Any]] = field(default_factory=list)
    volumes: list[dict[str, Any]] = field(default_factory=list)
    volume_mounts: list[dict[str, Any]] = field(default_factory=list)
    """The volume mounts of the container in which the engine or the router runs."""
    folders: dict[str, str] = field(default_factory=dict)
    """Folders of these mounts that it reads, by variable."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A model that a pod reads."""

    name: str
    """That of its init container or volume."""
    field: str
    """The field of the service that names it."""
    uri: ModelUri
    credentials: ModelCredentials | None
    revision: str = ""
    sha256: str = ""


def model_mount(
    service: InferenceService, role: Role, *, cluster_has_image_volumes: bool
) -> ModelMount:
    """Return the mounts for a service that keeps `check_rules`.

    Raises `SpecError` for a model that this cluster cannot mount, naming a remedy.
    """
    model, draft = service.spec.model, draft_uri(service.spec.engine)
    uri = parse_model_uri(model.uri)
    own = _Wanted(
        MODEL_CONTAINER, "spec.model.uri", uri, model.credentials, model.revision, model.sha256
    )
    mount = _mount(service, role, own, cluster_has_image_volumes)
    if role == "router" or not draft:
        return mount
    there = parse_model_uri(draft)
    # No other place than that of the model learns its token.
    same_place = there.scheme == uri.scheme and (uri.scheme != "https" or there.host == uri.host)
    credentials = model.credentials if same_place else None
    wanted = _Wanted(DRAFT_MODEL_CONTAINER, DRAFT_MODEL_FIELD, there, credentials)
    other = _mount(service, role, wanted, cluster_has_image_volumes)
    return replace(
        mount,
        draft_uri=other.uri,
        init_containers=mount.init_containers + other.init_containers,
        volumes=_without_twins(mount.volumes + other.volumes),
        volume_mounts=_without_twins(mount.volume_mounts + other.volume_mounts),
    )


def _without_twins(named: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two models may have one cache."""
    return list({each["name"]: each for each in named}.values())


def _mount(
    service: InferenceService, role: Role, wanted: _Wanted, cluster_has_image_volumes: bool
) -> ModelMount:
    uri = wanted.uri
    if uri.is_fetched:
        return _fetched(service, role, wanted)
    if uri.scheme == "pvc":
        source = {"persistentVolumeClaim": {"claimName": uri.host, "readOnly": True}}
        return _mounted(wanted, source)
    if uri.scheme == "oci":
        if not cluster_has_image_volumes:
            raise SpecError(
                wanted.field,
                "oci:// needs a cluster with image volumes (Kubernetes 1.31 with the feature gate "
                "ImageVolume, which 1.35 has on); use hf://, s3:// or pvc://",
            )
        return _mounted(wanted, {"image": {"reference": uri.host, "pullPolicy": "IfNotPresent"}})
    return ModelMount(uri.text)


def _mounted(wanted: _Wanted, source: dict[str, Any]) -> ModelMount:
    folder = f"{MOUNTED_DIR}/{wanted.name}"
    path = f"{folder}/{wanted.uri.path}".rstrip("/")
    return ModelMount(
        _file_uri(path),
        volumes=[{"name": wanted.name, **source}],
        volume_mounts=[{"name": wanted.name, "mountPath": folder, "readOnly": True}],
    )


def _fetched(service: InferenceService, role: Role, wanted: _Wanted) -> ModelMount:
    model = service.spec.model
    reader: Reader = "router" if role == "router" else "engine"
    path = cached_path(wanted.uri, wanted.revision, wanted.sha256, reader)
    source = _cache_volume(model.cache, service.metadata.namespace, reader)
    volumes: list[dict[str, Any]] = [{"name": "model-cache", **source}]
    if wanted.credentials is not None:
        secret = {"secretName": wanted.credentials.secret_name, "defaultMode": 0o440}
        volumes.append({"name": "model-credentials", "secret": secret})
    return ModelMount(
        _file_uri(f"{MODEL_CACHE_DIR}/{path}"),
        init_containers=[_init_container(service, role, reader, wanted)],
        volumes=volumes,
        volume_mounts=[{"name": "model-cache", "mountPath": MODEL_CACHE_DIR, "readOnly": True}],
        folders=NODE_WEIGHTS if _packs(service, role, wanted) else {},
    )


def fetcher_image(service: InferenceService, role: Role) -> str:
    """Return the fetcher's image: the pod's own, unless that is another project's."""
    spec = service.spec
    ours = role != "router" and spec.engine.runtime == "diptych"
    return spec.engine.image if ours else spec.router.image


def _init_container(
    service: InferenceService, role: Role, reader: Reader, wanted: _Wanted
) -> dict[str, Any]:
    model = service.spec.model
    arguments = ["--uri", wanted.uri.text, "--for", reader, "--cache", MODEL_CACHE_DIR]
    cache = {"name": "model-cache", "mountPath": MODEL_CACHE_DIR}
    mounts: list[dict[str, Any]] = [
        cache | {"readOnly": True} if _read_only(model.cache) else cache,
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if wanted.revision:
        arguments += ["--revision", wanted.revision]
    if wanted.sha256:
        arguments += ["--sha256", wanted.sha256]
    if _on_node(model.cache, reader):
        arguments.append("--shared")
    if wanted.credentials is not None:
        arguments += ["--credentials", CREDENTIALS_DIR]
        mounts.append({"name": "model-credentials", "mountPath": CREDENTIALS_DIR, "readOnly": True})
    # The hub's client wants a home directory; the root file system is read-only.
    env = {"HF_HOME": "/tmp/huggingface"}
    if wanted.name == DRAFT_MODEL_CONTAINER:
        env["DIPTYCH_MODEL_FIELD"] = wanted.field
    if _packs(service, role, wanted):
        env |= NODE_WEIGHTS | {"DIPTYCH_KEYS_DIR": KEYS_DIR, "DIPTYCH_AFTER_FETCH": PACK_AHEAD}
        mounts += [
            {"name": name, "mountPath": path, "readOnly": True}
            for name, path in (("config", CONFIG_DIR), (KEYS_VOLUME, KEYS_DIR))
        ]
    return {
        "name": wanted.name,
        "image": fetcher_image(service, role),
        "command": ["python", "-m", "diptych_frontend.model_files.fetch"],
        # Kubernetes expands $(NAME); a doubled dollar is one.
        "args": [argument.replace("$(", "$$(") for argument in arguments],
        "env": [{"name": name, "value": value} for name, value in env.items()],
        **CONFINED,
        "volumeMounts": mounts,
        **resources_of(_resources(service, role), devices=False),
    }


def _packs(service: InferenceService, role: Role, wanted: _Wanted) -> bool:
    """Whether weights are packed for the engines of a node. A GPU packs into its own memory."""
    resources = _resources(service, role)
    return (
        role != "router"
        and wanted.name == MODEL_CONTAINER
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


def resources_of(resources: Resources, *, devices: bool = True) -> dict[str, Any]:
    """Return quantities as strings: older API servers take no bare numbers in server-side apply.

    devices: False for a container that copies files. With all else of the pod's main container,
    quotas and the QoS class stay the same.
    """
    given = {
        kind: {n: str(amount) for n, amount in amounts.items() if devices or n in _DIVISIBLE}
        for kind, amounts in (("limits", resources.limits), ("requests", resources.requests))
    }
    given = {kind: amounts for kind, amounts in given.items() if amounts}
    return {"resources": given} if given else {}


def _file_uri(path: str) -> str:
    return f"file://{quote(path)}"
