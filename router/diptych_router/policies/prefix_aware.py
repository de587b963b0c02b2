"""The engines that cost all users the fewest seconds, by what each remembers and has to do.

docs/routing.md explains every term.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diptych_router.engine_table import Floats
from diptych_router.policy import Duty, Engines, RequestView, Terms


class PrefixAware:
    """An engine costs seconds: this request's own, and those of the streams that it slows down."""

    reason = "cheapest"
    compares_duties = True

    def costs(self, request: RequestView, duty: Duty, engines: Engines) -> Terms:
        """See `Policy.costs`."""
        lacking = np.maximum(request.prompt_tokens - engines.cached, 0.0)
        terms: dict[str, Floats] = {}
        if duty != "decode":
            terms |= _prompt(lacking, engines)
        if duty == "decode":
            trip = engines.column("trip_s") + lacking * engines.column("trip_token_s")
            terms["transfer_s"] = trip
        if duty == "both":
            terms["stall_s"] = engines.table.decoding() * terms["compute_s"]
        if duty != "prefill":
            terms |= _answer(request, lacking, engines)
        return terms


def _prompt(lacking: Floats, engines: Engines) -> dict[str, Floats]:
    """Seconds until the first token, and those that the next request there waits longer."""
    rate = engines.column("prompt_token_s")
    compute = np.maximum(lacking, 1.0) * rate
    return {
        "wait_s": engines.table.waiting_tokens(engines.now) * rate,
        "compute_s": engines.column("step_s") + compute,
        "delay_s": compute,
    }


def _answer(request: RequestView, lacking: Floats, engines: Engines) -> dict[str, Floats]:
    """Seconds from the first token to the last, here and for the streams beside it."""
    rows, row_s = engines.table.decoding(), engines.column("row_s")
    own = request.output_tokens * (engines.column("step_s") + rows * row_s)
    wanted = lacking + request.output_tokens
    free = engines.column("free_tokens") - engines.table.on_the_way() * wanted
    all_tokens = engines.column("all_tokens")
    used = np.maximum(all_tokens - engines.column("free_tokens"), 1.0)
    # Its streams give back all that they use within about as long as one of them takes, and nothing
    # before the first of them ends.
    part = np.maximum((wanted - free) / used, 1.0 / np.maximum(rows, 1.0))
    room = np.where((all_tokens > 0) & (wanted > free), part * own, 0.0)
    return {"steps_s": own, "streams_s": request.output_tokens * rows * row_s, "room_s": room}


POLICY: Final = PrefixAware()
