"""Carries the figures from vLLM's workers and scheduler to its `/metrics`, in vLLM's form."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from diptych_vllm.figures import FIGURES, add


class StepFigures(KVConnectorStats):
    """The counts of one step, or of several."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Counters(KVConnectorPromMetrics):
    """One counter for each figure, with vLLM's own labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                metric_types[Counter](
                    name=f"vllm:diptych_{name}", documentation=meaning, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for name, meaning in FIGURES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(number)
