"""A service under traffic: disrupt it, wait until it is whole again, and count."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from e2e.chart import Chart
from e2e.figures import ARTIFACTS, Figures
from e2e.kubectl import Kubectl, KubectlError, Object, wait_for
from e2e.service import READY_TIMEOUT_S, Service
from e2e.traffic import Client, Report, Traffic

MAX_TOKENS = 24
BEFORE, AFTER = 4, 8
"""Requests that must have ended before a disruption, and after it."""
PACE_TIMEOUT_S = 180.0
ENGINE_RESOURCES = {"limits": {"cpu": "1"}, "requests": {"cpu": "100m", "memory": "512Mi"}}
"""One thread for each engine, and small enough that a laptop's node holds six."""
POOL: Object = {"replicas": 1, "resources": ENGINE_RESOURCES}


@dataclass
class Bench:
    """The service under test and all that disturbs it."""

    service: Service
    client: Client
    chart: Chart
    kubectl: Kubectl
    figures: Figures
    concurrency: int = 2

    def install(self, example: Object, row: str, **spec: Object) -> None:
        """Apply the example with some parts of its spec replaced; returns when it is settled."""
        engine = {**example["spec"].get("engine", {}), "kvCacheMemory": "256Mi"}
        started = time.monotonic()
        self.service.apply({**example, "spec": {**example["spec"], "engine": engine, **spec}})
        self.service.settled()
        self.measured(row, started)

    def measured(self, row: str, started: float) -> float:
        """Note the seconds since a moment of the monotonic clock as a figure of the row."""
        seconds = round(time.monotonic() - started, 1)
        self.figures.add(row, {"seconds": seconds})
        return seconds

    def traffic(self, row: str, address: tuple[str, str] | None = None) -> Traffic:
        """Traffic that is not yet flowing; what it sees is kept under the row's name.

        address: URL and model to ask; left out, the service's.
        """
        url, model = address or (self.service.url, self.service.name)
        return self.client.traffic(
            url,
            model,
            concurrency=self.concurrency,
            max_tokens=MAX_TOKENS,
            record=ARTIFACTS / f"{row.replace(' ', '-')}.jsonl",
        )

    def disrupt(
        self, row: str, disruption: Callable[[], None], address: tuple[str, str] | None = None
    ) -> Report:
        """Count what becomes of the traffic; the disruption returns once the service is whole."""
        with self.traffic(row, address) as traffic:
            traffic.wait_served(BEFORE, PACE_TIMEOUT_S)
            started = time.monotonic()
            disruption()
            self.measured(row, started)
            traffic.wait_served(AFTER, PACE_TIMEOUT_S)
        self.figures.add(row, traffic.report.figures())
        return traffic.report

    def kill(self, role: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """End a pod without a word: every process that a signal can reach, then the pod. Returns
        when its successor is ready."""
        name = self.service.ready_pods(role)[0]
        with suppress(KubectlError):  # the shell that kills is killed too
            self.kubectl.exec(name, "sh", "-c", "kill -9 -1")
        self._delete(role, name, grace_s=0, timeout_s=timeout_s)

    def dismiss(self, role: str) -> None:
        """Delete a pod as Kubernetes does it in a scale-down or an eviction."""
        self._delete(role, self.service.ready_pods(role)[0])

    def _delete(
        self,
        role: str,
        name: str,
        grace_s: int | None = None,
        timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        """Wait until the pod is gone or dying, and its pool has as many ready pods as before."""
        number = len(self.service.pods(role))
        self.kubectl.delete("pod", name, grace_s=grace_s)
        wait_for(
            f"{name} has a successor",
            lambda: name not in [pod["metadata"]["name"] for pod in self.service.pods(role)],
            60,
        )
        self.service.has_ready(role, number, timeout_s)
