"""Keeps the children of services as rendered: applies what changed, repairs what drifted.

An object is applied when its rendering changed, or when it is no longer the object that the last
apply left: its `generation` moved (kinds that have one), or else its resourceVersion. So a cluster
at rest costs no request, and the fields of other managers are never compared with ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych_operator.api_types import API_VERSION, KIND, InferenceService
from diptych_operator.kube import ApiError, Kube

Raw = Mapping[str, Any]
ChildId = tuple[str, str, str]
"""Namespace, kind, name."""


class NotOursError(Exception):
    """An object of the name we need exists and belongs to somebody else."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(
            f"{kind} {name} exists and does not belong to this service; delete it, or give the "
            "service another name"
        )


@dataclass(frozen=True, slots=True)
class _Applied:
    rendering: str
    version: str
    """Of the live object after our apply; see `_version`."""


class Children:
    """Applies and deletes; remembers what it left behind."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._applied: dict[ChildId, _Applied] = {}

    def is_news(self, owned: Raw) -> bool:
        """Whether this rendering was never applied by this process."""
        known = self._applied.get(child_id(owned))
        return known is None or known.rendering != _digest(owned)

    async def apply_all(
        self,
        service: InferenceService,
        objects: Iterable[dict[str, Any]],
        live: Mapping[ChildId, Raw],
    ) -> int:
        """Make the objects so. How many had to be applied.

        Raises `ApiError` for the first that is refused, `NotOursError`.
        """
        count = 0
        for obj in objects:
            owned = with_owner(obj, service)
            name = child_id(owned)
            rendering = _digest(owned)
            known, now = self._applied.get(name), live.get(name)
            if now is not None and known == _Applied(rendering, _version(now)):
                continue
            if now is None:
                await self._check_free(owned, service)
            self._applied[name] = _Applied(rendering, _version(await self._kube.apply(owned)))
            count += 1
        return count

    async def _check_free(self, obj: Raw, service: InferenceService) -> None:
        """What carries our label is watched; another object of the same name would not be seen."""
        meta = obj["metadata"]
        there = await self._kube.get(
            obj["apiVersion"], obj["kind"], meta["namespace"], meta["name"]
        )
        if there is not None and not belongs_to(there, service):
            raise NotOursError(obj["kind"], meta["name"])

    async def delete(self, service: InferenceService, victims: Iterable[Raw]) -> None:
        """Delete those that belong to the service; others are left alone."""
        for obj in victims:
            if belongs_to(obj, service):
                meta = obj["metadata"]
                self._applied.pop(child_id(obj), None)
                await self._kube.delete(
                    obj["apiVersion"], obj["kind"], meta["namespace"], meta["name"], meta["uid"]
                )

    async def scale(self, deployment: Raw, replicas: int) -> None:
        """Change nothing of a Deployment but its number of pods."""
        meta = deployment["metadata"]
        try:
            await self._kube.merge(
                "apps/v1", "Deployment", meta["namespace"], meta["name"],
                {"spec": {"replicas": replicas}},
            )  # fmt: skip
        except ApiError as exc:
            if exc.status != 404:
                raise

    def forget(self, namespace: str, service_name: str) -> None:
        """The service is gone; its children follow it by their owner references."""
        prefix = f"{service_name}-"
        for name in [c for c in self._applied if c[0] == namespace and c[2].startswith(prefix)]:
            del self._applied[name]


def with_owner(obj: dict[str, Any], service: InferenceService) -> dict[str, Any]:
    """The object with the service as its controller: it goes when the service goes."""
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": service.metadata.name,
        "uid": service.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return obj | {"metadata": obj["metadata"] | {"ownerReferences": [owner]}}


def belongs_to(obj: Raw, service: InferenceService) -> bool:
    """Whether the service, and not a namesake of it, controls the object."""
    owners = obj["metadata"].get("ownerReferences") or []
    return any(o.get("controller") and o.get("uid") == service.metadata.uid for o in owners)


def child_id(obj: Raw) -> ChildId:
    meta = obj["metadata"]
    return meta["namespace"], obj["kind"], meta["name"]


def _version(obj: Raw) -> str:
    """Changes when somebody changes what we set; status alone does not count where it can."""
    meta = obj["metadata"]
    return f"{meta['uid']}/{meta.get('generation') or meta['resourceVersion']}"


def _digest(obj: Raw) -> str:
    return hashlib.sha256(msgspec.json.encode(obj, order="sorted")).hexdigest()
