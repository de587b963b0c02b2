"""Carries out a plan: applies, scales and deletes objects, and adds capacity first."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from diptych_operator.api.base import Object, ServiceKey, SpecError
from diptych_operator.api.names import (
    DELETION_COST_ANNOTATION,
    POOLS,
    RENDERED_ANNOTATION,
    REVISION_LABEL,
    ROLE_LABEL,
    object_name,
)
from diptych_operator.api.pools import NOTHING
from diptych_operator.api.scaler import SCALER_KIND
from diptych_operator.api.service import InferenceService
from diptych_operator.key_keeper import KeyKeeper
from diptych_operator.kube.children import (
    Children,
    NotOursError,
    belongs_to,
    child_id,
    is_orphan_of,
)
from diptych_operator.kube.client import ApiError, Kube, name_of
from diptych_operator.kube.cluster import HTTP_ROUTE_KIND, POOL_KIND
from diptych_operator.kube.workloads import WORKLOADS, sizes
from diptych_operator.plan import Step
from diptych_operator.plan.state import most
from diptych_operator.render.config import serving_config_map
from diptych_operator.render.once import Renderings
from diptych_operator.scalers import scaler_ids
from diptych_operator.service_snapshot import ServiceSnapshot, annotation, label
from diptych_protocol.router_settings import Serving

log = logging.getLogger(__name__)


OPTIONAL_KINDS = (
    "PodDisruptionBudget", "NetworkPolicy", "DaemonSet", SCALER_KIND, POOL_KIND, HTTP_ROUTE_KIND,
)  # fmt: skip
"""Shared objects of these kinds are deleted when they are no longer rendered. Objects of other
kinds never are: an engine's Deployment that has lost its revision label would look the same."""


def open_work(pod: Mapping[str, Any], work: Mapping[str, int]) -> int:
    """Requests and leases of a pod, by the engine's name, which is the pod's."""
    return work.get(pod["metadata"]["name"], 0)


