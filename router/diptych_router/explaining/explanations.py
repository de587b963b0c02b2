"""Why the newest requests went where they did, and what came of it. Pure: times are passed in.

A request costs a few notes: at its arrival, when engines are chosen, when a placement brings its
first word, at its end. What was weighed is kept as the policy made it, and put into words when
somebody asks. Nothing of a prompt is kept but how many tokens it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Final

from diptych_protocol import EngineCoreOutput, EngineCoreRequest, RequestJourneyEvent
from diptych_protocol.admin import Explanation, RequestLine, RequestList, RequestReport
from diptych_router.actions import Add, Ended, Explain, Heard, Interrupted
from diptych_router.explaining.course import Placement
from diptych_router.explaining.explained import NameOf, line_of, report_of
from diptych_router.explaining.prediction_metrics import PredictionMetrics
from diptych_router.explaining.remembered import Attempt, Explained
from diptych_router.policy import Role

MOST_REQUESTS: Final = 4096
MOST_BYTES: Final = 32 << 20
"""What was weighed for requests takes at most so much; the oldest is forgotten first."""
MOST_ATTEMPTS: Final = 16
"""Attempts of one request that are remembered, the first ones."""
MOST_PLACEMENTS: Final = 2 * MOST_ATTEMPTS
"""Engines that had one request of which something is remembered, the first ones."""
MOST_CHARACTERS: Final = 256
"""A client's id and a reason are cut to this length."""
MOST_FOUND: Final = 32
"""Answers under one id that are told."""
API_PREFIXES: Final = ("chatcmpl-", "cmpl-")
"""What answers of the API have before the id of their request."""


