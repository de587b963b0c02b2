"""Limits that the administrator sets on services and routes, where users may not do everything.

The one table is `LIMITS`. The chart's ValidatingAdmissionPolicy is generated from its CEL
(`validations`). The operator checks each object by its Python (`check_limits`), for clusters
without such policies and for objects that are older than the policy. This module performs no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from diptych_operator.api.base import SpecError


class Allowed(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The chart's `limits.allow`. `*` in a list stands for anything."""

    host_paths: list[str] = []
    """Folders of nodes that volumes of podTemplates may mount, with everything below them."""
    cache_host_paths: list[str] = []
    """Folders that `spec.model.cache.hostPath` may name."""
    images: list[str] = []
    """Registries, folders of registries, or images, without a slash at the end."""
    service_accounts: list[str] = []
    secrets: list[str] = []
    """Secrets that podTemplates may name."""
    capabilities: list[str] = []
    credential_hosts: list[str] = []
    """Hosts to which `spec.model.credentials` of an https:// model may be sent."""
    hostnames: list[str] = []
    """Domains of which `spec.expose.gateway.hostname` may be one, or be below."""
    fields: list[str] = []
    """Paths, written as in `Limit.path`, of fields that podTemplates may set to anything."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One field of a spec, and the values that it may have without being listed."""

    path: str
    """The path in the spec, or in a podTemplate where `LIMITS` applies it to one. `[]` stands for
    each entry."""
    listed_in: str = "fields"
    """The list of `Allowed` that can permit the value. `fields` permits the path itself."""
    always: tuple[Any, ...] = ()
    """Values that need no listing."""
    never: tuple[Any, ...] = ()
    """If this names values, all other values need no listing."""
    after: tuple[str, ...] = ()
    """What may follow a listed value, such as the slash behind a folder. Empty: nothing."""
    below: str = ""
    """What may stand before a listed value, with anything before it. Empty: nothing."""
    scheme: str = ""
    """Only values that begin with this are checked, with it removed."""
    beside: str = ""
    """The limit applies only where this field is given too. A path in the spec."""
    of_keys: bool = False
    """The field is an object, and the names of its fields are checked."""
    needed_with: str = ""
    """Whoever gives this field must give the limited one too. A path, relative to where the limit
    applies."""


_SAFE_VOLUMES: Final = (
    "name", "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "hostPath", "image",
    "persistentVolumeClaim", "projected", "secret",
)  # fmt: skip
_REMOVABLE: Final = (
    *(f"spec.securityContext.{name}" for name in ("runAsUser", "runAsGroup", "fsGroup")),
    "spec.securityContext.fsGroupChangePolicy",
    "spec.topologySpreadConstraints",
)
_IMAGE: Final = ("/", ":", "@")
_PROFILES: Final = ("RuntimeDefault", "Localhost")
_NEVER_UNCONFINED: Final = (
    Limit("securityContext.runAsUser", never=(0,)),
    Limit("securityContext.runAsNonRoot", always=(True,)),
    Limit("securityContext.seccompProfile.type", always=_PROFILES),
    Limit("securityContext.appArmorProfile.type", always=_PROFILES),
    Limit("securityContext.seLinuxOptions"),
    Limit("securityContext.windowsOptions"),
)
"""What may stand at a pod and at a container."""

