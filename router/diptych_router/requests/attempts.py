"""The attempts of requests: they begin or are delayed, are handed over, begin again, and end.

Each step writes the request's record, and returns the actions to take. `RequestTable` decides when
to take it. There is no I/O here but the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from diptych_protocol import (
    DiptychError,
    EngineGenerateError,
    EngineOverloadedError,
    InvalidRequestError,
    KVTransferParams,
)
from diptych_router.choosing.policy import FETCH, READ, Decision, RequestView
from diptych_router.engines.health_book import ClosedWays
from diptych_router.requests.placements import HeldRequests, Placements
from diptych_router.requests.promises import Promises
from diptych_router.requests.request_record import Setback
from diptych_router.requests.routed_request import RoutedRequest, Stage
from diptych_router.requests.table_interface import (
    Abort,
    Action,
    Add,
    Announce,
    EngineAccount,
    Fail,
    Fleet,
    Release,
    WakeAt,
)

log = logging.getLogger(__name__)

LEAST_PATIENCE_S: Final = 30.0
"""No deadline is shorter: an engine may compile kernels, or load an adapter."""
MARGIN: Final = 8.0
"""What is expected may take so many times as long."""
SLOW_TOKEN_S: Final = 0.02
"""The time for each token of a prompt, if the policy gives no seconds."""
BEFORE_TOKEN: Final = ("wait_s", "compute_s", "transfer_s", "room_s", "adapter_s", FETCH, READ)
"""Terms of a decision that delay a request's first token."""