class Explanations:
    """The newest requests of one router, in the order of their arrival."""

    def __init__(
        self,
        predictions: PredictionMetrics,
        *,
        policy: str,
        disaggregate: str,
        most_requests: int = MOST_REQUESTS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.policy, self.disaggregate = policy, disaggregate
        self._predictions = predictions
        self._most_requests, self._most_bytes = most_requests, most_bytes
        self._requests: OrderedDict[str, Explained] = OrderedDict()
        """By the router's own id."""
        self._heavy: OrderedDict[str, Explained] = OrderedDict()
        """Those of them that have what was weighed, in the order of their first choice."""
        self._placements: dict[str, Placement] = {}
        """By the ids by which engines know them."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    # --- notes --------------------------------------------------------------------------------

    def begin(self, request: EngineCoreRequest, now: float, unix_time: float) -> None:
        """A request has come."""
        core_id = request.request_id
        self._requests[core_id] = Explained(
            request.shown_id[:MOST_CHARACTERS],
            core_id,
            now,
            unix_time,
            len(request.prompt_token_ids or ()),
            tenant=request.tenant,
        )
        if len(self._requests) > self._most_requests:
            _, oldest = self._requests.popitem(last=False)
            self._heavy.pop(oldest.core_id, None)
            self.num_bytes -= oldest.num_bytes
            for placement in oldest.placements:
                self._placements.pop(placement.core_id, None)

    def chose(self, action: Explain, now: float) -> None:
        """Engines were chosen for an attempt."""
        known = self._requests.get(action.request_id)
        if known is None:
            return
        known.num_attempts += 1
        if len(known.attempts) == MOST_ATTEMPTS:
            return
        facts, decision = action.facts, action.decision
        prefill = facts["prefill"] if decision.prefill else ""
        known.attempts.append(
            Attempt(now, decision, prefill, facts["decode"], action.output_tokens)
        )
        if decision.weighed:
            added = sum([priced.num_bytes for priced in decision.weighed])
            self.num_bytes += added
            known.num_bytes += added
            self._heavy[known.core_id] = known
            while self.num_bytes > self._most_bytes:
                self._lighten(next(iter(self._heavy.values())))

    def sent(self, action: Add, now: float) -> None:
        """It goes to an engine."""
        core_id = action.request.request_id
        known = self._requests.get(core_id.rpartition("/")[0])
        if known is not None and len(known.placements) < MOST_PLACEMENTS:
            placement = Placement(core_id, action.engine, known.num_attempts, now)
            known.placements.append(placement)
            self._placements[core_id] = placement

    def told(self, engine: str, stations: Iterable[RequestJourneyEvent], now: float) -> None:
        """An engine tells how far requests have come there. engine: its key."""
        for station in stations:
            placement = self._placements.get(station.request_id)
            if placement is not None and placement.engine == engine:
                placement.heard(station, now)

    def delivered(self, outputs: Iterable[EngineCoreOutput], now: float) -> None:
        """Outputs are for those who wait."""
        for output in outputs:
            known = self._requests.get(output.request_id)
            if known is not None and output.new_token_ids:
                known.tokens.came(len(output.new_token_ids), now)

    def heard(self, action: Heard, now: float) -> None:
        """A placement has brought its first word."""
        known = self._requests.get(action.request_id)
        if known is not None and known.placements:
            newest = known.placements[-1]
            if newest.engine == action.engine and newest.first_word_s is None:
                newest.first_word_s = now
                newest.received_tokens = action.output.num_received_tokens or 0
        attempt = self._attempt(action.request_id)
        if attempt is None:
            return
        output = action.output
        if attempt.first_token_s is None:
            real_s = attempt.first_token_s = now - attempt.began_s
            attempt.cached_tokens = output.num_cached_tokens
            if not attempt.prefill:
                attempt.decoded_by.append(action.engine)
            if expected_s := attempt.first_token_expected_s:
                pool: Role = "prefill" if attempt.prefill else "decode"
                self._predictions.first_token[pool].saw(real_s / expected_s)
        elif len(attempt.decoded_by) < MOST_ATTEMPTS:
            if attempt.prefill and not attempt.decoded_by:
                real_s = attempt.hand_off_s = now - attempt.began_s - attempt.first_token_s
                attempt.received_tokens = output.num_received_tokens
                if expected_s := attempt.hand_off_expected_s:
                    self._predictions.hand_off.saw(real_s / expected_s)
            attempt.decoded_by.append(action.engine)

    def interrupted(self, action: Interrupted, now: float) -> None:
        """An attempt has ended early."""
        attempt = self._attempt(action.request_id)
        if attempt is not None:
            attempt.setback = action.setback.name.lower()
            attempt.why = action.why[:MOST_CHARACTERS]
            attempt.setback_s = now - attempt.began_s

    def ended(self, action: Ended, now: float) -> None:
        """A request is over."""
        known = self._requests.get(action.request_id)
        if known is not None:
            known.ended_s, known.outcome = now, action.outcome
            known.output_tokens = action.num_tokens

    # --- questions ----------------------------------------------------------------------------

    def of(self, request_id: str, name_of: NameOf) -> list[RequestReport]:
        """What is remembered under an id, the newest first: that of a client, with or without what
        the API puts before it, or the router's own. name_of: from an engine's key to its name."""
        wanted = {request_id, *(request_id.removeprefix(prefix) for prefix in API_PREFIXES)}
        found = (x for x in reversed(self._requests.values()) if _is_called(x, wanted))
        return [report_of(x, name_of) for x in islice(found, MOST_FOUND)]

    def explanation(self, request_id: str, name_of: NameOf) -> Explanation:
        """The same, with what was to be chosen by."""
        return Explanation(
            policy=self.policy,
            disaggregate=self.disaggregate,
            requests=self.of(request_id, name_of),
        )

    def newest(self, limit: int, name_of: NameOf) -> RequestList:
        lines: list[RequestLine] = [
            line_of(x, name_of) for x in islice(reversed(self._requests.values()), limit)
        ]
        return RequestList(
            requests=lines, num_remembered=len(self), most_remembered=self._most_requests
        )

    # --- bookkeeping --------------------------------------------------------------------------

    def _attempt(self, core_id: str) -> Attempt | None:
        """The newest one; None where it is not remembered."""
        known = self._requests.get(core_id)
        if known is None or not known.attempts or known.num_attempts > MOST_ATTEMPTS:
            return None
        return known.attempts[-1]

    def _lighten(self, known: Explained) -> None:
        """Forget what was weighed for a request."""
        self._heavy.pop(known.core_id, None)
        self.num_bytes -= known.num_bytes
        known.num_bytes = 0
        for attempt in known.attempts:
            attempt.decision = replace(attempt.decision, weighed=())


def _is_called(known: Explained, wanted: set[str]) -> bool:
    """Several prompts of one request have its id and a number."""
    request_id = known.request_id
    if request_id in wanted or known.core_id in wanted:
        return True
    whole, _, number = request_id.rpartition("-")
    return number.isdecimal() and whole in wanted
