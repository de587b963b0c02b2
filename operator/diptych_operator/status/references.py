"""Finds the Secrets and ConfigMaps that a pod refers to, and the remedy for a missing one.

A node waits for a volume without a word in the pod's status, so the operator checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from diptych_operator.api.base import Raw
from diptych_operator.api.names import KEYS_VOLUME, Owner
from diptych_operator.api.service import InferenceService


class Reference(NamedTuple):
    """An object in the pod's namespace."""

    kind: str
    name: str


def references(spec: Raw, *, pulls: bool = False) -> frozenset[Reference]:
    """Return what a pod with this spec needs, whoever added it.

    pulls: the node has to get an image and does not. Else no pod waits for a registry's password.
    """
    passwords = spec.get("imagePullSecrets") or () if pulls else ()
    found = {Reference("Secret", each.get("name", "")) for each in passwords}
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for entry in container.get("env") or ():
            source = entry.get("valueFrom") or {}
            found |= set(_named(source, "secretKeyRef", "configMapKeyRef"))
        for entry in container.get("envFrom") or ():
            found |= set(_named(entry, "secretRef", "configMapRef"))
    for volume in spec.get("volumes") or ():
        projected = (volume.get("projected") or {}).get("sources") or ()
        for source in (volume, *projected):
            found |= set(_named(source, "secret", "configMap"))
    return frozenset(reference for reference in found if reference.name)


def key_secrets(spec: Raw) -> frozenset[str]:
    """Return the names of the Secrets whose keys a pod with this spec has, if they are there."""
    found = set()
    for volume in spec.get("volumes") or ():
        if volume.get("name") == KEYS_VOLUME:
            for source in (volume, *((volume.get("projected") or {}).get("sources") or ())):
                named = source.get("secret") or {}
                found.add(named.get("secretName") or named.get("name") or "")
    return frozenset(found - {""})


def _named(source: Raw, secret: str, config_map: str) -> Iterator[Reference]:
    for kind, field in (("Secret", secret), ("ConfigMap", config_map)):
        named = source.get(field) or {}
        if not named.get("optional"):
            yield Reference(kind, named.get("name") or named.get("secretName") or "")


def remedy(service: Owner, reference: Reference) -> str:
    """Return the remedy for a missing object."""
    fields = list(_fields(service, reference)) or ["the podTemplate (or the chart's podDefaults)"]
    namespace = service.metadata.namespace
    return (
        f'Create the {reference.kind} "{reference.name}" in the namespace {namespace}, or correct '
        f"{' and '.join(fields)}."
    )


def _fields(service: Owner, reference: Reference) -> Iterable[str]:
    named: dict[str, Any]
    if isinstance(service, InferenceService):
        spec = service.spec
        named = {
            "spec.model.credentials": spec.model.credentials,
            "spec.router.tls": spec.router.tls,
            "spec.router.apiKeys": spec.router.api_keys,
        }
    else:
        named = {"spec.tls": service.spec.tls, "spec.apiKeys": service.spec.api_keys}
    for field, owner in named.items():
        if owner is not None and reference == ("Secret", owner.secret_name):
            yield field
