"""Chooses the engines with the least open work."""

from __future__ import annotations

from typing import Final

from diptych_router.choosing.policy import EXACTLY, Duty, PoolView, RequestView, Terms
from diptych_router.engines.engine_table import Floats


class LeastLoaded:
    """An engine's cost is the tokens that this router has open there, and those that it could
    compute while it loads an adapter."""

    reason = "least loaded"
    compares_duties = False
    reads_prefixes = False
    equal_within = EXACTLY

    def costs(self, request: RequestView, duty: Duty, engines: PoolView) -> Terms:
        terms: dict[str, Floats] = {"open_tokens": engines.table.column["open_tokens"].copy()}
        if engines.adapter_s is not None:
            terms["adapter_tokens"] = engines.adapter_s / engines.table.column["prompt_token_s"]
        return terms


POLICY: Final = LeastLoaded()
