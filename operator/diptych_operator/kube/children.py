"""Keeps the children of services as rendered: applies changes and repairs drift.

An object is applied when its rendering changed, or when it is no longer the object that the last
apply left: its `generation` moved (for kinds that have one) or else its resourceVersion, or it
lacks labels, annotations or the owner that we gave it, which no generation counts. So a cluster at
rest costs no request, and the fields of other managers are never compared with ours.

An operator that takes over reads what another one applied, and applies only what it would render
otherwise, as `APPLIED_ANNOTATION` says, or what somebody has changed since.

A refused object is not sent again for a while: passes are frequent while somebody mends it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diptych_operator.api.base import Raw, digest
from diptych_operator.api.names import APPLIED_ANNOTATION, COMPONENT_LABEL, Owner, labels
from diptych_operator.api.pools import Counts
from diptych_operator.api.scaler import SCALER_KIND
from diptych_operator.api.service import API_VERSION
from diptych_operator.kube.client import ApiError, Kube, differences, name_of, tolerating
from diptych_operator.kube.cluster import SET_KIND
from diptych_operator.kube.workloads import WORKLOADS, as_deployments, resized, sizes

ChildId = tuple[str, str, str]
"""Namespace, kind, name."""

REFUSAL_S = 15.0
"""How long a refusal is remembered. Its cause may have gone without our seeing it."""


class NotOursError(Exception):
    """Somebody else owns an object with the name that we need."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(
            f"{kind} {name} exists and does not belong to this service; delete it, or give the "
            "service another name"
        )


@dataclass(frozen=True, slots=True)
class _Applied:
    rendering: str
    uid: str
    version: str
    """The live object's generation or resourceVersion after our apply, see `_version`."""


@dataclass(frozen=True, slots=True)
class _Refused:
    rendering: str
    error: ApiError | NotOursError
    until: float
    """Until when the refusal is remembered, by the monotonic clock."""


