"""Answers, from records, why the newest requests got their engines, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from diptych_protocol import InvalidRequestError
from diptych_protocol.admin import (
    AttemptReport,
    Candidate,
    Choice,
    Explanation,
    PlacementReport,
    RequestLine,
    RequestList,
    RequestReport,
    StationReport,
)
from diptych_protocol.wire import time_of_day
from diptych_router.choosing.policy import Decision, Priced
from diptych_router.requests.records import Records
from diptych_router.requests.request_record import Attempt, Placement, RequestRecord

MOST_FOUND: Final = 32
"""The most answers under one id that are reported."""
MOST_ID_CHARACTERS: Final = 256
"""Nobody need ask for a longer id."""
MOST_CANDIDATES: Final = 8
"""The most engines of one pool that are reported, beside the chosen one."""
MOST_CHARACTERS: Final = 256
"""A reason is cut to this length."""
API_PREFIXES: Final = ("chatcmpl-", "cmpl-")
"""The prefixes of answers' ids in the API, before the id of their request."""

NameOf = Callable[[str], str]
"""A function from an engine's key to its name."""


@dataclass(frozen=True, slots=True)
class Explanations:
    """Answers questions about the newest requests of one router."""

    _records: Records
    _name_of: NameOf
    policy: str
    disaggregate: str
    """The settings that govern the choices."""

    def explanation(self, request_id: str, tenant: str | None = None) -> Explanation:
        """Return what is recorded under an id, the newest first. The id is the client's, with or
        without the API's prefix, or the router's own. tenant: whose records; None: anybody's.
        Raises `InvalidRequestError` for what cannot be an id."""
        if len(request_id) > MOST_ID_CHARACTERS:
            raise InvalidRequestError(
                f"a request id has at most {MOST_ID_CHARACTERS} characters, this one has "
                f"{len(request_id)}",
                param="request_id",
            )
        wanted = {request_id, *(request_id.removeprefix(prefix) for prefix in API_PREFIXES)}
        found = (
            record
            for record in self._records
            if tenant in (None, record.tenant) and _is_called(record, wanted)
        )
        return Explanation(
            policy=self.policy,
            disaggregate=self.disaggregate,
            requests=[report_of(record, self._name_of) for record in islice(found, MOST_FOUND)],
        )

    def newest(self, limit: int) -> RequestList:
        return RequestList(
            requests=[_line_of(record) for record in islice(self._records, limit)],
            num_remembered=len(self._records),
            most_remembered=self._records.most_requests,
        )


def _is_called(record: RequestRecord, wanted: set[str]) -> bool:
    """Several prompts of one request have its id and a number."""
    if record.shown_id in wanted or record.request_id in wanted:
        return True
    whole, _, number = record.shown_id.rpartition("-")
    return number.isdecimal() and whole in wanted


def report_of(record: RequestRecord, name_of: NameOf) -> RequestReport:
    first = record.attempts[0] if record.attempts else None
    began_s, ended_s = record.began_s, record.ended_s
    return RequestReport(
        request_id=record.shown_id,
        core_id=record.request_id,
        unix_time=time_of_day(began_s),
        prompt_tokens=record.prompt_tokens,
        output_tokens=_output_tokens(record),
        waited_s=None if first is None else first.began_s - began_s,
        seconds=None if ended_s is None else ended_s - began_s,
        outcome=record.outcome,
        attempts=[_attempt(attempt, name_of) for attempt in record.attempts],
        attempts_left_out=record.num_attempts - len(record.attempts),
        tenant=record.tenant,
        placements=[
            _placement(placement, number, began_s)
            for number, attempt in enumerate(record.attempts, start=1)
            for placement in attempt.placements
        ],
        token_times_s=[time_s - began_s for time_s in record.tokens.marks[::2]],
        token_counts=[int(count) for count in record.tokens.marks[1::2]],
    )


def _output_tokens(record: RequestRecord) -> int:
    """Tokens of an answer are told once it has ended."""
    return 0 if record.ended_s is None else record.tokens.total


def _placement(placement: Placement, attempt: int, began_s: float) -> PlacementReport:
    first = placement.first_word_s
    return PlacementReport(
        engine=placement.name,
        attempt=attempt,
        sent_s=placement.sent_s - began_s,
        first_word_s=None if first is None else first - began_s,
        received_tokens=placement.received_tokens,
        stations=[
            StationReport(name=kind.name.lower(), at_s=time_s - began_s, prompt_tokens=tokens)
            for kind, time_s, tokens, _ in placement.stations()
        ],
    )


def _line_of(record: RequestRecord) -> RequestLine:
    newest = record.attempts[-1] if record.attempts else None
    words = (placement.first_word_s for x in record.attempts for placement in x.placements)
    first_s = next((word_s for word_s in words if word_s is not None), None)
    return RequestLine(
        request_id=record.shown_id,
        unix_time=time_of_day(record.began_s),
        prompt_tokens=record.prompt_tokens,
        output_tokens=_output_tokens(record),
        prefill="" if newest is None else newest.prefill,
        decode="" if newest is None else _decode(newest),
        attempts=record.num_attempts,
        first_token_s=None if first_s is None else first_s - record.began_s,
        outcome=record.outcome,
    )


def _attempt(attempt: Attempt, name_of: NameOf) -> AttemptReport:
    decision, setback, decoding = attempt.decision, attempt.setback, attempt.decoding
    first_token_s, hand_off_s = attempt.first_token_s, attempt.hand_off_s
    return AttemptReport(
        unix_time=time_of_day(attempt.began_s),
        reason=decision.reason,
        prefill=attempt.prefill,
        decode=attempt.decode,
        fetch=name_of(decision.fetch) if decision.fetch else "",
        fetch_tokens=decision.fetch_tokens,
        terms=dict(decision.terms),
        to_compute=decision.to_compute,
        choices=[_choice(priced, decision, name_of) for priced in decision.weighed],
        first_token_expected_s=attempt.first_token_expected_s,
        first_token_s=first_token_s,
        cached_tokens=None if first_token_s is None else attempt.placements[0].cached_tokens,
        hand_off_expected_s=attempt.hand_off_expected_s,
        hand_off_s=hand_off_s,
        received_tokens=0 if hand_off_s is None else decoding[0].received_tokens,
        decoded_by=[placement.name for placement in decoding],
        setback="" if setback is None else setback.name.lower(),
        why=attempt.why[:MOST_CHARACTERS],
        setback_s=None if attempt.ended_s is None else attempt.ended_s - attempt.began_s,
        pinned_tokens=0 if first_token_s is None else attempt.placements[0].pinned_tokens,
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
                stored_tokens=priced.stored(at),
            )
            for at in shown
        ],
    )


def _taken(priced: Priced, decision: Decision) -> str | None:
    """The key of the engine that was chosen for this duty; None: the other way was cheaper."""
    if priced.duty == "prefill":
        return decision.prefill or (decision.decode if len(decision.weighed) == 1 else None)
    return decision.decode if (priced.duty == "decode") == bool(decision.prefill) else None


def _decode(attempt: Attempt) -> str:
    """The engine that decoded last, or else the one that was to."""
    return attempt.decoding[-1].name if attempt.decoding else attempt.decode
