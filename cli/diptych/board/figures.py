"""Reads a service's figures from its router's /metrics, and compares two readings, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from diptych.engine_load import Sample, items_of, read_samples, tokens_per_s

_OF_ROUTERS: Final = {
    "diptych:request_success_total": "answered",
    "diptych:time_to_first_token_seconds_count": "first_tokens",
    "diptych:time_to_first_token_seconds_sum": "first_token_s",
}
_LOADS: Final = "diptych:kv_transfer_loads_total"


@dataclass(frozen=True, slots=True)
class Figures:
    """A service at one moment, as its router reports it."""

    engines: Mapping[str, Sample] = field(default_factory=dict)
    """By the name of the pod."""
    answered: int = 0
    """Requests that ended successfully."""
    hand_offs: int = 0
    """Completed hand-offs of KV, including those of canaries."""
    moved_bytes: int = 0
    first_tokens: int = 0
    """Streamed answers that have begun. Only these have a time to the first token."""
    first_token_s: float = 0.0
    """The sum of their times to the first token."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What happened between two moments."""

    tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    """By engine. An engine that is new has no entry."""
    first_token_s: float | None = None
    """The mean of the answers that began, or else of the last ones that did."""


def read_figures(metrics: str) -> Figures:
    """Read /metrics. Raises `ValueError` if the text is something else."""
    items = items_of(metrics)
    samples = read_samples(items).values()
    engines = {sample.name.rpartition("/")[2]: sample for sample in samples}  # no tcp://
    totals = dict.fromkeys(_OF_ROUTERS.values(), 0.0)
    for item in items:
        if field := _OF_ROUTERS.get(item.name):
            totals[field] += item.value
    loads = (item for item in items if item.name == _LOADS)
    return Figures(
        engines=engines,
        answered=int(totals["answered"]),
        hand_offs=int(sum(x.value for x in loads if x.labels.get("outcome") == "completed")),
        moved_bytes=sum(sample.received_bytes for sample in engines.values()),
        first_tokens=int(totals["first_tokens"]),
        first_token_s=totals["first_token_s"],
    )


def pace(before: Figures, now: Figures, seconds: float, last: Pace) -> Pace:
    """Return what happened in `seconds` since `last`. A process that started again counts from
    zero; then all of its total is new."""
    rates = {
        name: rate
        for name, sample in now.engines.items()
        if (rate := tokens_per_s(before.engines.get(name), sample, seconds)) is not None
    }
    again = now.first_tokens < before.first_tokens
    begun = now.first_tokens - (0 if again else before.first_tokens)
    took_s = now.first_token_s - (0.0 if again else before.first_token_s)
    return Pace(rates, took_s / begun if begun else last.first_token_s)
