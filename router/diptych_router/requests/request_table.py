"""Decides about all requests of one router: it takes events and the time, and returns actions.

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

The table writes what happens to a request into its record. There is no I/O but the log: no socket,
thread or clock. The caller carries out the returned actions in order. If carrying one out causes an
event, the actions of that event come after the remaining ones. The fleet answers questions about
the present.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineOverloadedError,
    FinishReason,
)
from diptych_protocol.kv_transfer_params import EXPIRY
from diptych_protocol.wire import FINISH_REASON_STRINGS, REVISION_HEADER
from diptych_router.engines.health_book import Failure
from diptych_router.engines.known_prefixes import BlockNamer
from diptych_router.engines.serving import RevisionShare
from diptych_router.requests.attempts import LEAST_PATIENCE_S, Attempts
from diptych_router.requests.placements import HeldRequests, Placements, Siblings, same_way
from diptych_router.requests.promises import Promises
from diptych_router.requests.records import Records
from diptych_router.requests.request_record import Predictions, Setback, Trace
from diptych_router.requests.routed_request import RoutedRequest
from diptych_router.requests.table_interface import (
    Abort,
    Action,
    AskHandOff,
    Deliver,
    Fleet,
    Release,
)

log = logging.getLogger(__name__)

FIRST_GUESS_TOKENS: float = 128.0
"""The expected length of an answer, before any has ended."""
PREFETCHED = "prefetched"
"""The outcome of a request that wanted its KV to be brought."""
NEWEST_PART = 0.02
"""The weight of the newest answer in the average of their lengths."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """What an engine's last word about a request leads to, once its tokens are delivered."""

    routed: RoutedRequest
    setback: Setback | None
    """None: the engine did its part, and the next one takes over."""
    why: str = ""


