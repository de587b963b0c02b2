"""What is remembered of a request, put into the words of `diptych_protocol.admin`. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from diptych_protocol.admin import (
    AttemptReport,
    Candidate,
    Choice,
    PlacementReport,
    RequestLine,
    RequestReport,
    StationReport,
)
from diptych_router.explaining.course import Placement
from diptych_router.explaining.remembered import Attempt, Explained
from diptych_router.policy import Decision, Priced

MOST_CANDIDATES: Final = 8
"""Engines of one pool that are told, beside the chosen one."""

NameOf = Callable[[str], str]
"""From an engine's key to its name."""


def report_of(known: Explained, name_of: NameOf) -> RequestReport:
    """All that is known of a request."""
    first = known.attempts[0] if known.attempts else None
    shift = known.unix_time - known.began_s
    return RequestReport(
        request_id=known.request_id,
        core_id=known.core_id,
        unix_time=known.unix_time,
        prompt_tokens=known.prompt_tokens,
        output_tokens=known.output_tokens,
        waited_s=None if first is None else first.began_s - known.began_s,
        seconds=None if known.ended_s is None else known.ended_s - known.began_s,
        outcome=known.outcome,
        attempts=[_attempt(attempt, shift, name_of) for attempt in known.attempts],
        attempts_left_out=known.num_attempts - len(known.attempts),
        tenant=known.tenant,
        placements=[_placement(x, known.began_s, name_of) for x in known.placements],
        token_times_s=[time_s - known.began_s for time_s in known.tokens.marks[::2]],
        token_counts=[int(count) for count in known.tokens.marks[1::2]],
    )


def _placement(placement: Placement, began_s: float, name_of: NameOf) -> PlacementReport:
    first = placement.first_word_s
    return PlacementReport(
        engine=name_of(placement.engine),
        attempt=placement.attempt,
        sent_s=placement.sent_s - began_s,
        first_word_s=None if first is None else first - began_s,
        received_tokens=placement.received_tokens,
        stations=[
            StationReport(name=kind.name.lower(), at_s=time_s - began_s, prompt_tokens=tokens)
            for kind, time_s, tokens in placement.stations()
        ],
    )


def line_of(known: Explained, name_of: NameOf) -> RequestLine:
    """A request in a list."""
    newest = known.attempts[-1] if known.attempts else None
    brought = [x for x in known.attempts if x.first_token_s is not None]
    first_token_s = None
    if brought and brought[0].first_token_s is not None:
        first_token_s = brought[0].began_s + brought[0].first_token_s - known.began_s
    return RequestLine(
        request_id=known.request_id,
        unix_time=known.unix_time,
        prompt_tokens=known.prompt_tokens,
        output_tokens=known.output_tokens,
        prefill="" if newest is None else newest.prefill,
        decode="" if newest is None else _decode(newest, name_of),
        attempts=known.num_attempts,
        first_token_s=first_token_s,
        outcome=known.outcome,
    )


def _attempt(attempt: Attempt, shift: float, name_of: NameOf) -> AttemptReport:
    """shift: from the loop's clock to the time of day."""
    decision = attempt.decision
    return AttemptReport(
        unix_time=attempt.began_s + shift,
        reason=decision.reason,
        prefill=attempt.prefill,
        decode=attempt.decode,
        fetch=name_of(decision.fetch) if decision.fetch else "",
        fetch_tokens=decision.fetch_tokens,
        terms=dict(decision.terms),
        to_compute=decision.to_compute,
        choices=[_choice(priced, decision, name_of) for priced in decision.weighed],
        first_token_expected_s=attempt.first_token_expected_s,
        first_token_s=attempt.first_token_s,
        cached_tokens=attempt.cached_tokens,
        hand_off_expected_s=attempt.hand_off_expected_s,
        hand_off_s=attempt.hand_off_s,
        received_tokens=attempt.received_tokens,
        decoded_by=[name_of(key) for key in attempt.decoded_by],
        setback=attempt.setback,
        why=attempt.why,
        setback_s=attempt.setback_s,
    )


def _choice(priced: Priced, decision: Decision, name_of: NameOf) -> Choice:
    """The cheapest engines of a pool, and the chosen one if it is another."""
    taken = _taken(priced, decision)
    shown = priced.cheapest(MOST_CANDIDATES)
    keys = [row.key for row in priced.rows[: len(priced.engines.barred)]]
    if taken in keys and keys.index(taken) not in shown:
        shown.append(keys.index(taken))
    return Choice(
        duty=priced.duty,
        num_able=priced.num_able,
        candidates=[
            Candidate(
                engine=name_of(keys[at]),
                chosen=keys[at] == taken,
                cost=priced.cost(at),
                terms=priced.terms(at),
                cached_tokens=int(priced.engines.cached[at]),
                near=priced.near(at),
            )
            for at in shown
        ],
    )


def _taken(priced: Priced, decision: Decision) -> str | None:
    """The key of the engine that was chosen for this duty; None: the other way was cheaper."""
    if priced.duty == "prefill":
        return decision.prefill or (decision.decode if len(decision.weighed) == 1 else None)
    return decision.decode if (priced.duty == "decode") == bool(decision.prefill) else None


def _decode(attempt: Attempt, name_of: NameOf) -> str:
    """The engine that decoded last, or else the one that was to."""
    return name_of(attempt.decoded_by[-1]) if attempt.decoded_by else attempt.decode
