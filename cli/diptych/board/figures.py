"""The figures of a service, read off its router's /metrics, and what went on between two. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

_OF_ENGINES: Final = {
    "diptych:num_requests_running": "running",
    "diptych:num_requests_waiting": "waiting",
    "diptych:kv_cache_blocks": "blocks",
    "diptych:kv_cache_blocks_free": "blocks_free",
    "diptych:engine_prompt_tokens_computed_total": "prompt_tokens",
    "diptych:engine_tokens_generated_total": "generated_tokens",
    "diptych:kv_transfer_bytes_received_total": "moved_bytes",
}
_OF_ROUTERS: Final = {
    "diptych:request_success_total": "answered",
    "diptych:time_to_first_token_seconds_count": "first_tokens",
    "diptych:time_to_first_token_seconds_sum": "first_token_s",
}
_LOADS: Final = "diptych:kv_transfer_loads_total"


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine at one moment. Totals count from its start."""

    waiting: int = 0
    running: int = 0
    blocks_used: int = 0
    blocks: int = 0
    tokens: int = 0
    """Prompt tokens computed, and tokens generated."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A service at one moment, as its router tells it."""

    engines: Mapping[str, EngineFigures] = field(default_factory=dict)
    """By the name of the pod, or by the address of an engine that has no name, as vLLM's."""
    answered: int = 0
    """Requests that have ended well."""
    hand_offs: int = 0
    """Hand-offs of KV that were completed, the canaries' included."""
    moved_bytes: int = 0
    first_tokens: int = 0
    """Streamed answers that have begun; only these have a time to the first token."""
    first_token_s: float = 0.0
    """The sum of these times."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What went on between two moments."""

    tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    """By engine; one that was not there before has none."""
    first_token_s: float | None = None
    """The mean of the answers that began, or else of the newest ones that did."""


def read_figures(metrics: str) -> Figures:
    """Raises `ValueError` if the text is no /metrics."""
    engines: dict[str, dict[str, int]] = {}
    router: dict[str, float] = {}
    hand_offs = 0
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if not math.isfinite(sample.value):
                continue
            name = sample.labels.get("engine", "").rpartition("/")[2]
            if (of_engine := _OF_ENGINES.get(sample.name)) and name:
                engines.setdefault(name, {})[of_engine] = int(sample.value)
            elif of_router := _OF_ROUTERS.get(sample.name):
                router[of_router] = router.get(of_router, 0.0) + sample.value
            elif sample.name == _LOADS and sample.labels.get("outcome") == "completed":
                hand_offs += int(sample.value)
    return Figures(
        engines={name: _engine(values) for name, values in engines.items()},
        answered=int(router.get("answered", 0)),
        hand_offs=hand_offs,
        moved_bytes=sum(values.get("moved_bytes", 0) for values in engines.values()),
        first_tokens=int(router.get("first_tokens", 0)),
        first_token_s=router.get("first_token_s", 0.0),
    )


def _engine(values: Mapping[str, int]) -> EngineFigures:
    blocks = values.get("blocks", 0)
    return EngineFigures(
        waiting=values.get("waiting", 0),
        running=values.get("running", 0),
        blocks_used=blocks - values.get("blocks_free", blocks),
        blocks=blocks,
        tokens=values.get("prompt_tokens", 0) + values.get("generated_tokens", 0),
    )


def pace(before: Figures, now: Figures, seconds: float, last: Pace) -> Pace:
    """What went on in `seconds`, after which `last` was known. Totals begin again at zero with
    their process: then all of them is new."""
    rates = {
        name: _since(before.engines[name].tokens, figures.tokens) / seconds
        for name, figures in now.engines.items()
        if name in before.engines and seconds > 0
    }
    again = now.first_tokens < before.first_tokens
    begun = now.first_tokens - (0 if again else before.first_tokens)
    took_s = now.first_token_s - (0.0 if again else before.first_token_s)
    return Pace(rates, took_s / begun if begun else last.first_token_s)


def _since(before: int, now: int) -> int:
    return now - before if now >= before else now