@dataclass(eq=False, slots=True)
class Attempts:
    """Accepts each request, places it with engines, and removes it when it is over: from
    `_requests`, which has all by their own ids, `_held` and `_placements`. See `RequestTable`."""

    _fleet: Fleet
    _requests: dict[str, RoutedRequest]
    _held: HeldRequests
    _placements: Placements
    _promises: Promises
    _random_bits: Callable[[int], int]
    _first_token_s: float
    ways: ClosedWays = field(default_factory=ClosedWays)

    # --- the beginning ------------------------------------------------------------------------

    def take_on(self, routed: RoutedRequest, now: float) -> list[Action]:
        """Begin a request that has just arrived, or refuse it if its promise could not be kept."""
        if routed.original.deadline_ms is None:
            return self.begin(routed, now)
        decision = self._fleet.choose(routed.view)
        first = None if decision is None else self._fleet.first_token(routed.view, decision)
        if decision is not None and first is not None:  # else it may be served in time
            routed.record.pool = "prefill" if decision.prefill else "decode"
            refusal = self._promises.refusal(routed.record, first, now)
            if refusal is not None:
                log.info("request %s is refused: %s", routed.request_id, refusal)
                return self._end_with(routed, "refused", refusal, now)
        return self.begin(routed, now, decision=decision)

    def begin(
        self, routed: RoutedRequest, now: float, before: str = "", decision: Decision | None = None
    ) -> list[Action]:
        """Start an attempt with what is known so far, or wait until that is possible. before: what
        went wrong with the previous attempt. decision: the engines, if they are already chosen."""
        if routed.record.num_attempts == 0 and self._placements.accounts.several:
            routed.crowded = self._placements.is_crowded(routed.account.tenant)
            if routed.crowded:
                return self._hold(routed, now, "", "your other requests keep the engines busy")
        view = routed.view
        if decision is None:
            decision = self._fleet.choose(view, routed.avoided)
            if decision is None and routed.suspects:
                decision = self._fleet.choose(view, routed.full)
        if self.ways.of:
            decision = self._by_open_ways(routed, decision, now)
        decode = self._fleet.get(decision.decode) if decision is not None else None
        if decision is None or decode is None:
            return self._hold(routed, now, before)
        prefill = (self._fleet.get(decision.prefill) if decision.prefill else None) or decode
        return self._start(routed, view, decision, prefill, decode, now)

    def _by_open_ways(
        self, routed: RoutedRequest, decision: Decision | None, now: float
    ) -> Decision | None:
        """Leave out the prefill engines from which nothing gets to the engine that would decode. It
        needs none."""
        view, out = routed.view, set[str]()
        while decision is not None and decision.prefill:
            if not self.ways.closed(decision.prefill, decision.decode, now):
                break
            out.add(decision.prefill)
            decision = self._fleet.choose(view, {*routed.avoided, *out})
            decision = decision or self._fleet.choose(view, {*routed.full, *out})
        if out and decision is None:
            decision = self._fleet.choose(replace(view, disaggregate="never"), routed.full)
        return decision

    def begin_crowded(self, now: float) -> list[Action]:
        """Begin requests whose tenant is next in turn."""
        actions: list[Action] = []
        full = self._placements.crowded()
        while (routed := self._held.next_crowded(full)) is not None:
            self._held.release(routed.request_id)
            actions += self.begin(routed, now)
            if self._placements.is_crowded(routed.account.tenant):
                full.add(routed.account.tenant)
        return actions

    def _start(
        self,
        routed: RoutedRequest,
        view: RequestView,
        decision: Decision,
        prefill: EngineAccount,
        decode: EngineAccount,
        now: float,
    ) -> list[Action]:
        """Start an attempt at these engines, which may be one and the same."""
        number = routed.record.num_attempts + 1
        routed.patience_s = patience_s(
            decision.terms, routed.record.prompt_tokens, self._first_token_s
        )
        if number == 1:
            routed.account.served += routed.record.prompt_tokens
            routed.hold_until = None  # until now it may have waited for its tenant's turn
        routed.prefill_engine, routed.decode_engine = decision.prefill or "", decode.key
        routed.lender, routed.leaves_disk = "", decision.leaves_disk
        source = self._source_of(decision, prefill)
        if not routed.original.prefetches:  # of which its engine computes nothing
            self._fleet.placed(view, decision, now)
        facts = {
            "prefill": prefill.name,
            "decode": decode.name,
            "reason": decision.reason,
            "attempts": number,
        }
        if routed.record.revisions:
            facts["revision"] = ", ".join(routed.record.revisions)
        level = logging.DEBUG if number == 1 else logging.INFO
        log.log(level, "request %s: %s", routed.request_id, facts)
        if source is not None:
            facts["fetches"] = f"{decision.fetch_tokens} tokens from {source.remote_engine_id}"
        self._placements.records.chose(routed.record, decision, facts, view.output_tokens, now)
        if prefill is decode:
            self._placements.place(routed, decode, Stage.DECODE, now)
            return [Add(decode.key, routed.aggregated_request(source))]
        # P computes, and D gets ready meanwhile.
        self._placements.place(routed, prefill, Stage.PREFILL, now, planned=decode)
        lease_id, lends = f"{self._random_bits(128):032x}", prefill.lends
        add = Add(prefill.key, routed.prefill_request(lease_id, source))
        coming = None if lends is None else routed.announce(decode.key, lends, lease_id)
        return [add] if coming is None else [add, Announce(decode.key, coming)]

    def _source_of(self, decision: Decision, computing: EngineAccount) -> KVTransferParams | None:
        """Who the engine that computes the prompt may ask for a prefix; None: nobody. The router
        has no part in what follows: the two engines make the lease between them."""
        holder = None if decision.fetch is None else self._fleet.get(decision.fetch)
        if holder is None or holder is computing or holder.fingerprint != computing.fingerprint:
            return None
        if holder.lends is None or decision.fetch_tokens <= 0:
            return None
        return msgspec.structs.replace(holder.lends, remote_num_tokens=decision.fetch_tokens)

    def _hold(
        self, routed: RoutedRequest, now: float, before: str, why: str = "no engine is usable"
    ) -> list[Action]:
        try:
            until = self._held.add(routed, now, why)
        except EngineOverloadedError as exc:
            why = f"{before}; then: {exc}" if before else str(exc)
            return self.fail(routed, EngineOverloadedError(why), now)
        log.info("request %s waits: %s", routed.request_id, why)
        surplus = self._held.surplus(routed)
        if surplus is None:
            return [WakeAt(until)]
        crowded_out = EngineOverloadedError("too many requests wait, most of this API key")
        return [WakeAt(until), *self.fail(surplus, crowded_out, now)]

    # --- another engine's turn ----------------------------------------------------------------

    def hand_over(self, routed: RoutedRequest, now: float) -> list[Action]:
        """Let the next engine take over, because the present one lends its KV."""
        taker = self._taker(routed)
        if taker is None:
            return self.retry(routed, Setback.MOVE, "no decode engine can take it over", now)
        if routed.announced == taker.key:
            routed.announced, actions = "", []  # its next placement has the id announced there
        elif taker.key == routed.engine:
            # It has turned, and remembers the prompt. A lease of itself would last until it was
            # read, and hold the room that its reader waits for.
            actions = _let_go(routed)
        else:
            actions = _unannounce(routed)
        routed.lender = routed.engine
        self._placements.place(routed, taker, Stage.DECODE, now)
        routed.decode_engine = taker.key
        return [*actions, Add(taker.key, routed.decode_request())]

    def _taker(self, routed: RoutedRequest) -> EngineAccount | None:
        """The planned engine if it still may (one that has turned, if it fetches the KV by now:
        when it no longer does, the lease ends), else one that fits, else the planned one after all
        (while it drains, or has turned, it still takes what was meant for it)."""
        fingerprint = (routed.lease or {}).get("compat")
        planned = self._fleet.get(routed.decode_engine)
        if planned is not None and (
            planned.key == routed.engine  # it is the one that hands off
            or fingerprint not in (None, planned.fingerprint)  # restarted as something else
        ):
            planned = None
        still = planned is not None and (
            planned.role == "decode" or routed.announced == planned.key
        )
        if still and self._fleet.may_begin_at(routed.decode_engine):
            return planned
        successor = self._fleet.successor(str(fingerprint))
        return planned if successor is None and planned is not None and planned.up else successor

    def way_failed(self, routed: RoutedRequest, now: float) -> None:
        """Record that a hand-off failed. If its lender is gone, that is why."""
        sender, receiver = self._fleet.get(routed.lender), self._fleet.get(routed.engine)
        if sender is None or receiver is None or not sender.up or sender.withdrawn:
            return
        closed_s = self.ways.failed(sender.key, receiver.key, now)
        if closed_s:
            log.warning(
                "hand-offs from %s to %s fail one after the other; none is tried for %d s",
                *(sender.name, receiver.name, closed_s),
            )

    def retry(self, routed: RoutedRequest, setback: Setback, why: str, now: float) -> list[Action]:
        """Begin another attempt elsewhere, or end the request with an error."""
        record = routed.record
        log.warning("request %s, attempt %d: %s", routed.request_id, record.num_attempts, why)
        again = routed.set_back(setback)
        record.set_back(setback, why, again, now)
        self._placements.leave(routed)
        actions = _let_go(routed)
        if again:
            if setback in (Setback.ERROR, Setback.LOSS, Setback.LATE):
                record.went_wrong(ended=False)
            return [*actions, *self.begin(routed, now, before=why)]
        error: DiptychError
        match setback:
            case Setback.FULL:
                error = EngineOverloadedError(why)
            case Setback.REFUSED:
                error = InvalidRequestError(why, param=routed.wrong_field)
            case _:
                error = EngineGenerateError(why)
        return [*actions, *self.fail(routed, error, now)]

    # --- the end ------------------------------------------------------------------------------

    def fail(self, routed: RoutedRequest, error: DiptychError, now: float) -> list[Action]:
        """End a request with an error for its user."""
        of_load = isinstance(error, EngineOverloadedError)
        self._promises.saw_failure(routed.record, now, of_load=of_load)
        if not isinstance(error, InvalidRequestError):
            routed.record.went_wrong(ended=True)
        return self._end_with(routed, "error", error, now)

    def _end_with(
        self, routed: RoutedRequest, outcome: str, error: DiptychError, now: float
    ) -> list[Action]:
        why = str(error), type(error).__name__
        return [*self.end(routed, outcome, now, *why), Fail(routed.request_id, error)]

    def end(
        self, routed: RoutedRequest, outcome: str, now: float, error: str = "", error_type: str = ""
    ) -> list[Action]:
        del self._requests[routed.request_id]
        self._held.release(routed.request_id)
        self._placements.leave(routed)
        self._placements.accounts.close(routed.account)
        self._placements.records.ended(routed.record, outcome, now, error, error_type)
        return _let_go(routed)


def _let_go(routed: RoutedRequest) -> list[Action]:
    """Release the lease that no decode engine has read yet, and take back the announcement."""
    lease, routed.lease = routed.lease, None
    actions: list[Action] = [] if lease is None else [Release(routed.core_id, lease)]
    return [*actions, *_unannounce(routed)] if routed.announced else actions


def _unannounce(routed: RoutedRequest) -> list[Action]:
    """The engine that was told that this request would come waits in vain."""
    engine = routed.withdraw_announcement()
    return [Abort(engine, [routed.core_id])] if engine else []


def patience_s(
    terms: Mapping[str, float], prompt_tokens: int, least_s: float = LEAST_PATIENCE_S
) -> float:
    """Return seconds for each engine of an attempt. terms: `Decision.terms`. prompt_tokens: of the
    request."""
    if "compute_s" in terms:
        expected = 0.0
        for name in BEFORE_TOKEN:
            if name in terms:
                expected += terms[name]
        return least_s + MARGIN * expected
    return least_s + SLOW_TOKEN_S * (prompt_tokens + terms.get("open_tokens", 0.0))
