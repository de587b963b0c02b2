"""All requests of one router, and what becomes of each: events and the time in, actions out.

    held ◀──no engine── begin ──▶ PREFILL ──token + lease──▶ (between) ──▶ DECODE ──▶ over
      └──fleet changed───▶ ▲                                                 │
                           └───── error, loss, full, move: a new attempt ────┘

What always holds:

- **A request is at one engine at most.** Every placement has an id of its own (`core_id`). It is
  known from the moment the table says `Add` until its engine has said its last word, is lost, or
  is told `Abort`; whatever any engine says under another id is not heard, and is aborted there.
- **Each generated token is delivered once, in order.** Only the engine in charge is heard, and the
  next one begins after the tokens that are delivered.
- **Every lease that an engine's output brings is handed to one decode engine, or released.** It is
  released when that engine fails, is lost or loses its turn before it has read it, and when the
  request is over before anybody has.
- **What is announced comes, or is withdrawn**: an engine that was told to expect a request gets it
  under that id, or an `Abort` of it, even if that is all that is left to do.
- **Every request ends**: with a last output that is delivered, or with one `Fail`, or because it is
  withdrawn. Attempts are bounded (`MAX_ERRORS`, `MAX_LOSSES`, `MAX_LATE`) and so is the time
  without an engine (`WakeAt`); who waits for another answer to its prompt begins when that is over,
  at the latest. An engine that brings no token in time (`give_up_late`) or hangs (`engine_hangs`)
  loses it, if another can take it.

Pure but for the log: no socket, thread or clock. Who calls it carries out what it returns, in
order; what an event returns that came of carrying something out is done after what is left of that.
The fleet answers questions of the moment.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineGenerateError,
    EngineOverloadedError,
    FinishReason,
    KVTransferParams,
)
from diptych_router.actions import (
    Abort,
    Action,
    Add,
    Announce,
    AskHandOff,
    Deliver,
    Ended,
    Explain,
    Fail,
    Heard,
    Interrupted,
    Release,
    WakeAt,
)
from diptych_router.fleet import Engine, Fleet
from diptych_router.health.health_book import Failure
from diptych_router.health.patience import LEAST_S, patience_s
from diptych_router.held_requests import HeldRequests
from diptych_router.policy import Decision
from diptych_router.routed_request import MAX_LATE, RoutedRequest, Setback, Stage, is_given_up
from diptych_router.siblings import Siblings, same_way
from diptych_router.slo.promises import Promises
from diptych_router.tenant_places import TenantPlaces

log = logging.getLogger(__name__)

FIRST_GUESS_TOKENS: float = 128.0
"""The length of an answer, before any has ended."""
NEWEST_PART = 0.02
"""How much the newest answer counts in the average of their lengths."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """What an engine's last word about a request leads to, once its tokens are delivered."""

    routed: RoutedRequest
    setback: Setback | None
    """None: the engine did its part, and the next one is to take over."""
    why: str = ""


