"""The state of one service in the cluster: raw Kubernetes objects turned into plain values.

The modules that decide (`plan`, `status`, `autoscale`) use these values and never see a raw object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from diptych_operator.api.base import Raw
from diptych_operator.api.names import POOLS, REVISION_LABEL, ROLE_LABEL, Role
from diptych_operator.api.pools import Counts
from diptych_operator.plan.state import less, most
from diptych_operator.status.references import Reference, key_secrets, references
from diptych_protocol.admin import CanaryReport, EngineReport, RouterReport

TURNED_AWAY_S: Final = 30
"""So long the scheduler may look for a node, or a quota refuse a pod, before there is no room."""
IMAGE_REASONS: Final = frozenset(
    {
        *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
        *("ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"),
    }
)
"""Why a container waits whose image the node cannot get, in Kubernetes' terms."""


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """One Deployment: a pool of one revision, or the routers."""

    name: str
    role: str
    revision: str
    """Empty for routers."""
    wanted: int
    """spec.replicas."""
    ready: int
    updated: int
    """Pods made from the newest template."""
    settled: bool
    """Whether the controller has seen the newest template, and all wanted pods are made from it."""
    failure: str = ""
    """Message of a ReplicaFailure condition: pods that cannot even be created."""
    refused_at: str = ""
    """When a quota of the namespace first had no room for one; empty if it has."""
    in_place: bool = False
    """Whether its old pods make room for new ones."""


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod, and what keeps it from being ready."""

    name: str
    role: str
    revision: str
    phase: str
    ready: bool
    terminating: bool
    ip: str = ""
    unschedulable: str = ""
    """The scheduler's message while no node fits."""
    placed: bool = True
    """Whether it has a node."""
    node_silent: bool = False
    """Whether Kubernetes says that it is not ready, though by its node's last word it is."""
    turned_away_at: str = ""
    """When the scheduler, or the queue that a scheduling gate stands for, first had no node."""
    waiting_reason: str = ""
    """Why a container waits, in Kubernetes' term, such as ImagePullBackOff or CrashLoopBackOff."""
    waiting_message: str = ""
    image: str = ""
    """The image of the container that waits or, if none does, of the first container."""
    ended_container: str = ""
    """The container that failed, now or last."""
    last_exit: str = ""
    """The last output of a container that ended: its termination message."""
    last_exit_reason: str = ""
    """Why `ended_container` ended, in Kubernetes' term, such as Error or OOMKilled."""
    created_at: str = ""
    evicted: str = ""
    """Why its node ended it, such as for want of disk, where only its record is left."""

    refers: frozenset[Reference] = frozenset()
    """The Secrets and ConfigMaps that it needs; once it is ready, only the Secret with its keys."""
    key_secrets: frozenset[str] = frozenset()
    """The Secrets in its volume of keys, whether or not they are still there."""

    @property
    def gone(self) -> bool:
        """Whether only its record is left, as of an evicted pod, without its address."""
        return self.phase in ("Failed", "Succeeded")

    @property
    def has_volumes(self) -> bool:
        """Whether its volumes are mounted: what has an address has them."""
        return not self.gone and bool(self.ip or self.phase == "Running")

    @property
    def stays(self) -> bool:
        """Whether it exists, ready or not, and is not terminating."""
        return not self.terminating and not self.gone

    @property
    def mounts(self) -> bool:
        """Whether its node is to mount its volumes, and may be waiting for one."""
        return self.stays and self.placed and not self.has_volumes


