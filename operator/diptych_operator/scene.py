"""One service as a pass finds it: the spec, and what the cluster and the routers say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych_operator.api_types import InferenceService
from diptych_operator.children import ChildId
from diptych_operator.names import (
    CURRENT_KEYS_ANNOTATION,
    KEYS_LABEL,
    PREVIOUS_KEYS_ANNOTATION,
    REVISION_LABEL,
    ROLE_LABEL,
)
from diptych_operator.observed import Observed, deployment_view
from diptych_operator.plan import RevisionState
from diptych_operator.render import KeySets

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that a pass knows of one service."""

    service: InferenceService
    target: str
    """The revision that the spec asks for."""
    keys: KeySets
    children: Mapping[ChildId, Raw]
    pods: Sequence[Raw]
    observed: Observed

    def deployments(self, revision: str) -> list[Raw]:
        """The Deployments of one revision; those of the routers for an empty one."""
        return [
            raw
            for raw in self.children.values()
            if raw["kind"] == "Deployment" and label(raw, REVISION_LABEL) == revision
        ]

    def revision_states(self) -> list[RevisionState]:
        """Each revision that has anything in the cluster, as the planner wants to see it."""
        observed, status = self.observed, self.service.status
        known = (status.current_revision, status.transfer.verified_revision)
        return [
            RevisionState(
                name,
                wanted=observed.wanted(name),
                ready=observed.ready(name),
                present=observed.present(name),
                verified=observed.verified(name) or name in known,
            )
            for name in observed.revisions()
        ]

    def held_keys(self) -> set[str]:
        """Key sets that engines of any revision still hold."""
        engines = (raw for raw in self.children.values() if label(raw, REVISION_LABEL))
        return {label(raw, KEYS_LABEL) for raw in engines if raw["kind"] == "Deployment"} - {""}

    def routers_lack_keys(self) -> bool:
        """Engines are there that use other keys, and not every router holds the new ones yet.

        Until then no engine may start with them: routers could not reach it.
        """
        if not self.held_keys() - {self.keys.current}:
            return False
        routers = self.deployments("")
        return not routers or not all(
            annotation(raw, CURRENT_KEYS_ANNOTATION) == self.keys.current
            and deployment_view(raw).settled
            for raw in routers
        )


def key_sets(wanted: str, deployments: Sequence[Raw]) -> KeySets:
    """The keys that routers are to hold: what is wanted, and what was wanted before that.

    The older ones stay named after the rotation has ended, because taking them out of the pods
    would replace every router once more for nothing.
    """
    router = next((raw for raw in deployments if label(raw, ROLE_LABEL) == "router"), None)
    if router is None:
        return KeySets(wanted)
    current = annotation(router, CURRENT_KEYS_ANNOTATION)
    if current in ("", wanted):
        return KeySets(wanted, annotation(router, PREVIOUS_KEYS_ANNOTATION))
    return KeySets(wanted, current)


def label(raw: Raw, name: str) -> str:
    return str((raw["metadata"].get("labels") or {}).get(name, ""))


def annotation(raw: Raw, name: str) -> str:
    return str((raw["metadata"].get("annotations") or {}).get(name, ""))
