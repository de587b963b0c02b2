"""Prometheus metrics of the batches that a process runs."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from diptych_frontend.observability.metrics import PREFIX


class BatchMetrics:
    """Counts for one registry."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        labels = ("model_name",)
        lines = Counter(
            f"{PREFIX}batch_requests",
            "Requests of batches that have ended: completed or failed.",
            (*labels, "outcome"),
            registry=registry,
        )
        self.completed = lines.labels(model_name, "completed")
        self.failed = lines.labels(model_name, "failed")
        self.retries = Counter(
            f"{PREFIX}batch_retries",
            "Requests of batches that were refused for overload or failed, and are asked again.",
            labels,
            registry=registry,
        ).labels(model_name)
        self.running = Gauge(
            f"{PREFIX}batches_running",
            "Batches that this router works on.",
            labels,
            registry=registry,
        ).labels(model_name)
        self._ended = Counter(
            f"{PREFIX}batches", "Batches that ended, by status.", (*labels, "status"),
            registry=registry,
        )  # fmt: skip
        self._model_name = model_name

    def count_end(self, status: str) -> None:
        """Count a batch that has ended."""
        self._ended.labels(self._model_name, status).inc()
