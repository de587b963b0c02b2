"""Kubernetes Events on services: what `kubectl describe` shows. Posted on transitions only."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Protocol

from diptych_operator.api.service import API_VERSION, KIND, InferenceService
from diptych_operator.api.status import MAX_MESSAGE
from diptych_operator.kube.client import ApiError, Kube

log = logging.getLogger(__name__)

COMPONENT = "diptych-operator"


class Note(Protocol):
    """What happened; see `status.EventNote`."""

    @property
    def type(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def message(self) -> str: ...


class EventLog:
    """Posts events; one that cannot be posted is logged and costs nothing else."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def post(self, service: InferenceService, note: Note) -> None:
        meta = service.metadata
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        log.info("%s/%s: %s: %s", meta.namespace, meta.name, note.reason, note.message)
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{meta.name}.", "namespace": meta.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": meta.namespace,
                "name": meta.name,
                "uid": meta.uid,
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
            log.warning("event %s on %s/%s: %s", note.reason, meta.namespace, meta.name, exc)