class RequestTable:
    """Every request from `submit` to its end."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        hold_seconds: float,
        max_held: int,
        promises: Promises,
        random_bits: Callable[[int], int] = secrets.randbits,
        first_token_s: float = LEAST_S,
    ) -> None:
        """`random_bits(k)` is k bits nobody can guess. `first_token_s`: the shortest deadline of a
        first token. Only a simulation brings its own of both."""
        self.requests: dict[str, RoutedRequest] = {}
        """By the request's own id."""
        self.promises = promises
        self._places = TenantPlaces()
        self.tenants = self._places.accounts
        self.held = HeldRequests(hold_seconds, max_held, self.tenants)
        self._fleet = fleet
        self._random_bits, self._first_token_s = random_bits, first_token_s
        self._placed: dict[str, RoutedRequest] = {}
        """By the id under which an engine has it now."""
        self._charges: dict[str, list[tuple[Engine, int]]] = {}
        """What each request adds to the open tokens of engines."""
        self._plans: dict[str, Engine | None] = {}
        """The engine that is to take each request over, if it is at another one."""
        self._turns: list[_Turn] = []
        self._usual_output = FIRST_GUESS_TOKENS
        """How many tokens answers have, on average; the newest count most."""
        self._siblings = Siblings()

    def is_placed(self, core_id: str) -> bool:
        """An engine has this placement, or is to get it."""
        return core_id in self._placed

    # --- users --------------------------------------------------------------------------------

    def submit(
        self, request: EngineCoreRequest, max_model_len: int, now: float, leader: str | None = None
    ) -> Sequence[Action]:
        """A new request. leader: another one for an answer to the same prompt, which goes ahead."""
        routed = self.requests[request.request_id] = RoutedRequest(request, max_model_len)
        request.deadline_ms = self.promises.first_token_ms
        routed.arrived_at = now
        routed.account = self.tenants.open(request.tenant)
        routed.usual_output = self._usual_output
        if leader and self._siblings.wait(routed, self.requests.get(leader)):
            return ()
        return self._begin(routed, now, arrives=True)

    def withdraw(
        self, request_ids: Iterable[str], now: float, outcome: str = "abort"
    ) -> Sequence[Action]:
        """Nobody wants these any more, or they have ended before their engines knew. Unknown ids
        are ignored."""
        actions: list[Action] = []
        by_engine: dict[str, list[str]] = {}
        for request_id in request_ids:
            routed = self.requests.get(request_id)
            if routed is None:
                continue
            if routed.has_decoded:
                self._fleet.went_well(routed.engine, routed.prefill_engine)
            if routed.core_id in self._placed:
                by_engine.setdefault(routed.engine, []).append(routed.core_id)
            actions += self._forget(routed, outcome)
        actions[:0] = (Abort(engine, ids) for engine, ids in by_engine.items())
        return self._and_followers(actions, now)

    # --- engines ------------------------------------------------------------------------------

    def receive(
        self, engine: str, outputs: Iterable[EngineCoreOutput], now: float
    ) -> Sequence[Action]:
        """An engine's outputs. `Deliver` what they hold, then call `take_turns`: the first token
        does not wait for the hand-off, and whom a stop string has ended needs none."""
        deliver: list[EngineCoreOutput] = []
        actions: list[Action] = [Deliver(deliver)]
        heard: list[Action] = []
        strays: list[str] = []
        for output in outputs:
            routed = self._placed.get(output.request_id)
            if routed is None or routed.engine != engine:
                actions += _offered(output)
                if not output.finished:
                    strays.append(output.request_id)
            elif output.finish_reason is None and output.kv_transfer_params is None:
                routed.absorb(output)  # most outputs are like this one
                if routed.suspects:
                    self._clear_up(routed)
                if output.new_token_ids:
                    deliver.append(output)
                    if routed.unheard:
                        routed.unheard = False
                        heard.append(Heard(routed.request_id, engine, output))
                    if routed.first_at is None:
                        self.promises.saw_first(routed, now)
            elif output.finish_reason is FinishReason.ERROR:
                why = output.error or "the engine gave no reason"
                actions += _offered(output)
                setback = routed.setback_of(output.error_kind)
                if setback is Setback.FULL:
                    self._fleet.was_full(engine)
                elif output.error_param is None:
                    routed.suspect()  # with a parameter it is the request that is wrong
                self._pass_turn(routed, setback, why)
            elif is_given_up(output):
                link = self._fleet.get(engine)
                setback = Setback.MOVE if link is not None and link.withdrawn else Setback.LOSS
                name = link.name if link is not None else engine
                self._pass_turn(routed, setback, f"engine {name} gave it up")
            else:
                if routed.unheard:
                    routed.unheard = False
                    heard.append(Heard(routed.request_id, engine, output))
                actions += self._absorb(routed, output, now)
                if output.new_token_ids or output.finished:
                    deliver.append(output)
        if strays:
            actions.append(Abort(engine, strays))
        return [*heard, *actions] if heard else actions

    def take_turns(self, now: float) -> Sequence[Action]:
        """Go on with what engines have ended, as far as users still want it."""
        turns, self._turns = self._turns, []
        actions: list[Action] = []
        for turn in turns:
            if self.requests.get(turn.routed.request_id) is not turn.routed:
                continue
            if turn.setback is None:
                actions += self._hand_over(turn.routed, now)
            else:
                actions += self._retry(turn.routed, turn.setback, turn.why, now)
        return self._and_followers(actions, now)

    def not_sent(self, core_id: str, why: str, now: float) -> Sequence[Action]:
        """An `Add` did not reach its engine."""
        routed = self._placed.get(core_id)
        if routed is None:
            return ()
        return self._and_followers(self._retry(routed, Setback.LOSS, why, now), now)

    def engine_lost(self, engine: str, why: str, now: float) -> Sequence[Action]:
        """An engine is gone, and every placement with it."""
        link = self._fleet.get(engine)
        setback = Setback.MOVE if link is not None and link.withdrawn else Setback.LOSS
        actions: list[Action] = []
        lost = [r for r in self._placed.values() if r.engine == engine]
        if lost and setback is Setback.LOSS:
            self._fleet.went_badly(engine, Failure.LOST)
        for routed in lost:
            actions += self._retry(routed, setback, why, now)
        return self._and_followers(actions, now)

    def engine_hangs(self, engine: str, now: float) -> Sequence[Action]:
        """An engine says nothing, though its line stands: what is there begins again elsewhere, as
        far as others can take it. The rest waits until it speaks or is lost."""
        link = self._fleet.get(engine)
        name = link.name if link is not None else engine
        actions: list[Action] = []
        for routed in [r for r in self._placed.values() if r.engine == engine]:
            decision = self._fleet.choose(routed.view, routed.full)
            if decision is None or not self._is_lively(decision):
                continue
            actions.append(Abort(engine, [routed.core_id]))
            actions += self._retry(routed, Setback.LOSS, f"engine {name} hangs", now)
        if actions:
            self._fleet.went_badly(engine, Failure.HANG)
        return self._and_followers(actions, now)

    def give_up_late(self, now: float) -> Sequence[Action]:
        """Try requests elsewhere whose engines keep them waiting for a token for too long. Call it
        every second or so."""
        actions: list[Action] = []
        for routed in [r for r in self._placed.values() if r.first_token_by <= now]:
            engine, routed.first_token_by = routed.engine, math.inf
            self._fleet.went_badly(engine, Failure.LATE)
            decision = self._fleet.choose(routed.view, {*routed.avoided, engine})
            if decision is None or not self._is_lively(decision):
                continue
            routed.suspects[engine] = None
            actions.append(Abort(engine, [routed.core_id]))
            why = f"no token within {routed.patience_s:.0f} s"
            actions += self._retry(routed, Setback.LATE, why, now)
        return self._and_followers(actions, now)

    def _is_lively(self, decision: Decision) -> bool:
        """None of its engines hangs."""
        keys = (decision.prefill, decision.decode)
        return all(self._fleet.may_begin_at(key) for key in keys if key)

    def cannot_hand_off(self, core_id: str, why: str, now: float) -> Sequence[Action]:
        """An engine was asked to hand a placement off, and could not: begin again elsewhere."""
        routed = self._placed.get(core_id)
        if routed is None:
            return ()
        engine = routed.engine
        link = self._fleet.get(engine)
        name = link.name if link is not None else engine
        again = self._retry(routed, Setback.MOVE, f"engine {name} leaves: {why}", now)
        return self._and_followers([Abort(engine, [core_id]), *again], now)

    # --- the fleet, and time ------------------------------------------------------------------

    def fleet_changed(self, now: float) -> Sequence[Action]:
        """Engines came, went or began to leave: let those who wait go on, and move streams."""
        actions: list[Action] = []
        self._places.num_engines = self._fleet.num_decoding()
        stuck: set[bool] = set()
        """Kinds of requests (`prefill_only`) that no engine can take."""
        for routed in self.held:
            if routed.crowded or routed.prefill_only in stuck:
                continue
            if self._fleet.choose(routed.view) is None:
                stuck.add(routed.prefill_only)
                continue
            self.held.release(routed.request_id)
            actions += self._begin(routed, now)
        return [*self._and_followers(actions, now), *self._move_streams()]

    def tick(self, now: float) -> Sequence[Action]:
        """Give up what has waited for too long."""
        actions: list[Action] = []
        seconds = f"within {self.held.hold_seconds:g} s"
        for routed in self.held.overdue(now):
            reason = f"no turn {seconds}" if routed.crowded else f"no engine {seconds}"
            log.warning("request %s: %s", routed.request_id, reason)
            actions += self._fail(routed, EngineOverloadedError(reason))
        return self._and_followers(actions, now)

    def _move_streams(self) -> list[Action]:
        """Ask engines that leave to hand off what they decode, if somebody can take it over."""
        actions: list[Action] = []
        for engine in self._fleet.draining():
            if self._fleet.successor(engine.fingerprint) is None:
                continue  # they may end here; a loss before that is a new attempt
            for core_id, routed in self._placed.items():
                if routed.engine == engine.key and not routed.moving:
                    routed.moving = True
                    actions.append(AskHandOff(engine.key, core_id))
        return actions

    # --- a request's way ----------------------------------------------------------------------

    def _and_followers(self, actions: list[Action], now: float) -> list[Action]:
        """And begin further answers to prompts whose KV stands where they go."""
        for routed, leader in self._siblings.take_ready(self.requests):
            way = same_way(leader, self._fleet.may_begin_at)
            actions += self._begin(routed, now, decision=way)
        if self.held.num_crowded:
            actions += self._begin_crowded(now)
        return actions

    def _begin_crowded(self, now: float) -> list[Action]:
        """Let those go on whose tenant's turn it is."""
        actions: list[Action] = []
        full = self._places.crowded()
        while (routed := self.held.next_crowded(full)) is not None:
            self.held.release(routed.request_id)
            actions += self._begin(routed, now)
            if self._places.is_crowded(routed.account.tenant):
                full.add(routed.account.tenant)
        return actions

    def _begin(
        self,
        routed: RoutedRequest,
        now: float,
        before: str = "",
        decision: Decision | None = None,
        *,
        arrives: bool = False,
    ) -> list[Action]:
        """Start an attempt with what is known so far, or wait until that is possible.

        before: what went wrong with the attempt before this one. decision: where, if that is clear.
        arrives: it has just come, and is refused if it could not keep what is promised.
        """
        if arrives and routed.original.deadline_ms is not None:
            decision = self._fleet.choose(routed.view)
            refusal = self._refusal(routed, decision)
            if refusal is not None:
                return [*self._forget(routed, "refused"), Fail(routed.request_id, refusal)]
        if routed.attempts == 0 and self.tenants.several:
            routed.crowded = self._places.is_crowded(routed.account.tenant)
            if routed.crowded:
                return self._hold(routed, now, "", "your other requests keep the engines busy")
        if decision is None:
            decision = self._fleet.choose(routed.view, routed.avoided)
            if decision is None and routed.suspects:
                decision = self._fleet.choose(routed.view, routed.full)
        decode = self._fleet.get(decision.decode) if decision is not None else None
        if decision is None or decode is None:
            return self._hold(routed, now, before)
        prefill = (self._fleet.get(decision.prefill) if decision.prefill else None) or decode
        routed.attempts += 1
        routed.patience_s = patience_s(decision.terms, routed.prompt_tokens, self._first_token_s)
        if routed.attempts == 1:
            routed.account.served += routed.prompt_tokens
            routed.hold_until = None  # until now it may have waited for its tenant's turn
        routed.prefill_engine, routed.decode_engine = decision.prefill or "", decode.key
        view = routed.view
        self._fleet.placed(view, decision)
        facts = {
            "prefill": prefill.name,
            "decode": decode.name,
            "reason": decision.reason,
            "attempts": routed.attempts,
        }
        level = logging.DEBUG if routed.attempts == 1 else logging.INFO
        log.log(level, "request %s: %s", routed.request_id, facts)
        source = self._source_of(decision, prefill)
        if source is not None:
            facts["fetches"] = f"{decision.fetch_tokens} tokens from {source.remote_engine_id}"
        if prefill is not decode:
            begin = self._begin_pair(routed, prefill, decode, source, now)
        else:
            self._place(routed, decode, Stage.DECODE, now)
            begin = [Add(decode.key, routed.aggregated_request(source))]
        explain = Explain(routed.request_id, facts, decision, view.output_tokens)
        return [explain, *begin]

    def _refusal(
        self, routed: RoutedRequest, decision: Decision | None
    ) -> EngineOverloadedError | None:
        """Why a new request is not taken on; None: it is."""
        first = None if decision is None else self._fleet.first_token(routed.view, decision)
        if decision is None or first is None:
            return None  # nothing is known: it may be served in time
        routed.prefill_engine, routed.decode_engine = decision.prefill or "", decision.decode
        refusal = self.promises.refusal(routed, first)
        if refusal is not None:
            log.info("request %s is refused: %s", routed.request_id, refusal)
        return refusal

    def _source_of(self, decision: Decision, computing: Engine) -> KVTransferParams | None:
        """Who the engine that computes the prompt may ask for a prefix; None: nobody.

        The router has no part in what follows: the two engines make the lease between them.
        """
        if decision.fetch is None or decision.fetch_tokens <= 0:
            return None
        holder = self._fleet.get(decision.fetch)
        if holder is None or holder is computing or holder.fingerprint != computing.fingerprint:
            return None
        if holder.lends is None:
            return None
        return msgspec.structs.replace(holder.lends, remote_num_tokens=decision.fetch_tokens)

    def _begin_pair(
        self,
        routed: RoutedRequest,
        prefill: Engine,
        decode: Engine,
        source: KVTransferParams | None,
        now: float,
    ) -> list[Action]:
        """Let P compute, and D get ready meanwhile."""
        self._place(routed, prefill, Stage.PREFILL, now, plans=decode)
        lease_id = f"{self._random_bits(128):032x}"
        add = Add(prefill.key, routed.prefill_request(lease_id, source))
        if prefill.lends is None or not routed.worth_announcing:
            return [add]
        return [add, Announce(decode.key, routed.announce(decode.key, prefill.lends, lease_id))]

    def _unannounce(self, routed: RoutedRequest) -> list[Action]:
        """The engine that was told that this request would come waits in vain."""
        announced = routed.withdraw_announcement()
        return [] if announced is None else [Abort(announced.engine, [announced.core_id])]

    def _hold(
        self, routed: RoutedRequest, now: float, before: str, why: str = "no engine is usable"
    ) -> list[Action]:
        try:
            until = self.held.add(routed, now, why)
        except EngineOverloadedError as exc:
            why = f"{before}; then: {exc}" if before else str(exc)
            return self._fail(routed, EngineOverloadedError(why))
        log.info("request %s waits: %s", routed.request_id, why)
        surplus = self.held.surplus(routed)
        if surplus is None:
            return [WakeAt(until)]
        crowded_out = EngineOverloadedError("too many requests wait, most of this API key")
        return [WakeAt(until), *self._fail(surplus, crowded_out)]

    def _absorb(self, routed: RoutedRequest, output: EngineCoreOutput, now: float) -> list[Action]:
        """Take an output of the engine in charge; what to do with leases that nobody will read."""
        offered, unread = _offered(output), routed.lease
        again = routed.absorb(output)
        if routed.suspects:
            self._clear_up(routed)
        if output.new_token_ids and routed.first_at is None:
            self.promises.saw_first(routed, now)
        if again:
            self._pass_turn(routed)
            # Who hands off has read what it took over; whoever says otherwise loses it.
            return [] if unread is None else [Release(routed.core_id, unread)]
        if output.finished:
            self._fleet.went_well(routed.engine, routed.prefill_engine)
            self._usual_output += (len(routed.generated) - self._usual_output) * NEWEST_PART
            self.promises.saw_end(routed, now)
            return [*offered, *self._forget(routed, str(output.finish_reason))]
        return offered

    def _pass_turn(
        self, routed: RoutedRequest, setback: Setback | None = None, why: str = ""
    ) -> None:
        """Its engine has said its last word about it, and is not heard again."""
        del self._placed[routed.core_id]
        self._turns.append(_Turn(routed, setback, why))

    def _clear_up(self, routed: RoutedRequest) -> None:
        """It gets on: whoever failed at what was done now is to blame."""
        for engine in routed.take_guilty():
            self._fleet.went_badly(engine, Failure.ERROR)

    def _hand_over(self, routed: RoutedRequest, now: float) -> list[Action]:
        """An engine lends its KV: let the next one take over."""
        taker = self._taker(routed)
        if taker is None:
            return self._retry(routed, Setback.MOVE, "no decode engine can take it over", now)
        if routed.announced is not None and routed.announced.engine == taker.key:
            routed.announced, actions = None, []  # its next placement has the id announced there
        else:
            actions = self._unannounce(routed)
        self._place(routed, taker, Stage.DECODE, now)
        routed.decode_engine = taker.key
        return [*actions, Add(taker.key, routed.decode_request())]

    def _taker(self, routed: RoutedRequest) -> Engine | None:
        """The planned engine if it still may, else one that fits, else the planned one after all
        (while it drains it still takes what was meant for it)."""
        fingerprint = (routed.lease or {}).get("compat")
        planned = self._fleet.get(routed.decode_engine)
        if planned is not None and (
            planned.key == routed.engine  # it is the one that hands off
            or not planned.up
            or fingerprint not in (None, planned.fingerprint)  # restarted as something else
        ):
            planned = None
        if planned is not None and self._fleet.may_begin_at(planned.key):
            return planned
        return self._fleet.successor(str(fingerprint)) or planned

    def _retry(self, routed: RoutedRequest, setback: Setback, why: str, now: float) -> list[Action]:
        """Give a request another chance elsewhere, or end it with an error."""
        log.warning("request %s, attempt %d: %s", routed.request_id, routed.attempts, why)
        again = routed.set_back(setback)
        self._leave_engine(routed)
        interrupted = Interrupted(routed.request_id, setback, why, again)
        actions = [interrupted, *self._drop_lease(routed), *self._unannounce(routed)]
        if again:
            return [*actions, *self._begin(routed, now, before=why)]
        kind = EngineOverloadedError if setback is Setback.FULL else EngineGenerateError
        return [*actions, *self._fail(routed, kind(why))]

    def _fail(
        self, routed: RoutedRequest, error: EngineOverloadedError | EngineGenerateError
    ) -> list[Action]:
        self.promises.saw_failure(routed)
        return [*self._forget(routed, "error"), Fail(routed.request_id, error)]

    def _forget(self, routed: RoutedRequest, outcome: str) -> list[Action]:
        """It is over."""
        del self.requests[routed.request_id]
        self.held.release(routed.request_id)
        self._leave_engine(routed)
        self.tenants.close(routed.account)
        ended = Ended(routed.request_id, outcome, len(routed.generated))
        return [*self._drop_lease(routed), *self._unannounce(routed), ended]

    def _drop_lease(self, routed: RoutedRequest) -> list[Action]:
        lease, routed.lease = routed.lease, None
        return [] if lease is None else [Release(routed.core_id, lease)]

    def _place(
        self,
        routed: RoutedRequest,
        engine: Engine,
        stage: Stage,
        now: float,
        plans: Engine | None = None,
    ) -> None:
        """Put a request to an engine's account, and to that of the one to take over later."""
        self._leave_engine(routed)
        routed.place(engine.key, stage)
        if routed.late < MAX_LATE:
            routed.first_token_by = now + routed.patience_s
        self._placed[routed.core_id] = routed
        cost = routed.prompt_tokens + len(routed.generated)
        charges = [(account, cost) for account in (engine, plans) if account is not None]
        self._charges[routed.request_id] = charges
        self._plans[routed.request_id] = plans
        if plans is not None:
            plans.plan(1)
        self._places.take(routed.account)
        for account, tokens in charges:
            account.open_tokens += tokens

    def _leave_engine(self, routed: RoutedRequest) -> None:
        charges = self._charges.pop(routed.request_id, None)
        if charges is not None:
            for account, tokens in charges:
                account.open_tokens -= tokens
            self._places.give_back(routed.account)
            planned = self._plans.pop(routed.request_id)
            if planned is not None:
                planned.plan(-1)
        self._placed.pop(routed.core_id, None)
        routed.engine = ""


def _offered(output: EngineCoreOutput) -> list[Action]:
    """Give back the lease that an output brings."""
    params = output.kv_transfer_params
    return [] if params is None else [Release(output.request_id, params)]
