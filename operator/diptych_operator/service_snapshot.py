"""One service at the beginning of a pass: its spec, and reports of cluster and routers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from diptych_operator.api.base import Raw
from diptych_operator.api.names import (
    CURRENT_KEYS_ANNOTATION,
    KEYS_LABEL,
    PREVIOUS_KEYS_ANNOTATION,
    RENDERED_ANNOTATION,
    REVISION_LABEL,
    ROLE_LABEL,
    object_name,
)
from diptych_operator.api.pools import Counts
from diptych_operator.api.service import InferenceService
from diptych_operator.kube.children import ChildId
from diptych_operator.kube.workloads import WORKLOADS, deployments_among
from diptych_operator.plan import RevisionState
from diptych_operator.render import KeySets, fixed_counts
from diptych_operator.status.observed import Observed, PodView, deployment_view
from diptych_operator.upgrades import Rendered
from diptych_protocol.admin import TrialReport

_ROUTER_KEYS = (CURRENT_KEYS_ANNOTATION, PREVIOUS_KEYS_ANNOTATION)
_KEY_SET = re.compile("[-a-z0-9]+")


@dataclass(frozen=True, slots=True)
class ServiceSnapshot:
    """Everything that a pass knows of one service."""

    service: InferenceService
    target: str
    """The revision that the spec asks for; while `held`, the one that it asked for before."""
    keys: KeySets
    children: Mapping[ChildId, Raw]
    pods: Sequence[Raw]
    observed: Observed
    lost_keys: frozenset[str] = frozenset()
    """Older key sets whose Secret is gone. Routers cannot get them, so nobody waits for that."""
    rendered: Rendered | None = None
    """What the pods are to be rendered for; None if they cannot be."""
    held: bool = False
    """This operator would render the pods otherwise, and they wait for their turn."""
    earlier_trials: Sequence[TrialReport] = ()
    """See `Evidence.earlier`."""

    @property
    def aim(self) -> Counts:
        """The size of both pools until now; at the start, or after scaling to zero, the spec's.

        Nothing in either pool counts as a size only where idle pools may be scaled to zero.
        """
        status = self.service.status
        aim = Counts(status.prefill.desired, status.decode.desired)
        known = bool(status.update_revision) and (aim or self.service.sleeps_when_idle)
        return aim if known else fixed_counts(self.service)

    @property
    def asleep(self) -> bool:
        """Whether idle pools are scaled to zero, so that only a request brings news."""
        there = map(self.observed.wanted, self.observed.revisions())
        return self.service.sleeps_when_idle and not any(there)

    @property
    def last_rendered(self) -> Rendered | None:
        """What the pods were rendered for, if the cluster says so: two objects, should one be
        deleted."""
        noted = {
            raw["kind"]: annotation(raw, RENDERED_ANNOTATION)
            for raw in self.children.values()
            if self.is_noted_on(raw)
        }
        return Rendered.read(noted.get("Deployment") or noted.get("Service", ""))

    def is_noted_on(self, obj: Raw) -> bool:
        """Whether a child has a note of what the pods were rendered for."""
        of_routers = obj["metadata"]["name"] == object_name(self.service, "router")
        return of_routers and obj["kind"] in ("Deployment", "Service")

    @property
    def at_rest(self) -> bool:
        """Whether every Deployment has all its pods, ready and of its newest template."""
        views = map(deployment_view, deployments_among(self.children.values()))
        return all(view.settled and view.ready >= view.wanted for view in views)

    def lacks_parts(self, revision: str) -> bool:
        """Whether a pool of the revision is gone, or a file that pods of it or routers wait for."""
        files = {object_name(self.service, role, revision) for role in self.service.pools}
        files.add(object_name(self.service, "router"))
        pools = len(self.deployments(revision))
        lost = {name for kind, name in self.observed.missing if kind == "ConfigMap"}
        return pools < len(self.service.pools) or bool(lost & files)

    def workloads(self, revision: str) -> list[Raw]:
        """Return what makes the pods of one revision, or those of the routers for an empty name."""
        return [
            raw
            for raw in self.children.values()
            if raw["kind"] in WORKLOADS and label(raw, REVISION_LABEL) == revision
        ]

    def deployments(self, revision: str) -> list[Raw]:
        """Return the same as Deployments."""
        return deployments_among(self.workloads(revision))

    def revision_states(self, now: str) -> list[RevisionState]:
        """The state of each revision that has anything in the cluster, for the planner.

        `now`: an RFC 3339 time."""
        observed, status = self.observed, self.service.status
        known = (status.current_revision, status.transfer.verified_revision)
        required = self.service.verification == "Required"
        return [
            RevisionState(
                name,
                wanted=observed.wanted(name),
                ready=observed.ready(name),
                present=observed.present(name),
                unplaced=observed.unplaced(name),
                turned_away=observed.turned_away(name, now),
                verified=observed.verified(name) or name in known,
                # What has served before stays believed, whatever routers say while they restart.
                trusted=observed.trusted(name) if name == self.target and required else None,
                whole=observed.pools(name) == ("decode",),
            )
            for name in observed.revisions()
        ]

    def held_keys(self, without: Collection[ChildId] = ()) -> set[str]:
        """Return the key sets in use: the one that is asked for, and those that engines hold.

        `without`: children that are terminating.
        """
        staying = [raw for name, raw in self.children.items() if name not in without]
        return {self.keys.current, *_ready_by_keys(staying)}

    def known_keys(self) -> set[str]:
        """All key sets of which the cluster has any trace."""
        found = {self.keys.current, self.keys.previous, *_ready_by_keys(self.children.values())}
        for raw in self.deployments(""):
            found |= set(_keys_of(raw))
        return found - {""}

    def routers_lack_keys(self) -> bool:
        """Whether engines use other keys and a router does not hold the new ones yet.

        Until all do, no engine may start with the new keys, because routers could not reach it.
        """
        if self.held_keys() - self.lost_keys <= {self.keys.current}:
            return False
        routers = self.deployments("")
        return not routers or not all(
            annotation(raw, CURRENT_KEYS_ANNOTATION) == self.keys.current
            and deployment_view(raw).settled
            for raw in routers
        )


def key_sets(wanted: str, deployments: Sequence[Raw]) -> KeySets:
    """Return the keys that routers are to hold: the wanted ones, and those that engines still have.

    Routers can hold one older set. If a rotation begins before the last one has ended, engines may
    have two. Routers then keep the one with which most engines are ready. Older ones stay named
    after the rotation has ended, because removing them would replace every router once more.
    """
    router = next((raw for raw in deployments if label(raw, ROLE_LABEL) == "router"), None)
    current, previous = _keys_of(router) if router else ("", "")
    if current != wanted:
        held = _ready_by_keys(deployments)
        held.pop(wanted, None)
        previous = max(held, key=lambda keys: (held[keys], keys == current, keys), default=current)
    return KeySets(wanted, previous if previous != wanted else "")


def _keys_of(router: Raw) -> tuple[str, str]:
    """The current and the previous key set of routers; empty for what somebody wrote there that is
    no name of one, and so might be part of a path to another object."""
    found = (_KEY_SET.fullmatch(annotation(router, name)) for name in _ROUTER_KEYS)
    current, previous = (name.group() if name else "" for name in found)
    return current, previous


def keys_in_pods(deployments: Iterable[Raw], pods: Iterable[PodView]) -> set[str]:
    """Return the key sets that running pods have read.

    For routers only the current one counts: the older one stays named long after it is gone.
    """
    held: dict[tuple[str, str], str] = {}
    for raw in deployments:
        role = label(raw, ROLE_LABEL)
        keys = annotation(raw, CURRENT_KEYS_ANNOTATION) or label(raw, KEYS_LABEL)
        held[role, label(raw, REVISION_LABEL)] = keys
    running = [pod for pod in pods if pod.has_volumes]
    return {held.get((pod.role, pod.revision), "") for pod in running} - {""}


def _ready_by_keys(children: Iterable[Raw]) -> Counter[str]:
    """Ready engines by the keys that they hold, 0 for a pool at rest."""
    ready: Counter[str] = Counter()
    for raw in deployments_among(children):
        if keys := label(raw, KEYS_LABEL):
            ready[keys] += deployment_view(raw).ready
    return ready


def is_named_by_us(raw: Raw, service: InferenceService) -> bool:
    """Whether a workload has the name that its labels call for. Else it is a copy, with whatever
    labels and owner, and its maker's: it is neither counted nor changed."""
    parts = (*filter(None, [label(raw, ROLE_LABEL)]), label(raw, REVISION_LABEL))
    return raw["kind"] not in WORKLOADS or raw["metadata"]["name"] == object_name(service, *parts)


def label(raw: Raw, name: str) -> str:
    return str((raw["metadata"].get("labels") or {}).get(name, ""))


def annotation(raw: Raw, name: str) -> str:
    return str((raw["metadata"].get("annotations") or {}).get(name, ""))
