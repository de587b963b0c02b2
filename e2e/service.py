"""An InferenceService under test: its spec, its conditions, its pods."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from e2e.kubectl import Kubectl, KubectlError, Object, T, TooLate, wait_for
from e2e.traffic import Client

KIND = "inferenceservices.diptych.dev"
REVISION_LABEL = "diptych.dev/revision"
CHILD_KINDS = (
    "deployments,daemonsets,configmaps,secrets,services,serviceaccounts,poddisruptionbudgets,"
    "networkpolicies"
)
ENGINE_ROLES = ("prefill", "decode")
ROLES = (*ENGINE_ROLES, "router")
READY_TIMEOUT_S = 300.0
_SAMPLE = re.compile(r"^diptych:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Service:
    """Verbs on one InferenceService."""

    def __init__(self, kubectl: Kubectl, client: Client, name: str) -> None:
        self._kubectl = kubectl
        self._client = client
        self.name = name

    # --- the object ---------------------------------------------------------------------------

    def apply(self, manifest: Object) -> None:
        self._kubectl.apply({**manifest, "metadata": {**manifest["metadata"], "name": self.name}})

    def patch_spec(self, patch: Mapping[str, Any]) -> None:
        self._kubectl.merge(KIND, self.name, {"spec": patch})

    def annotate(self, key: str, value: str) -> None:
        self._kubectl.merge(KIND, self.name, {"metadata": {"annotations": {key: value}}})

    def delete(self) -> None:
        self._kubectl.delete(KIND, self.name)

    def gone(self) -> None:
        """Wait until neither the service nor a child is left."""
        self._kubectl.gone(KIND, [self.name])
        wait_for("all children gone", lambda: not self.children(), 120)
        wait_for("all pods gone", lambda: not self.pods(), 120)

    def observed(self) -> Object:
        found = self._kubectl.get(KIND, self.name)
        if found is None:
            raise KubectlError(f"there is no InferenceService {self.name}")
        return found

    def status(self) -> Object:
        found: Object = self.observed().get("status", {})
        return found

    def condition(self, kind: str) -> str:
        """True, False, Unknown, or nothing if the operator has not said it of the newest spec."""
        found: str = self._said(kind).get("status", "")
        return found

    def _said(self, kind: str) -> Object:
        """All of a condition; nothing while it speaks of an older spec."""
        service = self.observed()
        status = service.get("status", {})
        if status.get("observedGeneration") != service["metadata"]["generation"]:
            return {}
        return next((c for c in status.get("conditions", []) if c["type"] == kind), {})

    def says(self, kind: str, status: str, reason: str, timeout_s: float) -> str:
        """Wait until a condition has this status for this reason; returns its message."""

        def look() -> str | None:
            said = self._said(kind)
            wanted = (said.get("status"), said.get("reason")) == (status, reason)
            return said["message"] if wanted else None

        return self._wait_for(f"{kind} {status} {reason}", look, timeout_s)

    def settled(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the newest spec is served in full, and nothing is under way."""

        def look() -> bool:
            return (
                self.condition("Available") == "True"
                and self.condition("Progressing") == "False"
                and self.condition("Degraded") == "False"
            )

        self._wait_for("settled", look, timeout_s)

    def _wait_for(self, what: str, look: Callable[[], T | None], timeout_s: float) -> T:
        """As `wait_for`; if it is too late, the error tells what the conditions said instead."""
        try:
            return wait_for(f"{self.name}: {what}", look, timeout_s)
        except TooLate as exc:
            conditions = self.observed().get("status", {}).get("conditions", [])
            said = [f"{c['type']}={c['status']} {c['reason']}: {c['message']}" for c in conditions]
            raise TooLate("\n".join([str(exc), *said])) from None

    # --- what became of it --------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API, as the status says it."""
        found: str = self.status()["url"]
        return found

    def children(self) -> list[Object]:
        return self._kubectl.list(CHILD_KINDS, {"diptych.dev/service": self.name})

    def pods(self, role: str = "") -> list[Object]:
        """Pods that are not on their way out already; of all roles by default."""
        labels = {"diptych.dev/service": self.name, **({"diptych.dev/role": role} if role else {})}
        pods = self._kubectl.list("pods", labels)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def engines(self) -> set[str]:
        """The uids of the engine pods that are to stay."""
        return {p["metadata"]["uid"] for role in ENGINE_ROLES for p in self.pods(role)}

    def ready_pods(self, role: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods(role) if _is_ready(pod)]

    def has_ready(self, role: str, number: int, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until exactly so many pods of a role are there, all ready."""
        wait_for(
            f"{number} {role} pods",
            lambda: len(self.pods(role)) == number == len(self.ready_pods(role)),
            timeout_s,
        )

    def revision(self) -> str:
        """The revision that serves, once a rollout has ended."""
        found: str = self.status().get("currentRevision", "")
        return found

    def chat(self, text: str, max_tokens: int = 24) -> Object:
        """One answer of the OpenAI API, asked through the router's Service."""
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        answer: Object = json.loads(self._client.fetch(f"{self.url}/chat/completions", body))
        return answer

    def metric(self, role: str, name: str, revision: str = "") -> float:
        """Sum of a metric over the ready pods of a role, each asked itself; of any revision."""
        total = 0.0
        for pod in self.pods(role):
            of_revision = revision in ("", pod["metadata"]["labels"].get(REVISION_LABEL))
            if _is_ready(pod) and of_revision:
                text = self._client.fetch(f"http://{pod['status']['podIP']}:8000/metrics")
                total += sum(float(value) for key, value in _SAMPLE.findall(text) if key == name)
        return total

    def blocks_moved(self) -> float:
        """KV blocks that the present decode pods have received from prefill pods."""
        return self.metric("decode", "kv_transfer_blocks_received_total")


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
