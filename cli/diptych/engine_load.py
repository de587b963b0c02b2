"""Reads engines' load from a router's metrics, for `diptych up` and both `top`, without I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import prometheus_client.samples
from prometheus_client.parser import text_string_to_metric_families
from rich.markup import escape
from rich.table import Table

from diptych.watching import bare_table

_FIELDS = {
    "diptych:num_requests_running": "running",
    "diptych:num_requests_waiting": "waiting",
    "diptych:queued_prompt_tokens": "queued_tokens",
    "diptych:kv_cache_usage_perc": "kv_usage",
    "diptych:kv_cache_blocks": "blocks",
    "diptych:kv_cache_blocks_free": "blocks_free",
    "diptych:kv_cache_blocks_pinned": "blocks_pinned",
    "diptych:kv_transfer_leases_held": "leases",
    "diptych:engine_prompt_tokens_computed_total": "prompt_tokens",
    "diptych:engine_tokens_generated_total": "generated_tokens",
    "diptych:kv_transfer_bytes_received_total": "received_bytes",
}
ROLE_ORDER = {"prefill": 0, "decode": 1}


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine at one moment, as its router reports it."""

    role: str
    name: str
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    """Prompt tokens that have not been computed yet."""
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""
    blocks: int = 0
    """The total of KV blocks."""
    blocks_free: int = 0
    leases: int = 0
    prompt_tokens: int = 0
    """Tokens computed since the engine's start."""
    generated_tokens: int = 0
    received_bytes: int = 0
    """Bytes of KV received from other engines."""
    blocks_pinned: int = 0
    """KV blocks that a next turn is expected to need."""

    @property
    def tokens(self) -> int:
        """Prompt tokens computed plus tokens generated, since the engine's start."""
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """A sample, and the rate since the one before it."""

    sample: Sample
    tokens_per_s: float | None
    """Prompt tokens computed plus tokens generated; None for a new engine."""


def items_of(metrics: str) -> list[prometheus_client.samples.Sample]:
    """Return all finite values of a /metrics. Raises `ValueError` if the text is something else."""
    families = text_string_to_metric_families(metrics)
    return [item for family in families for item in family.samples if math.isfinite(item.value)]


def read_samples(items: Iterable[prometheus_client.samples.Sample]) -> dict[str, Sample]:
    """Return the engines in a router's /metrics, by label."""
    values: dict[str, dict[str, float]] = {}
    for item in items:
        field = _FIELDS.get(item.name)
        engine = item.labels.get("engine")
        if field and engine:
            values.setdefault(engine, {})[field] = item.value
    return {engine: _sample(engine, found) for engine, found in values.items()}


def _sample(engine: str, values: Mapping[str, float]) -> Sample:
    role, _, name = engine.partition("/")  # an engine without a name has its address: tcp://...
    counts: dict[str, Any] = {
        key: value if key == "kv_usage" else int(value) for key, value in values.items()
    }
    return Sample(role=role, name=name, **counts)


def merged(of_routers: Sequence[Mapping[str, Sample]]) -> dict[str, Sample]:
    """Merge what routers report: the same of each engine, but one may know of more engines."""
    known: dict[str, Sample] = {}
    for samples in of_routers:
        known = {**samples, **known}
    return known


def loads(before: Mapping[str, Sample], now: Mapping[str, Sample], seconds: float) -> list[Load]:
    """Return the loads, prefill engines first, each pool sorted by name."""
    found = [
        Load(sample, tokens_per_s(before.get(key), sample, seconds)) for key, sample in now.items()
    ]
    return sorted(found, key=lambda x: (ROLE_ORDER.get(x.sample.role, 2), x.sample.name))


def tokens_per_s(before: Sample | None, now: Sample, seconds: float) -> float | None:
    """Return the rate; None for a new engine."""
    if before is None or seconds <= 0:
        return None
    # Totals start at zero again with the engine.
    again = now.tokens < before.tokens
    return (now.tokens if again else now.tokens - before.tokens) / seconds


def table(found: Sequence[Load]) -> Table:
    numbers = ("RUNNING", "WAITING", "QUEUED TOKENS", "KV", "PINNED", "LEASES", "TOKENS/S")
    shown = bare_table("ENGINE", "ROLE", *numbers, right=numbers, wrap=numbers)
    for load in found:
        sample = load.sample
        shown.add_row(
            escape(sample.name),
            escape(sample.role),
            *map(str, (sample.running, sample.waiting, sample.queued_tokens)),
            f"{sample.kv_usage:.0%}",
            f"{sample.blocks_pinned / max(1, sample.blocks):.0%}",
            str(sample.leases),
            "-" if load.tokens_per_s is None else f"{load.tokens_per_s:.1f}",
        )
    return shown


def as_json(found: Sequence[Load]) -> list[dict[str, Any]]:
    return [asdict(load.sample) | {"tokens_per_s": load.tokens_per_s} for load in found]
