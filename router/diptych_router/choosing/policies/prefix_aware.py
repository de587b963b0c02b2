"""Chooses the engines that cost all users the fewest seconds, by their cached prefixes and their
work.

docs/routing.md explains every term.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from diptych_router.choosing.policy import FETCH, READ, Duty, PoolView, RequestView, Terms
from diptych_router.engines.engine_table import Floats

EQUAL_WITHIN: Final[Mapping[Duty, float]] = MappingProxyType(
    {"prefill": 0.1, "decode": 0.01, "both": 0.1}
)
"""Reports are no more exact than that, and routers that all chose one engine would overload it.
Most of an answer's cost is the same everywhere, so less is left to chance there."""


class PrefixAware:
    """An engine's cost is in seconds: this request's, and those for which others wait for it."""

    reason = "cheapest"
    compares_duties = True
    reads_prefixes = True
    equal_within = EQUAL_WITHIN

    def costs(self, request: RequestView, duty: Duty, engines: PoolView) -> Terms:
        terms: dict[str, Floats]
        if duty == "decode":
            column = engines.table.column
            terms = {"transfer_s": engines.lacking * column["trip_token_s"] + column["trip_s"]}
        else:
            terms = _prompt(engines)
        if duty == "both":
            # Shared processors gain nothing by computing here, and streams that come meanwhile
            # would stand still: one of them counts. One token is a row as theirs are.
            rows = _rows(engines) + (engines.beside_s is not None)
            terms["stall_s"] = rows * terms["compute_s"] * (engines.lacking > 1.0)
        if duty != "prefill":
            if "answer" not in engines.made:
                engines.made["answer"] = _answer(request, engines)
            terms |= engines.made["answer"]
        if engines.adapter_s is not None:
            terms["adapter_s"] = engines.adapter_s
        return terms


def _rows(engines: PoolView) -> Floats:
    """[engines] Requests that decode there, with those that will in a moment."""
    column = engines.table.column
    return column["rows"] + column["coming"]


def _prompt(engines: PoolView) -> dict[str, Floats]:
    """Seconds until the first token, and those that others wait longer: in a queue that is busy a
    part L of the time, a second of work makes those that come after it wait L/(1-L) seconds."""
    column = engines.table.column
    token_s = column["prompt_token_s"]
    load = engines.table.prompt_load(engines.now)
    others = load / (1.0 - load)
    to_compute = engines.lacking
    fetch = read = None
    gain: Floats | float = 0.0
    if engines.stored is not None:
        trip = column["read_s"] + engines.stored * column["read_token_s"]
        gain = np.maximum(engines.stored * token_s * (1.0 + others) - trip, 0.0)
        read = trip * (gain > 0)
        to_compute = to_compute - engines.stored * (gain > 0)
    if engines.elsewhere is not engines.cached:
        missing = engines.elsewhere - engines.cached
        trip = column["trip_s"] + missing * column["trip_token_s"]
        pays = missing * token_s * (1.0 + others) - trip > gain
        if pays.any():
            fetch = trip * pays
            to_compute = np.where(pays, engines.lacking - missing, to_compute)
            if read is not None:
                read[pays] = 0.0
    compute = np.maximum(to_compute, 1.0) * token_s
    wait, delay = engines.table.waits(engines.now), compute * others
    compute += column["step_s"]
    if engines.beside_s is not None:
        both = np.minimum(engines.beside_s, compute)  # then each makes half of its way
        wait, delay = wait + both, delay + both
    terms = {"wait_s": wait, "compute_s": compute, "delay_s": delay}
    if fetch is not None:
        terms[FETCH] = fetch
    if read is not None:
        terms[READ] = read
    return terms


def _answer(request: RequestView, engines: PoolView) -> dict[str, Floats]:
    """Seconds from the first token to the last, here and for the streams beside it."""
    column = engines.table.column
    beside = _rows(engines) * column["row_s"]
    beside *= request.output_tokens
    own = request.output_tokens * column["step_s"]
    own += beside
    terms = {"steps_s": own, "streams_s": beside}
    wanted = engines.lacking + request.output_tokens
    short = (column["coming"] + 1.0) * wanted
    short -= column["free_tokens"]
    if short.max(initial=0.0) > 0:
        # Its streams give back all that they use within about as long as one of them takes, and
        # nothing before the first of them ends.
        part = short / column["used_tokens"]
        np.maximum(part, 1.0 / np.maximum(column["rows"], 1.0), out=part)
        part *= own
        part[short <= 0] = 0.0
        terms["room_s"] = part
    return terms


POLICY: Final = PrefixAware()