class Executor:
    """Makes the reconciler's changes in the cluster."""

    def __init__(
        self, kube: Kube, renderings: Renderings, children: Children, keys: KeyKeeper
    ) -> None:
        self._kube = kube
        self._renderings = renderings
        self._children = children
        self._keys = keys
        self._at_rest: dict[ServiceKey, object] = {}
        """All that a step was made of that left nothing to do: the same again needs no look."""

    async def carry_out(self, snapshot: ServiceSnapshot, step: Step) -> bool:
        """Make the cluster match the step. Returns true if `snapshot` shows an outdated Deployment.

        Raises `SpecError` and `ApiError` for what does not render or is refused. Nothing that the
        old revision needs has been changed then.
        """
        service = snapshot.service
        key = service.metadata.namespace, service.metadata.name
        serving = told_to_routers(snapshot, step)
        basis = (
            service.metadata, service.spec, step, snapshot.children, snapshot.target, snapshot.held,
            snapshot.keys, snapshot.lost_keys, snapshot.rendered, serving,
        )  # fmt: skip
        if self._at_rest.pop(key, None) != basis and await self._make(snapshot, step, serving):
            return True
        self._at_rest[key] = basis
        return False

    async def _make(self, snapshot: ServiceSnapshot, step: Step, serving: Serving) -> bool:
        service = snapshot.service
        await self._children.adopt(service, snapshot.children.values())
        try:
            shared = self._renderings.shared(service, snapshot.keys, serving)
            newest = self._newest(snapshot, step)
            wanted = [*_taken(shared, snapshot), *newest]
            if not service.spec.suspend:
                # The CRD does not know what a podTemplate may hold; the API server does.
                workloads = [obj for obj in wanted if obj["kind"] in WORKLOADS]
                await self._children.try_out(service, workloads, snapshot.children)
        except (SpecError, ApiError, NotOursError):
            await self._serve_on(snapshot, step, serving)
            raise
        if not (step.replicas.get(snapshot.target) or snapshot.deployments(snapshot.target)):
            wanted = _taken(shared, snapshot)  # none of it yet
        await self._name_the_idlest(snapshot, step)
        changed = await self._children.apply_all(service, wanted, snapshot.children)
        await self._scale_older(snapshot, step)
        await self._remove(snapshot, step, shared)
        return changed

    async def _serve_on(self, snapshot: ServiceSnapshot, step: Step, serving: Serving) -> None:
        """What pods that are refused must not hold up: routers turn, and pools grow."""
        told = serving_config_map(snapshot.service, serving)
        await self._children.apply_all(snapshot.service, [told], snapshot.children)
        for name, counts in step.replicas.items():
            for raw in snapshot.workloads(name):
                await self._children.scale(raw, most(counts, snapshot.observed.wanted(name)))

    def forget(self, key: ServiceKey) -> None:
        self._at_rest.pop(key, None)

    async def stop(self, service: InferenceService, children: Iterable[Mapping[str, Any]]) -> None:
        """Remove all pods, whatever else is wrong with the service. This includes orphans that it
        could not adopt. Raises the last `ApiError` after it has tried each."""
        failure: ApiError | None = None
        for raw in children:
            running = any(sizes(raw).values())
            if running and (belongs_to(raw, service) or is_orphan_of(raw, service)):
                try:
                    await self._children.scale(raw, NOTHING)
                except ApiError as exc:
                    failure = exc
        if failure is not None:
            raise failure

    def _newest(self, snapshot: ServiceSnapshot, step: Step) -> list[Object]:
        """The pools that the spec describes, to be tried out even before any pod is wanted: old
        ones that leave first cannot come back."""
        counts = step.replicas.get(snapshot.target)
        idle = snapshot.service.spec.suspend and not snapshot.deployments(snapshot.target)
        if snapshot.held or counts is None or idle or snapshot.routers_lack_keys():
            return []
        return self._renderings.revision(
            snapshot.service, snapshot.target, snapshot.keys, counts, step.in_place
        )

    async def _scale_older(self, snapshot: ServiceSnapshot, step: Step) -> None:
        """What the spec no longer describes, or what is held, changes in number only."""
        for name, counts in step.replicas.items():
            if name == snapshot.target and not snapshot.held:
                continue
            for raw in snapshot.workloads(name):
                await self._children.scale(raw, counts)

    async def _name_the_idlest(self, snapshot: ServiceSnapshot, step: Step) -> None:
        """Before a pool shrinks, mark its pods with their open work: the idlest goes first."""
        shrinking = {
            (name, role)
            for name, counts in step.replicas.items()
            for role in POOLS
            if counts.of(role) < snapshot.observed.wanted(name).of(role)
        }
        if not shrinking:
            return
        work = {
            engine.engine_id: engine.num_running + engine.num_waiting + engine.leases_held
            for engine in snapshot.observed.engines
        }
        for pod in snapshot.pods:
            kind = (label(pod, REVISION_LABEL), label(pod, ROLE_LABEL))
            cost = str(open_work(pod, work))
            if kind in shrinking and annotation(pod, DELETION_COST_ANNOTATION) != cost:
                patch = {"metadata": {"annotations": {DELETION_COST_ANNOTATION: cost}}}
                try:
                    await self._kube.merge(*name_of(pod), patch)
                except ApiError as exc:
                    if exc.status != 404:
                        log.warning("pod %s: %s", pod["metadata"]["name"], exc)

    async def _remove(
        self, snapshot: ServiceSnapshot, step: Step, shared: Iterable[Object]
    ) -> None:
        """Revisions that are over, shared objects that the spec no longer asks for, old keys."""
        asked_for = {child_id(obj) for obj in shared} | scaler_ids(snapshot.service)
        over = {
            name: raw
            for name, raw in snapshot.children.items()
            if label(raw, REVISION_LABEL) in step.removable
        }
        unasked = [
            raw
            for name, raw in snapshot.children.items()
            if raw["kind"] in OPTIONAL_KINDS and name not in asked_for
        ]
        # Workloads last: should this be cut short, a revision is still known by them.
        leaving = sorted(over.values(), key=lambda raw: raw["kind"] in WORKLOADS)
        await self._children.delete(snapshot.service, [*leaving, *unasked])
        for keys in sorted(snapshot.known_keys() - snapshot.held_keys(without=over)):
            await self._keys.remove_once(snapshot.service, keys)


def told_to_routers(snapshot: ServiceSnapshot, step: Step) -> Serving:
    """What routers are told while they run. They read it up to minutes later. So they are told
    beforehand that pools may become empty on purpose, unless an older revision has pods."""
    service, trial = snapshot.service, step.trial
    wanted = dict(step.replicas)
    empty = not wanted.pop(snapshot.target, NOTHING)
    known = bool(service.status.current_revision) and not any(wanted.values())
    asleep = service.sleeps_when_idle and (empty or known)
    serving = Serving(tuple(step.serving), asleep=asleep)
    if trial is not None and trial.revision in step.serving and len(step.serving) > 1:
        serving = msgspec.structs.replace(serving, canary=trial.revision, weight=trial.weight)
    return serving


def _taken(shared: Iterable[Object], snapshot: ServiceSnapshot) -> list[Object]:
    """What all revisions share, with a note of what it was rendered for; without the routers and
    the file that they read at their start while they are held, unless they are gone."""
    held = snapshot.held and bool(snapshot.deployments(""))
    parts = [obj for obj in shared if not held or not _starts_routers(obj, snapshot)]
    for obj in parts:
        if snapshot.is_noted_on(obj) and snapshot.rendered is not None:
            notes = obj["metadata"].setdefault("annotations", {})
            notes[RENDERED_ANNOTATION] = str(snapshot.rendered)
    return parts


def _starts_routers(obj: Object, snapshot: ServiceSnapshot) -> bool:
    file = object_name(snapshot.service, "router")
    return obj["kind"] == "Deployment" or child_id(obj)[1:] == ("ConfigMap", file)