class Children:
    """Applies and deletes objects, and remembers the state after its last apply."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._applied: dict[ChildId, _Applied] = {}
        self._refused: dict[ChildId, _Refused] = {}

    async def adopt(self, service: Owner, live: Iterable[Raw]) -> None:
        """Make the service the owner of its orphans, of any revision. Raises `ApiError`."""
        for raw in live:
            # There is no right to change a PoolScaler; see `scalers`.
            if raw["kind"] != SCALER_KIND and is_orphan_of(raw, service):
                await adopt_orphan(self._kube, raw, service)

    async def try_out(
        self, service: Owner, objects: Iterable[dict[str, Any]], live: Mapping[ChildId, Raw]
    ) -> None:
        """Ask the API server to check, in a dry run, objects that were never applied in this form.

        Raises `ApiError` for the first that is refused, `NotOursError`.
        """
        stamped = [_stamped(obj, service) for obj in objects]
        for owned in stamped:  # while one stays refused, the others need not be sent either
            for form in _tried_as(owned):
                self._raise_if_refused(form)
        for owned in stamped:
            await self._recall(owned, live.get(child_id(owned)))
            known = self._applied.get(child_id(owned))
            if known is None or known.rendering != _stamp(owned):
                await self._check_free(owned, service, live)
                for form in _tried_as(owned):
                    await self._send(form, live.get(child_id(form)), dry_run=True)

    async def apply_all(
        self, service: Owner, objects: Iterable[dict[str, Any]], live: Mapping[ChildId, Raw]
    ) -> bool:
        """Apply those objects that are not in the cluster as they were rendered.

        Returns true if `live` does not yet show the new state of a workload. Raises `ApiError`
        for the first that is refused, `NotOursError`.
        """
        lags = False
        for obj in objects:
            owned = _stamped(obj, service)
            name = child_id(owned)
            now = live.get(name)
            await self._recall(owned, now)
            if now is None or self._applied.get(name) != _left(owned, now) or _lacks(now, owned):
                await self._check_free(owned, service, live)
                self._applied[name] = _left(owned, await self._send(owned, now))
            if owned["kind"] in WORKLOADS:
                lags |= now is None or self._applied[name].version != _version(now)
        return lags

    async def _recall(self, owned: Raw, now: Raw | None) -> None:
        """Remember an apply of the operator before this one, if nobody has changed the object."""
        name = child_id(owned)
        if now is None or name in self._applied or _lacks(now, owned):
            return
        live = await self._kube.get(*name_of(owned), in_turn=True)
        ours = {part: value for part, value in owned.items() if part != "metadata"}
        if live is not None and not _lacks(live, owned) and not any(differences(ours, live)):
            self._applied[name] = _left(owned, live)

    async def _send(self, owned: Raw, now: Raw | None, *, dry_run: bool = False) -> Raw:
        self._raise_if_refused(owned)
        try:
            try:
                return await self._kube.apply(owned, dry_run=dry_run)
            except ApiError as exc:
                if now is None or exc.status != 422 or "spec" not in owned:
                    raise
                return await self._overwrite(owned, dry_run=dry_run)
        except ApiError as exc:
            exc.kind = owned["kind"]
            exc.component = owned["metadata"].get("labels", {}).get(COMPONENT_LABEL, "")
            if exc.is_refusal:
                self._remember(owned, exc)
            raise

    async def _overwrite(self, owned: Raw, *, dry_run: bool) -> Raw:
        """Replace lists whole. Apply merges them, and an entry that somebody changed may now stand
        beside ours and contradict it: two ports of one name, say."""
        patch = {"spec": owned["spec"]}
        merged = await self._kube.merge(*name_of(owned), patch, dry_run=dry_run)
        return merged if dry_run else await self._kube.apply(owned)

    async def _check_free(self, owned: Raw, service: Owner, live: Mapping[ChildId, Raw]) -> None:
        """Make sure that nobody else's object has this name: only labelled ones are watched."""
        now, known = live.get(child_id(owned)), self._applied.get(child_id(owned))
        if now is not None:
            made_by_us = known is not None and known.uid == now["metadata"]["uid"]
            if not (made_by_us or belongs_to(now, service) or is_orphan_of(now, service)):
                raise NotOursError(owned["kind"], now["metadata"]["name"])
            return
        self._raise_if_refused(owned)
        there = await self._kube.get(*name_of(owned))
        if there is not None and not (belongs_to(there, service) or is_orphan_of(there, service)):
            error = NotOursError(owned["kind"], owned["metadata"]["name"])
            self._remember(owned, error)
            raise error

    def _remember(self, owned: Raw, error: ApiError | NotOursError) -> None:
        until = time.monotonic() + REFUSAL_S
        self._refused[child_id(owned)] = _Refused(_stamp(owned), error, until)

    def _raise_if_refused(self, owned: Raw) -> None:
        refused = self._refused.get(child_id(owned))
        if refused is None:
            return
        if refused.rendering == _stamp(owned) and time.monotonic() < refused.until:
            raise refused.error.with_traceback(None)  # or it would grow with each time
        del self._refused[child_id(owned)]

    async def delete(self, service: Owner, victims: Iterable[Raw]) -> None:
        """Delete those objects that belong to the service; leave others alone."""
        for obj in victims:
            if belongs_to(obj, service):
                self._applied.pop(child_id(obj), None)
                await self._kube.delete(*name_of(obj), obj["metadata"]["uid"])

    async def scale(self, workload: Raw, counts: Counts) -> None:
        """Change only the numbers of pods, where they are others."""
        wanted = {role: counts.of(role) for role in sizes(workload)}
        if wanted == sizes(workload):
            return
        with tolerating(404):
            if workload["kind"] == SET_KIND:
                await self._kube.edit(*name_of(workload), resized(workload, counts))
                return
            (replicas,) = wanted.values()
            await self._kube.merge(*name_of(workload), {"spec": {"replicas": replicas}})

    def forget(self, namespace: str, service_name: str) -> None:
        """Forget a deleted service. Kubernetes deletes its children by their owner references."""
        prefix = f"{service_name}-"
        for memory in (self._applied, self._refused):
            for name in [c for c in memory if c[0] == namespace and c[2].startswith(prefix)]:
                memory.pop(name)