@dataclass(frozen=True, slots=True)
class Observed:
    """A service's children as they are now."""

    deployments: tuple[DeploymentView, ...] = ()
    pods: tuple[PodView, ...] = ()
    routers: tuple[RouterReport, ...] = ()
    """The newest report of each router pod that answered."""
    unreachable_routers: int = 0
    """Router pods whose admin port did not answer."""
    problems: tuple[Problem, ...] = field(default=())
    missing: Mapping[Reference, str] = field(default_factory=dict)
    """Objects to which pods refer and that do not exist, with the remedy for each."""
    prefetched: str = ""
    """Nodes that have what is fetched ahead, of those that are to; empty if none is to."""
    lags: bool = False
    """The operator has just changed a Deployment, and this state is from before."""

    @property
    def engines(self) -> Iterator[EngineReport]:
        """What each router says of each engine."""
        return (engine for router in self.routers for engine in router.engines)

    def revisions(self) -> tuple[str, ...]:
        """Every revision that has a Deployment or a pod, sorted."""
        found = {d.revision for d in self.deployments} | {p.revision for p in self.pods}
        return tuple(sorted(found - {""}))

    def deployment(self, role: str, revision: str = "") -> DeploymentView | None:
        views = self.deployments
        return next((v for v in views if (v.role, v.revision) == (role, revision)), None)

    def pools(self, revision: str) -> tuple[Role, ...]:
        """Return the pools of a revision; only decode if its engines compute prompts too."""
        alone = self.deployment("decode", revision) and not self.deployment("prefill", revision)
        return ("decode",) if alone else POOLS

    def wanted(self, revision: str) -> Counts:
        """Return spec.replicas of a revision's two Deployments; 0 for one that does not exist."""
        return self._counts(revision, lambda d: d.wanted)

    def ready(self, revision: str) -> Counts:
        return self._counts(revision, lambda d: d.ready)

    def present(self, revision: str) -> Counts:
        """Return the pods that exist: ready, starting, terminating; ended ones may remain."""
        here = [p.role for p in self.pods if p.revision == revision and not p.gone]
        return Counts(here.count("prefill"), here.count("decode"))

    def unplaced(self, revision: str) -> Counts:
        """Return the wanted pods that no node has yet, whether they exist or not."""
        placed = self._staying(revision, lambda pod: pod.placed)
        ready = self.ready(revision)
        return less(self.wanted(revision), most(placed, ready))

    def turned_away(self, revision: str, now: str) -> Counts:
        """Return the pods that have found no node for `TURNED_AWAY_S`, or no room in a quota, where
        they do not even exist; `now`: an RFC 3339 time."""

        def long_since(time: str) -> bool:
            return seconds_between(time, now) >= TURNED_AWAY_S

        here = self._staying(revision, lambda pod: True)

        def refused(view: DeploymentView) -> int:
            return max(1, view.wanted - here.of(view.role)) if long_since(view.refused_at) else 0

        waiting = self._staying(revision, lambda pod: long_since(pod.turned_away_at))
        return waiting + self._counts(revision, refused)

    def cramped(self, revision: str, now: str) -> frozenset[str]:
        """Return the pools where a changed template waits for nodes, until all pods have it. The
        only pod of a pool is not among them: that would be an outage."""
        away = self.turned_away(revision, now)
        return frozenset(
            d.role
            for d in self.deployments
            if d.revision == revision
            and d.updated < d.wanted > 1
            and (d.in_place or away.of(d.role))
        )

    def _staying(self, revision: str, chosen: Callable[[PodView], bool]) -> Counts:
        roles = [p.role for p in self.pods if p.revision == revision and p.stays and chosen(p)]
        return Counts(roles.count("prefill"), roles.count("decode"))

    def _counts(self, revision: str, read: Any) -> Counts:
        prefill, decode = (self.deployment(role, revision) for role in POOLS)
        return Counts(read(prefill) if prefill else 0, read(decode) if decode else 0)

    def trusted(self, revision: str) -> Counts | None:
        """Return the engines of a revision that every router verified; None without reports."""
        if not self.routers:
            return None
        return Counts(*(self._verified_by_all(revision, role) for role in POOLS))

    def _verified_by_all(self, revision: str, role: str) -> int:
        by_router = (
            {e.engine_id for e in router.engines
             if e.verified and e.revision == revision and (e.home or e.role) == role}
            for router in self.routers
        )  # fmt: skip
        return len(set.intersection(*by_router))

    def turned(self, role: str) -> int:
        """Return how many engines of a pool have the other pool's role, as routers gave it."""
        return len({e.engine_id for e in self.engines if e.home == role != e.role})

    def newest_canary(self, revision: str) -> CanaryReport | None:
        """Return the last canary that received its KV in this revision, if a router remembers any
        that did."""
        crossed = [
            canary
            for router in self.routers
            for canary in router.canaries
            if canary.ok and canary.revision == revision and revision
        ]
        return max(crossed, key=lambda c: (c.unix_time, c.prefill, c.decode), default=None)

    def verified(self, revision: str) -> bool:
        return self.newest_canary(revision) is not None


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of the operator itself, such as a refused apply or an object of somebody else."""

    reason: str
    """A CamelCase word that never changes."""
    message: str
    """What is wrong and what to do."""


def deployment_view(raw: Raw) -> DeploymentView:
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    meta = raw["metadata"]
    wanted = spec.get("replicas", 1)
    updated = status.get("updatedReplicas", 0)
    observed = status.get("observedGeneration", 0) >= meta.get("generation", 0)
    refusal: Raw = next(
        (c for c in status.get("conditions") or []
         if c.get("type") == "ReplicaFailure" and c.get("status") == "True"),
        {},
    )  # fmt: skip
    failure = refusal.get("message", "")
    labels = meta.get("labels") or {}
    return DeploymentView(
        name=meta["name"],
        role=labels.get(ROLE_LABEL, ""),
        revision=labels.get(REVISION_LABEL, ""),
        wanted=wanted,
        # Ready pods of any generation: they keep serving while the controller lags behind.
        ready=status.get("readyReplicas", 0),
        updated=updated,
        settled=observed and updated == wanted and status.get("replicas", 0) == wanted,
        failure=failure,
        refused_at=refusal.get("lastTransitionTime", "") if "exceeded quota" in failure else "",
        in_place=not ((spec.get("strategy") or {}).get("rollingUpdate") or {}).get("maxSurge", 1),
    )


def prefetched(children: Iterable[Raw]) -> str:
    """See `Observed`. A node that has an older model, or only a part, has none."""
    sets = [raw for raw in children if raw["kind"] == "DaemonSet"]
    found = [raw.get("status") or {} for raw in sets]
    there = sum(
        min(status.get("numberReady", 0), status.get("updatedNumberScheduled", 0))
        for raw, status in zip(sets, found, strict=True)
        if status.get("observedGeneration", 0) >= raw["metadata"].get("generation", 0)
    )
    wanted = sum(status.get("desiredNumberScheduled", 0) for status in found)
    return f"{there}/{wanted}" if sets else ""


def pod_view(raw: Raw) -> PodView:
    meta, status = raw["metadata"], raw.get("status") or {}
    labels = meta.get("labels") or {}
    conditions = {c.get("type"): c for c in status.get("conditions") or []}
    scheduled = conditions.get("PodScheduled", {})
    containers = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    placed = scheduled.get("status") == "True" or status.get("phase") != "Pending"
    stuck = next((c for c in containers if _waiting(c).get("reason")), None)
    ended = next((c for c in containers if _ended(c)), None)
    shown = stuck or (containers[0] if containers else {})
    waiting_reason = _waiting(stuck or {}).get("reason", "")
    return PodView(
        name=meta["name"],
        role=labels.get(ROLE_LABEL, ""),
        revision=labels.get(REVISION_LABEL, ""),
        phase=status.get("phase", "Unknown"),
        ready=_is_true(conditions, "Ready"),
        terminating="deletionTimestamp" in meta,
        ip=status.get("podIP", ""),
        unschedulable=scheduled.get("message", "")
        if scheduled.get("reason") == "Unschedulable"
        else "",
        placed=placed,
        node_silent=_is_true(conditions, "ContainersReady")
        and not _is_true(conditions, "Ready")
        and not (raw.get("spec") or {}).get("readinessGates"),
        turned_away_at="" if placed or not scheduled else _since(scheduled, meta),
        waiting_reason=waiting_reason,
        waiting_message=_waiting(stuck or {}).get("message", ""),
        image=shown.get("image", ""),
        ended_container=(ended or {}).get("name", ""),
        last_exit=_last_words(ended) if ended else "",
        last_exit_reason=_ended(ended or {}).get("reason", ""),
        created_at=meta.get("creationTimestamp", ""),
        evicted=status.get("message", "") if status.get("reason") == "Evicted" else "",
        refers=references(raw.get("spec") or {}, pulls=waiting_reason in IMAGE_REASONS),
        key_secrets=key_secrets(raw.get("spec") or {}),
    )


def _is_true(conditions: Mapping[str, Raw], kind: str) -> bool:
    return bool(conditions.get(kind, {}).get("status") == "True")


def foreign(pods: Iterable[PodView], made: Collection[Reference]) -> set[Reference]:
    """Return what waiting pods refer to, but for what we make."""
    waiting = [pod.refers for pod in pods if pod.stays and not pod.ready]
    return set().union(*waiting) - set(made)


def _since(scheduled: Raw, meta: Raw) -> str:
    """A pod with a scheduling gate is born with a condition that has no time."""
    return scheduled.get("lastTransitionTime") or meta.get("creationTimestamp") or ""


def seconds_between(then: str, now: str) -> float:
    """Return the seconds between two RFC 3339 times; 0 for what is none."""
    try:
        return (datetime.fromisoformat(now) - datetime.fromisoformat(then)).total_seconds()
    except (ValueError, TypeError):
        return 0.0


def _waiting(container: Raw) -> Raw:
    return (container.get("state") or {}).get("waiting") or {}


def _ended(container: Raw) -> Raw:
    """How a container last ended badly; nothing if it ended well or never."""
    now = (container.get("state") or {}).get("terminated")
    ended = now or (container.get("lastState") or {}).get("terminated") or {}
    return ended if ended.get("exitCode") else {}


def _last_words(container: Raw) -> str:
    ended = _ended(container)
    silent = f"the container {container['name']} ended with code {ended['exitCode']}, without words"
    return str(ended.get("message") or silent)


def observe(
    deployments: Iterable[Raw],
    pods: Iterable[Raw],
    routers: Iterable[RouterReport] = (),
    unreachable_routers: int = 0,
) -> Observed:
    return Observed(
        tuple(sorted(map(deployment_view, deployments), key=lambda d: d.name)),
        tuple(sorted(map(pod_view, pods), key=lambda p: p.name)),
        tuple(routers),
        unreachable_routers,
    )