_PARTS: Final = ("prefill.", "decode.", "router.", "")
"""Where the spec of a service, and that of a route, has a podTemplate."""
SPEC_LIMITS: Final = (
    Limit("model.cache.hostPath", "cacheHostPaths"),
    Limit("model.uri", "images", after=_IMAGE, scheme="oci://"),
    Limit("engine.speculativeConfig.model", "images", after=_IMAGE, scheme="oci://"),
    Limit(
        "model.uri", "credentialHosts", after=("/",), scheme="https://", beside="model.credentials"
    ),
    Limit("engine.image", "images", always=("",), after=_IMAGE),
    Limit("prefill.engine.image", "images", always=("",), after=_IMAGE),
    Limit("router.image", "images", always=("",), after=_IMAGE),
    Limit("transfer.connectorImage", "images", always=("",), after=_IMAGE),
    Limit("image", "images", always=("",), after=_IMAGE),  # a route's
    *(Limit(f"{part}podTemplateRemove[]", always=_REMOVABLE) for part in _PARTS),
)  # fmt: skip
POD_LIMITS: Final = (
    *(Limit(name, always=(False,)) for name in ("hostNetwork", "hostPID", "hostIPC")),
    Limit("automountServiceAccountToken", always=(False,)),
    Limit("nodeName"),  # passes by the scheduler, and so by taints that keep a node for others
    Limit("priorityClassName", never=("system-cluster-critical", "system-node-critical")),
    Limit("serviceAccountName", "serviceAccounts"),
    Limit("serviceAccount", "serviceAccounts"),
    *_NEVER_UNCONFINED,
    Limit("securityContext.sysctls[]"),
    Limit("volumes[]", always=_SAFE_VOLUMES, of_keys=True),
    Limit("volumes[].hostPath.path", "hostPaths", after=("/",)),
    Limit("volumes[].image.reference", "images", after=_IMAGE),
    Limit("volumes[].secret.secretName", "secrets"),
    Limit("volumes[].csi.nodePublishSecretRef.name", "secrets"),
    Limit("volumes[].projected.sources[].secret.name", "secrets"),
    Limit("volumes[].projected.sources[].serviceAccountToken"),
    Limit("volumes[].projected.sources[].podCertificate"),
    Limit("ephemeralContainers"),
)
TEMPLATE_LIMITS: Final = tuple(
    # The older way to say what securityContext says.
    Limit("metadata.annotations", scheme=f"{name}.kubernetes.io/", of_keys=True)
    for name in ("container.apparmor.security.beta", "container.seccomp.security.alpha",
                 "seccomp.security.alpha")
)  # fmt: skip
CONTAINER_LIMITS: Final = (
    Limit("image", "images", after=_IMAGE),
    Limit("env[].valueFrom.secretKeyRef.name", "secrets"),
    Limit("envFrom[].secretRef.name", "secrets"),
    Limit("ports[].hostPort", always=(0,)),
    Limit("securityContext.privileged", always=(False,)),
    # Our own containers have these two; one that has an image may be somebody else's.
    Limit("securityContext.allowPrivilegeEscalation", always=(False,), needed_with="image"),
    Limit("securityContext.capabilities.drop", always=(["ALL"],), needed_with="image"),
    Limit("securityContext.capabilities.add[]", "capabilities"),
    Limit("securityContext.procMount", always=("Default",)),
    *_NEVER_UNCONFINED,
    # The kubelet of the node asks there.
    *(Limit(f"{probe}.{way}.host", always=("",))
      for probe in ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle.postStart",
                    "lifecycle.preStop")
      for way in ("httpGet", "tcpSocket")),
)  # fmt: skip
# Left out, it would be every name of the gateway. Who may not make routes gets one by the operator.
_HOSTNAME: Final = Limit("hostname", "hostnames", below=".", needed_with="name")
_TEMPLATES: Final = tuple(f"{part}podTemplate." for part in _PARTS)
_PODS: Final = tuple(f"{template}spec." for template in _TEMPLATES)
_CONTAINERS: Final = tuple(
    f"{pod}{kind}[]." for pod in _PODS for kind in ("containers", "initContainers")
)
LIMITS: Final = (
    *((limit, ("",)) for limit in SPEC_LIMITS),
    (_HOSTNAME, ("expose.gateway.",)),
    *((limit, _TEMPLATES) for limit in TEMPLATE_LIMITS),
    *((limit, _PODS) for limit in POD_LIMITS),
    *((limit, _CONTAINERS) for limit in CONTAINER_LIMITS),
)
"""Each limit, and the prefixes of its path wherever it applies."""


def _remedy(limit: Limit) -> str:
    entry = f"{limit.path} " if limit.listed_in == "fields" else ""
    without = "" if limit.needed_with else "leave it out, "
    return (
        f"is not allowed in this cluster; take another value, {without}or ask the "
        f"administrator to list {entry}in the chart's value limits.allow.{limit.listed_in}"
    )


# --- in Python ------------------------------------------------------------------------------------


def check_limits(spec: Mapping[str, Any], allowed: Allowed) -> None:
    """Raise `SpecError` for the first field of a spec that exceeds its limit."""
    lists: dict[str, list[str]] = msgspec.to_builtins(allowed)
    for limit, places in LIMITS:
        if limit.beside and not list(_values(spec, limit.beside)):
            continue
        for place in places:
            for where, value in _values(spec, place + limit.path):
                for each in value if limit.of_keys and isinstance(value, Mapping) else (value,):
                    if not _within(limit, each, lists[limit.listed_in]):
                        raise SpecError(f"spec.{where}", f"{each!r:.200} {_remedy(limit)}")
            for where, holder in _values(spec, place[:-1]) if limit.needed_with else ():
                given = [list(_values(holder, path)) for path in (limit.needed_with, limit.path)]
                lacks = given[0] and not given[1]
                if lacks and not _within(limit, None, lists[limit.listed_in]):
                    raise SpecError(f"spec.{where}.{limit.path}", f"left out {_remedy(limit)}")