def with_owner(obj: dict[str, Any], service: Owner) -> dict[str, Any]:
    """Return the object with the service as its controller, so that both end together."""
    return obj | {"metadata": obj["metadata"] | {"ownerReferences": [owner_of(service)]}}


def owner_of(service: Owner) -> dict[str, Any]:
    """Return the reference by which a child names the service as its controller."""
    return {
        "apiVersion": API_VERSION,
        "kind": service.kind,
        "name": service.metadata.name,
        "uid": service.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def belongs_to(obj: Raw, service: Owner) -> bool:
    """Whether this service, and not an earlier one of the same name, controls the object."""
    owners = obj["metadata"].get("ownerReferences") or []
    return any(o.get("controller") and o.get("uid") == service.metadata.uid for o in owners)


def is_orphan_of(obj: Raw, service: Owner) -> bool:
    """Whether nobody owns the object, and it has the labels of this service's children.

    `kubectl delete --cascade=orphan` and backups leave such objects. An object that names any owner
    is no orphan: if that owner is gone, Kubernetes deletes the object.
    """
    meta = obj["metadata"]
    found = meta.get("labels") or {}
    given = labels(service, found.get(COMPONENT_LABEL, ""))
    unowned = not meta.get("ownerReferences") and "deletionTimestamp" not in meta
    return unowned and found.items() >= given.items()


async def adopt_orphan(kube: Kube, orphan: Raw, service: Owner) -> None:
    """Make the service the owner, unless somebody has changed the object since it was read, perhaps
    by giving it another owner. Raises `ApiError`."""
    meta = orphan["metadata"]
    seen = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
    patch = {"metadata": {**seen, "ownerReferences": [owner_of(service)]}}
    with tolerating(404, 409):
        await kube.merge(*name_of(orphan), patch)


def child_id(obj: Raw) -> ChildId:
    meta = obj["metadata"]
    return meta["namespace"], obj["kind"], meta["name"]


def _tried_as(owned: Raw) -> list[Raw]:
    """What is sent in a dry run: API servers know what pods may hold only of their own kinds."""
    return [owned] if owned["kind"] == "Deployment" else [*as_deployments(owned), owned]


def _left(owned: Raw, live: Raw) -> _Applied:
    """What to remember of an apply after which the live object is this one."""
    return _Applied(_stamp(owned), live["metadata"]["uid"], _version(live))


def _version(obj: Raw) -> str:
    """A version that changes when somebody changes what we set. For kinds with a generation, a
    change of the status alone does not count."""
    meta = obj["metadata"]
    return str(meta.get("generation") or meta["resourceVersion"])


def _lacks(live: Raw, owned: Raw) -> bool:
    """Whether a label, an annotation or the owner that we gave an object is missing or differs."""
    found, given = live["metadata"], owned["metadata"]
    owners = {(o.get("uid"), o.get("controller")) for o in found.get("ownerReferences") or []}
    return any((o["uid"], o["controller"]) not in owners for o in given["ownerReferences"]) or any(
        (found.get(part) or {}).get(name) != value
        for part in ("labels", "annotations")
        for name, value in (given.get(part) or {}).items()
    )


def _stamped(obj: dict[str, Any], service: Owner) -> Raw:
    """The object as it is applied: with its owner, and a digest of all that."""
    owned = with_owner(obj, service)
    meta = owned["metadata"]
    notes = (meta.get("annotations") or {}) | {APPLIED_ANNOTATION: digest(owned)}
    return owned | {"metadata": meta | {"annotations": notes}}


def _stamp(owned: Raw) -> str:
    return str(owned["metadata"]["annotations"][APPLIED_ANNOTATION])
