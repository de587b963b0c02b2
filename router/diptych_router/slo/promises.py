"""What a service promises to each request: whether it can be kept, and whether it was.

`spec.slo` promises a time to the first token, and a mean time for each token after it. A request
whose first token would be late is refused when it arrives: it would use engines in vain, and make
others late as well. docs/promises.md explains the rules. Pure: time is passed in.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final, Literal, NamedTuple, Protocol

from diptych_frontend.fair_share import Account
from diptych_protocol import EngineOverloadedError, Slo, TenantOverloadedError
from diptych_router.policy import Role
from diptych_router.slo.caution import Caution
from diptych_router.slo.first_token import FirstToken
from diptych_router.slo.recent import RecentCounts

Promise = Literal["first_token", "inter_token"]
Outcome = Literal["kept", "missed", "refused"]

MOST_RETRY_S: Final = 60
"""Nobody is told to come back later than that: by then everything may be different."""


class Kind(NamedTuple):
    """What is counted apart."""

    pool: Role
    """Who computed, or was to compute: the prompt for the first token, or the tokens after it."""
    promise: Promise
    outcome: Outcome


class Promised(Protocol):
    """What is looked at of a request."""

    arrived_at: float
    first_at: float | None
    expected: FirstToken | None
    attempts: int
    account: Account
    generated: list[int]
    prefill_engine: str
    decode_engine: str

    @property
    def prefill_only(self) -> bool: ...


class Promises:
    """The promises of one service, and how often this router saw each kept."""

    def __init__(self, slo: Slo) -> None:
        self.first_token_ms = slo.ttft_ms
        self._caution = None if slo.ttft_ms is None else Caution(slo.ttft_ms / 1e3)
        self._inter_token_s = None if slo.inter_token_ms is None else slo.inter_token_ms / 1e3
        self.counts = Counter[Kind]()
        """Number of requests; several answers to one prompt count each."""
        self.recent = RecentCounts[Kind]()
        """The same of late, without what more engines could not change."""

    def refusal(
        self, routed: Promised, first: FirstToken, now: float
    ) -> EngineOverloadedError | None:
        """The error for a request that arrives now and would miss its deadline; None: serve it."""
        if self._caution is None or routed.prefill_only:
            return None
        late_s = self._caution.late_s(first)
        if late_s <= 0:
            routed.expected = first
            return None
        self._count(Kind(_computes_prompt(routed), "first_token", "refused"), now)
        retry_s = min(MOST_RETRY_S, math.ceil(late_s))
        promised = f"promised within {self._caution.promised_s:g} s (slo.ttftMs)"
        what = f"the first token is {promised}, and would come {late_s:.2f} s later"
        if routed.account.tenant and self._caution.late_s(first, alone=True) <= 0:
            return TenantOverloadedError(
                f"{what}, because of the other requests of this API key; retry in {retry_s} s",
                retry_after_s=retry_s,
            )
        return EngineOverloadedError(f"{what}; retry in {retry_s} s", retry_after_s=retry_s)

    def saw_first(self, routed: Promised, now: float) -> None:
        """The first token of a request is delivered."""
        routed.first_at = now
        if self._caution is not None:
            took_s = now - routed.arrived_at
            kept = took_s <= self._caution.promised_s
            if routed.expected is not None and routed.attempts == 1:
                self._caution.saw(routed.expected, took_s)
            possible = routed.expected is None or self._caution.is_possible(routed.expected)
            kind = Kind(_computes_prompt(routed), "first_token", "kept" if kept else "missed")
            self._count(kind, now, of_load=kept or possible)

    def saw_end(self, routed: Promised, now: float) -> None:
        """The last token of a request is delivered."""
        gaps = len(routed.generated) - 1
        if self._inter_token_s is not None and routed.first_at is not None and gaps > 0:
            kept = now - routed.first_at <= self._inter_token_s * gaps
            self._count(Kind("decode", "inter_token", "kept" if kept else "missed"), now)

    def saw_failure(self, routed: Promised, now: float, *, of_load: bool) -> None:
        """A request that was taken on ended with an error.

        of_load: because the engines had too much to do.
        """
        if routed.first_at is not None:
            if self._inter_token_s is not None:
                self._count(Kind("decode", "inter_token", "missed"), now, of_load=of_load)
        elif self._caution is not None and not routed.prefill_only:
            kind = Kind(_computes_prompt(routed), "first_token", "missed")
            self._count(kind, now, of_load=of_load)

    def _count(self, kind: Kind, now: float, *, of_load: bool = True) -> None:
        self.counts[kind] += 1
        if of_load:
            self.recent.add(kind, now)


def _computes_prompt(routed: Promised) -> Role:
    return "prefill" if routed.prefill_engine or not routed.decode_engine else "decode"