def _values(holder: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each value that a path leads to, and its own path."""
    step, _, rest = path.partition(".")
    name = step.removesuffix("[]")
    if not isinstance(holder, Mapping) or holder.get(name) is None:
        return
    found = holder[name]
    entries = [(name, found)]
    if step != name:
        listed = found if isinstance(found, list) else []
        entries = [(f"{name}[{i}]", entry) for i, entry in enumerate(listed)]
    for where, value in entries:
        if rest:
            yield from ((f"{where}.{inner}", each) for inner, each in _values(value, rest))
        else:
            yield where, value


def _within(limit: Limit, value: Any, listed: list[str]) -> bool:
    if limit.listed_in == "fields":
        if limit.scheme and not str(value).startswith(limit.scheme):
            return True
        free = value not in limit.never if limit.never else value in limit.always
        return free or limit.path in listed or "*" in listed
    if value in limit.always or not str(value).startswith(limit.scheme):
        return True
    rest = str(value).removeprefix(limit.scheme)
    return any(
        entry in ("*", rest)
        or rest.startswith(tuple(entry + mark for mark in limit.after))
        or (limit.below and rest.endswith(limit.below + entry))
        for entry in listed
    )


# --- in CEL ---------------------------------------------------------------------------------------


def validations() -> list[dict[str, str]]:
    """Return the `validations` of the policy; each list of `Allowed` is a variable there."""
    found = []
    for limit, places in LIMITS:
        cel = " && ".join(
            _cel("object.spec", place + path, leaf)
            for place in places
            for path, leaf in _leaves(limit)
        )
        if limit.beside:
            holder, _, name = limit.beside.rpartition(".")
            cel = f"!has(object.spec.{holder}.{name}) || {cel}"
        inside = "podTemplate." if places is _TEMPLATES else "podTemplate.spec "
        shown = inside if len(places) > 1 else places[0]
        found.append({"expression": cel, "message": f"{shown}{limit.path}: {_remedy(limit)}"})
    return found


_Leaf = Callable[[str], str]
"""What has to be true of a value, given where it stands."""


def _leaves(limit: Limit) -> Iterator[tuple[str, _Leaf]]:
    """The fields that a limit is about, and what has to be true of each."""
    yield limit.path, partial(_cel_of_value, limit)
    if limit.needed_with:
        yield limit.needed_with, partial(_cel_of_need, limit)


def _cel(holder: str, path: str, leaf: _Leaf, depth: int = 0) -> str:
    step, _, rest = path.partition(".")
    name = step.removesuffix("[]")
    value = f"{holder}.{name}"
    entry = f"v{depth}" if step != name else value
    inner = _cel(entry, rest, leaf, depth + 1) if rest else leaf(entry)
    if step != name:
        inner = f"{value}.all({entry}, {inner})"
    return f"(!has({value}) || {inner})"


def _cel_of_need(limit: Limit, value: str) -> str:
    steps = [value.removesuffix(f".{limit.needed_with}"), *limit.path.split(".")]
    given = (f"has({'.'.join(steps[:end])})" for end in range(2, len(steps) + 1))
    return f"({' && '.join(given)} || {_cel_of_listed(limit)})"


def _cel_of_listed(limit: Limit) -> str:
    any_value = f"'*' in variables.{limit.listed_in}"
    listed = f"'{limit.path}' in variables.fields || "
    return f"{listed if limit.listed_in == 'fields' else ''}{any_value}"


def _cel_of_value(limit: Limit, value: str) -> str:
    if limit.of_keys:
        return f"{value}.all(k, {_cel_of_one(limit, 'k')})"
    return _cel_of_one(limit, value)


def _cel_of_one(limit: Limit, value: str) -> str:
    if limit.listed_in == "fields":
        free = f"!({value} in {_literal(limit.never)})"
        if not limit.never:
            free = f"{value} in {_literal(limit.always)}"
        if not (limit.never or limit.always):
            free = f"!{value}.startsWith('{limit.scheme}')" if limit.scheme else "false"
        return f"({free} || {_cel_of_listed(limit)})"
    listed = f"variables.{limit.listed_in}"
    others = [f"{value} in {_literal(limit.always)}"] if limit.always else []
    if limit.scheme:
        others.append(f"!{value}.startsWith('{limit.scheme}')")
    follows = (f"{value}.startsWith('{limit.scheme}' + e + '{mark}')" for mark in limit.after)
    above = [f"{value}.endsWith('{limit.below}' + e)"] if limit.below else []
    match = " || ".join(("e == '*'", f"{value} == '{limit.scheme}' + e", *follows, *above))
    return f"({' || '.join([*others, f'{listed}.exists(e, {match})'])})"


def _literal(values: tuple[Any, ...]) -> str:
    return msgspec.json.encode(values).decode()
