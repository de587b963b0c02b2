"""Pools that others size: one PoolScaler each, for `kubectl scale`, an HPA or KEDA.

The spec of a PoolScaler belongs to the autoscaler. The operator creates the object with the pool's
present size. After that it has neither code nor right to write the spec.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from diptych_operator.api.base import Object, Raw
from diptych_operator.api.names import metadata, selector
from diptych_operator.api.pools import Counts, DecodeAutoscaling, Pool, PoolName, PrefillAutoscaling
from diptych_operator.api.scaler import SCALER_KIND, PoolScalerStatus
from diptych_operator.api.service import API_VERSION, InferenceService
from diptych_operator.kube.children import (
    ChildId,
    NotOursError,
    belongs_to,
    child_id,
    is_orphan_of,
    with_owner,
)
from diptych_operator.kube.client import ApiError, Kube, name_of
from diptych_operator.kube.cluster import Cluster
from diptych_operator.service_snapshot import ServiceSnapshot
from diptych_operator.status.observed import Observed, Problem
from diptych_operator.status.situation import ready_pods

# --- pure -------------------------------------------------------------------------------------


def scaled_from_outside(service: InferenceService) -> tuple[PoolName, ...]:
    """Return the pools for which the spec says `autoscaling.by: External`."""
    return tuple(role for role in service.pools if _bounds(service, role) is not None)


def scaler_ids(service: InferenceService) -> set[ChildId]:
    """Return the ids of the PoolScalers that the service is to have."""
    return {child_id(scaler(service, role, 1)) for role in scaled_from_outside(service)}


def scaler(service: InferenceService, role: PoolName, replicas: int) -> Object:
    """Return a pool's PoolScaler as it is created."""
    return {
        "apiVersion": API_VERSION,
        "kind": SCALER_KIND,
        "metadata": metadata(service, role, role),
        "spec": {"replicas": replicas},
    }


def size(service: InferenceService, role: PoolName, asked: int) -> int:
    """Return the requested number of pods, limited to the pool's bounds."""
    bounds = _bounds(service, role)
    if bounds is None:
        return asked
    return min(max(asked, bounds.min_replicas), bounds.max_replicas)


def with_sizes_from_outside(
    service: InferenceService, live: Mapping[ChildId, Raw], aim: Counts
) -> InferenceService:
    """Return the service with fixed `replicas` for the pools that are scaled from outside.

    `aim` is the size of both pools until now; a pool without a PoolScaler keeps it.
    """
    pools: dict[str, Pool] = {}
    for role in scaled_from_outside(service):
        here = _own(service, role, live)
        asked = int(here["spec"]["replicas"]) if here else aim.of(role)
        pools[role] = msgspec.structs.replace(
            service.pools[role], replicas=size(service, role, asked), autoscaling=None
        )
    return msgspec.structs.replace(service, spec=msgspec.structs.replace(service.spec, **pools))


def scaler_status(service: InferenceService, role: PoolName, observed: Observed) -> Object:
    """Return the current size of a pool, as `/scale` shows it.

    Pods that still load count, as in a Deployment's own status. Otherwise an autoscaler would
    remove the pods that its last step has asked for.
    """
    labels = sorted(selector(service, role).items())
    status = PoolScalerStatus(
        replicas=sum(pod.role == role and pod.stays for pod in observed.pods),
        ready_replicas=ready_pods(observed, role),
        selector=",".join(f"{name}={value}" for name, value in labels),
    )
    found: Object = msgspec.to_builtins(status)
    return found


def _bounds(
    service: InferenceService, role: PoolName
) -> PrefillAutoscaling | DecodeAutoscaling | None:
    scaling = service.pools[role].autoscaling
    return scaling if scaling is not None and scaling.by == "External" else None


def _own(service: InferenceService, role: PoolName, live: Mapping[ChildId, Raw]) -> Raw | None:
    """The pool's PoolScaler, unless it has another owner."""
    found = live.get(child_id(scaler(service, role, 1)))
    ours = found is not None and (belongs_to(found, service) or is_orphan_of(found, service))
    return found if ours else None


_KEEPS_ITS_SIZE = "autoscaling.by is External, but the pool keeps its size"


# --- effects ----------------------------------------------------------------------------------


class PoolScalers:
    """Creates PoolScalers and writes their status. The executor removes those not wanted."""

    def __init__(self, kube: Kube, cluster: Cluster) -> None:
        self._kube = kube
        self._cluster = cluster

    async def keep(self, snapshot: ServiceSnapshot, aim: Counts) -> Problem | None:
        """Make sure that each pool scaled from outside has one, at first with its `aim`.

        Returns the problems that the user has to solve; raises other `ApiError`s.
        """
        roles = scaled_from_outside(snapshot.service)
        if not roles:
            return None
        if not self._cluster.has_pool_scalers:
            return Problem(
                "PoolScalerUnavailable",
                f"{_KEEPS_ITS_SIZE}: the cluster has no PoolScalers, or the operator may not watch "
                "them; apply the chart or crds/ of this version, and wait up to five minutes",
            )
        try:
            for role in roles:
                await self._keep_one(snapshot, role, aim)
        except NotOursError as exc:
            return Problem("ObjectNotOurs", str(exc))
        except ApiError as exc:
            if not exc.is_refusal:
                raise
            return Problem(
                "PoolScalerUnavailable",
                f"{_KEEPS_ITS_SIZE}: the API server refuses its PoolScaler: {exc}",
            )
        return None

    async def _keep_one(self, snapshot: ServiceSnapshot, role: PoolName, aim: Counts) -> None:
        service = snapshot.service
        here = _own(service, role, snapshot.children)
        seed = size(service, role, aim.of(role))
        if here is not None and is_orphan_of(here, service):
            # There is no right to give it an owner: it is made anew, with the size it asks for.
            seed = int(here["spec"]["replicas"])
            await self._kube.delete(*name_of(here), here["metadata"]["uid"])
            here = None
        wanted = scaler(service, role, seed)
        if here is None:
            await self._create(with_owner(wanted, service), service)
        status = scaler_status(service, role, snapshot.observed)
        if here is None or here.get("status") != status:
            await self._kube.apply_status(wanted, status)

    async def _create(self, wanted: Object, service: InferenceService) -> None:
        """Create it; if it is there already, our watch is late or somebody took its labels off."""
        try:
            await self._kube.create(wanted)
            return
        except ApiError as exc:
            if exc.status != 409:
                raise
        meta, name = wanted["metadata"], name_of(wanted)
        there = await self._kube.get(*name)
        if there is not None and not belongs_to(there, service):
            raise NotOursError(SCALER_KIND, meta["name"])
        marks = (there["metadata"].get("labels") or {}) if there is not None else {}
        if not marks.items() >= meta["labels"].items():
            # Without its labels it is never seen. There is no right to change it, on purpose.
            if there is not None:
                await self._kube.delete(*name, there["metadata"]["uid"])
            await self._kube.create(wanted)