class RequestTable:
    """Every request from `submit` to its end. It decides which requests an event concerns, and how.
    `Attempts` takes the steps of each, and `Placements` knows which engine has it."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        hold_seconds: float,
        max_held: int,
        promises: Promises,
        random_bits: Callable[[int], int] = secrets.randbits,
        first_token_s: float = LEAST_PATIENCE_S,
    ) -> None:
        """`random_bits(k)` is k bits nobody can guess. `first_token_s`: the shortest deadline of a
        first token. Only a simulation brings its own of both."""
        self.requests: dict[str, RoutedRequest] = {}
        """By the request's own id."""
        self.records = Records()
        """What happened to the newest requests."""
        self.namer = BlockNamer()
        self.promises, self.predictions = promises, Predictions()
        self._fleet = fleet
        self._placements = Placements(self.records)
        self.tenants = self._placements.accounts
        self.held = HeldRequests(hold_seconds, max_held, self.tenants)
        self.placed: Mapping[str, RoutedRequest] = self._placements.by_core_id
        """The placements that an engine has, or will get, by the ids for engines."""
        own = (self.requests, self.held, self._placements)
        self._attempts = Attempts(fleet, *own, promises, random_bits, first_token_s)
        self._ways = self._attempts.ways
        self._turns: list[_Turn] = []
        self.has_turns = False
        """Whether there was something for `take_turns` after the last `receive`."""
        self._usual_output = FIRST_GUESS_TOKENS
        """How many tokens answers have, on average; the newest count most."""
        self._siblings = Siblings()

    # --- users --------------------------------------------------------------------------------

    def submit(
        self,
        request: EngineCoreRequest,
        max_model_len: int,
        now: float,
        leader: str | None = None,
        trace: Trace | None = None,
        trial: RevisionShare | None = None,
    ) -> Sequence[Action]:
        """Accept a new request. leader: another request for an answer to the same prompt, which
        begins first. trial: of the revision that gets a share of new requests."""
        record, first = self.records.begin(request, now, trace), self.requests.get(leader or "")
        if trial is not None:  # a request stays in its revision; all answers to one prompt in one
            asked = (request.trace_headers or {}).get(REVISION_HEADER)
            record.revisions = (first and first.record.revisions) or trial.draw(asked)
            record.trial = trial if record.revisions == (trial.revision,) else None
        routed = RoutedRequest(request, max_model_len, record, self.namer)
        self.requests[request.request_id] = routed
        request.deadline_ms = self.promises.slo.ttft_ms
        routed.account = self.tenants.open(request.tenant)
        routed.usual_output = self._usual_output
        if first is not None and self._siblings.wait(routed, first):
            return ()
        return self._attempts.take_on(routed, now)

    def num_answering_for(self, trial: RevisionShare) -> int:
        """How many requests that it counts have their first token and are not over."""
        records = (routed.record for routed in self.requests.values())
        return sum(each.trial is trial and each.first_token_s is not None for each in records)

    def withdraw(
        self, request_ids: Iterable[str], now: float, outcome: str = "abort"
    ) -> Sequence[Action]:
        """End requests that nobody wants, or that have ended already. Unknown ids are ignored."""
        actions: list[Action] = []
        by_engine: dict[str, list[str]] = {}
        for request_id in request_ids:
            routed = self.requests.get(request_id)
            if routed is None:
                continue
            if routed.has_decoded:
                self._fleet.went_well(routed.engine, routed.prefill_engine)
            if routed.core_id in self.placed:
                by_engine.setdefault(routed.engine, []).append(routed.core_id)
            self.promises.saw_leave(routed.record, now)
            actions += self._attempts.end(routed, outcome, now)
        actions[:0] = (Abort(engine, ids) for engine, ids in by_engine.items())
        return self._and_followers(actions, now)

    # --- engines ------------------------------------------------------------------------------

    def receive(
        self, engine: str, outputs: Iterable[EngineCoreOutput], now: float
    ) -> Sequence[Action]:
        """Process an engine's outputs. Carry out `Deliver`, then call `take_turns` if there are any
        (`has_turns`): the first token does not wait for the hand-off, and a request that a stop
        string has ended needs none."""
        deliver: list[EngineCoreOutput] = []
        actions: list[Action] = [Deliver(deliver)]
        strays: list[str] = []
        for output in outputs:
            routed = self.placed.get(output.request_id)
            if routed is None or routed.engine != engine:
                actions += _offered(output)
                if not output.finished:
                    strays.append(output.request_id)
            elif output.finish_reason is FinishReason.ERROR:
                actions += self._take_error(routed, output, now)
            elif output.finish_reason is FinishReason.ABORT and output.kv_transfer_params is None:
                # An engine that shuts down ends requests unasked.
                why = f"engine {self._name_of(engine)} gave it up"
                self._pass_turn(routed, self._setback_at(engine), why)
            else:
                offered, unread = output.kv_transfer_params, routed.lease
                says_more = offered is not None or output.finish_reason is not None
                if routed.absorb(output):
                    self._pass_turn(routed)
                    offered = unread  # who hands off has read what it took over, or loses it
                if offered is not None:
                    actions.append(Release(routed.core_id, offered))
                if unread is not None and routed.lease is None and self._ways.of:
                    self._ways.worked(routed.lender, routed.engine)
                if routed.suspects:  # it gets on: whoever failed at what was done now is to blame
                    for guilty in routed.take_guilty():
                        self._fleet.went_badly(guilty, Failure.ERROR)
                if output.new_token_ids or says_more:
                    if routed.record.brought(output, now, self.predictions):
                        self.promises.saw_first(routed.record, now)
                    if output.new_token_ids or output.finish_reason is not None:
                        deliver.append(output)
                if output.finish_reason is not None:
                    actions += self._finish(routed, output.finish_reason, now)
        if strays:
            actions.append(Abort(engine, strays))
        self.has_turns = bool(self._turns or self._siblings.followers or self.held.num_crowded)
        return actions

    def _finish(self, routed: RoutedRequest, reason: FinishReason, now: float) -> list[Action]:
        self._fleet.went_well(routed.engine, routed.prefill_engine)
        if routed.original.prefetches:
            return self._attempts.end(routed, PREFETCHED, now)
        self._usual_output += (len(routed.generated) - self._usual_output) * NEWEST_PART
        self.promises.saw_end(routed.record, now)
        return self._attempts.end(routed, FINISH_REASON_STRINGS[reason], now)

    def _take_error(
        self, routed: RoutedRequest, output: EngineCoreOutput, now: float
    ) -> list[Action]:
        """Take the word of the engine in charge that it failed."""
        setback = routed.setback_of(output.error_kind)
        # With a parameter it is the request that is wrong, but not if two engines' clocks differ.
        is_theirs = output.error_param in (None, EXPIRY)
        if setback is Setback.LOSS and is_theirs:
            self._attempts.way_failed(routed, now)
        routed.wrong_field = output.error_param
        if setback is Setback.FULL:
            self._fleet.was_full(routed.engine)
        elif setback is not Setback.REFUSED and is_theirs:
            routed.suspect()
        self._pass_turn(routed, setback, output.error or "the engine gave no reason")
        return _offered(output)

    def _pass_turn(
        self, routed: RoutedRequest, setback: Setback | None = None, why: str = ""
    ) -> None:
        """Record that its engine has sent its last output; later ones are ignored."""
        del self._placements.by_core_id[routed.core_id]
        self._turns.append(_Turn(routed, setback, why))

    def take_turns(self, now: float) -> Sequence[Action]:
        """Continue requests whose engines have ended their part, if users still want them."""
        turns, self._turns = self._turns, []
        actions: list[Action] = []
        for turn in turns:
            if self.requests.get(turn.routed.request_id) is not turn.routed:
                continue
            if turn.setback is None:
                actions += self._attempts.hand_over(turn.routed, now)
            else:
                actions += self._attempts.retry(turn.routed, turn.setback, turn.why, now)
        return self._and_followers(actions, now)

    def not_sent(self, core_id: str, why: str, now: float) -> Sequence[Action]:
        """Handle an `Add` that did not reach its engine."""
        routed = self.placed.get(core_id)
        if routed is None:
            return ()
        return self._and_followers(self._attempts.retry(routed, Setback.LOSS, why, now), now)

    def engine_lost(self, engine: str, why: str, now: float) -> Sequence[Action]:
        """Handle the loss of an engine with every placement at it."""
        setback = self._setback_at(engine)
        actions: list[Action] = []
        lost = self._placements.at(engine)
        self._ways.forget(engine)
        if lost and setback is Setback.LOSS:
            self._fleet.went_badly(engine, Failure.LOST)
        for routed in lost:
            actions += self._attempts.retry(routed, setback, why, now)
        return self._and_followers(actions, now)

    def engine_hangs(self, engine: str, now: float) -> Sequence[Action]:
        """Begin the requests of an engine elsewhere, because it is silent though its connection
        stands, as far as others can take them. The rest wait until it speaks or is lost."""
        actions: list[Action] = []
        why = f"engine {self._name_of(engine)} hangs"
        for routed in self._placements.at(engine):
            if not self._can_go_elsewhere(routed, routed.full):
                continue
            actions.append(Abort(engine, [routed.core_id]))
            actions += self._attempts.retry(routed, Setback.LOSS, why, now)
        if actions:
            self._fleet.went_badly(engine, Failure.HANG)
        return self._and_followers(actions, now)

    def give_up_late(self, now: float) -> Sequence[Action]:
        """Retry elsewhere what engines are late with. Call it about every second."""
        actions: list[Action] = []
        for routed in self._placements.late(now):
            engine, routed.first_token_by = routed.engine, math.inf
            self._fleet.went_badly(engine, Failure.LATE)
            if not self._can_go_elsewhere(routed, {*routed.avoided, engine}):
                continue
            routed.suspects[engine] = None
            actions.append(Abort(engine, [routed.core_id]))
            why = f"no token within {routed.patience_s:.0f} s"
            actions += self._attempts.retry(routed, Setback.LATE, why, now)
        return self._and_followers(actions, now)

    def cannot_hand_off(self, core_id: str, why: str, now: float) -> Sequence[Action]:
        """Begin again elsewhere, because an engine could not hand a placement off."""
        routed = self.placed.get(core_id)
        if routed is None:
            return ()
        engine = routed.engine
        why = f"engine {self._name_of(engine)} leaves: {why}"
        again = self._attempts.retry(routed, Setback.MOVE, why, now)
        return self._and_followers([Abort(engine, [core_id]), *again], now)

    # --- the fleet, and time ------------------------------------------------------------------

    def fleet_changed(self, now: float) -> Sequence[Action]:
        """Begin waiting requests and move streams, because engines came, went or began to drain."""
        actions: list[Action] = []
        self._placements.num_engines = self._fleet.num_decoding()
        stuck: set[tuple[bool, tuple[str, ...]]] = set()
        """Kinds of requests (`prefill_only`, and the revisions) that no engine can take."""
        for routed in self.held:
            kind = routed.record.prefill_only, routed.record.revisions
            if routed.crowded or kind in stuck:
                continue
            if self._fleet.choose(routed.view) is None:
                stuck.add(kind)
                continue
            self.held.release(routed.request_id)
            actions += self._attempts.begin(routed, now)
        return [*self._and_followers(actions, now), *self._move_streams()]

    def tick(self, now: float, why: Callable[[], str] = str) -> Sequence[Action]:
        """Give up requests that have waited for too long. why: says why no engine takes any."""
        actions: list[Action] = []
        seconds = f"within {self.held.hold_seconds:g} s"
        for routed in self.held.overdue(now):
            reason = f"no turn {seconds}" if routed.crowded else f"no engine {seconds}"
            if not routed.crowded and (cause := why()):
                reason += f": {cause}"
            log.warning("request %s: %s", routed.request_id, reason)
            actions += self._attempts.fail(routed, EngineOverloadedError(reason), now)
        return self._and_followers(actions, now)

    def _move_streams(self) -> list[Action]:
        """Ask engines that leave the pool to hand off their streams, if others can take them."""
        actions: list[Action] = []
        for engine in self._fleet.draining():
            if self._fleet.successor(engine.fingerprint) is None:
                continue  # they may end here; a loss before that is a new attempt
            for core_id, routed in self.placed.items():
                if routed.engine == engine.key and routed.decodes and not routed.moving:
                    routed.moving = True
                    actions.append(AskHandOff(engine.key, core_id))
        return actions

    def shut_down(self, now: float) -> None:
        """Close the record of every open request, because the router ends."""
        why = "the router was shut down", "shutdown"
        for routed in self.requests.values():
            self.records.ended(routed.record, "error", now, *why)

    # --- what events have in common -----------------------------------------------------------

    def _and_followers(self, actions: list[Action], now: float) -> list[Action]:
        """And begin further answers to prompts whose KV stands where they go."""
        if self._siblings.followers:
            for routed, leader in self._siblings.take_ready(self.requests):
                way = same_way(leader, self._fleet.may_begin_at)
                actions += self._attempts.begin(routed, now, decision=way)
        if self.held.num_crowded:
            actions += self._attempts.begin_crowded(now)
        return actions

    def _setback_at(self, engine: str) -> Setback:
        """What it means for a request that this engine drops it."""
        link = self._fleet.get(engine)
        return Setback.MOVE if link is not None and link.withdrawn else Setback.LOSS

    def _name_of(self, engine: str) -> str:
        link = self._fleet.get(engine)
        return link.name if link is not None else engine

    def _can_go_elsewhere(self, routed: RoutedRequest, avoided: Collection[str]) -> bool:
        """Whether there are engines for it, of which none hangs."""
        decision = self._fleet.choose(routed.view, avoided)
        if decision is None:
            return False
        keys = (decision.prefill, decision.decode)
        return all(self._fleet.may_begin_at(key) for key in keys if key)


def _offered(output: EngineCoreOutput) -> list[Action]:
    """Give back the lease that an output brings."""
    params = output.kv_transfer_params
    return [] if params is None else [Release(output.request_id, params)]
