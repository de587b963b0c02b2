"""Kubernetes Events on services, which `kubectl describe` shows: transitions only."""

from __future__ import annotations

import logging

from diptych_operator.api.base import Raw
from diptych_operator.api.service import API_VERSION, KIND, InferenceService
from diptych_operator.api.status import MAX_MESSAGE, EventNote
from diptych_operator.kube.client import ApiError, Kube

log = logging.getLogger(__name__)

COMPONENT = "diptych-operator"


SERVED_BY_ANOTHER = "ServedByAnother"
"""Reason of the event that an operator posts where another one serves; see `status.reasons`."""
UPGRADE_WAITS = "UpgradeWaits"
"""Reason of the event that tells of pods which an upgraded operator would render otherwise."""


class EventLog:
    """Posts events. If one cannot be posted, that is logged and has no other effect."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def post(self, service: InferenceService, note: EventNote) -> None:
        meta = service.metadata
        log.info("%s/%s: %s: %s", meta.namespace, meta.name, note.reason, note.message)
        named = {"namespace": meta.namespace, "name": meta.name, "uid": meta.uid}
        await self.post_about({"apiVersion": API_VERSION, "kind": KIND, "metadata": named}, note)

    async def post_about(self, about: Raw, note: EventNote) -> None:
        """Post the same event about an object of any kind."""
        meta = about["metadata"]
        now = self._kube.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                **{name: meta[name] for name in ("namespace", "name", "uid")},
            },
            "type": note.type,
            "reason": note.reason,
            "message": note.message[:MAX_MESSAGE],
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
        }
        try:
            await self._kube.create(event)
        except ApiError as exc:
            name = f"{meta['namespace']}/{meta['name']}"
            log.warning("event %s on %s: %s", note.reason, name, exc)
