"""The spans of a request, read from its record: those of the router, and below them its engines'.

An engine reports the events of each request to its router. From these the router makes the engine's
spans, as an engine's front-end does for requests that it has sent itself. Names of attributes
follow the semantic conventions for generative AI where there are any. Only the span `request` has
usage, since backends add up what the spans of a trace have used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from diptych_protocol import EngineCoreRequest
from diptych_protocol import RequestJourneyEventType as Station
from diptych_router.requests.request_record import (
    MOST_TEXT,
    Attempt,
    Placement,
    RequestRecord,
    Setback,
)

ROOT: Final = "request"
Value = str | int | float | list[str]


@dataclass(slots=True)
class SpanFacts:
    """A span without its trace. Times are in seconds of the router's clock."""

    name: str
    key: str
    """Distinguishes the spans of a request. The first span of a placement has the id by which the
    engine knows the placement, so the engine can be told its parent before that ends."""
    parent: str | None
    """The key of its parent. None: the parent is the client's span, if there is one."""
    began_s: float
    ended_s: float
    kind: Literal["server", "client", "internal"] = "internal"
    engine: str = ""
    """The engine that the span describes; empty: the router."""
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""
    events: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _End:
    """How an attempt ended, or the wait for one."""

    time_s: float
    error: str
    error_type: str


def request_attributes(request: EngineCoreRequest, model_name: str) -> dict[str, Value]:
    """Return the attributes of the span `request` from the client's request."""
    params, lora = request.sampling_params, request.lora_request
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "embeddings" if params is None else "text_completion",
        "gen_ai.provider.name": "diptych",
        "gen_ai.request.model": model_name if lora is None else _cut(lora.lora_name),
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": _cut(request.shown_id),
    }
    if params is not None:
        attributes["gen_ai.request.temperature"] = params.temperature
        attributes["gen_ai.request.top_p"] = params.top_p
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if request.tenant:
        attributes["diptych.tenant"] = _cut(request.tenant)
    return attributes


def spans_of(
    record: RequestRecord, arrived_s: float, attributes: Mapping[str, Value]
) -> Iterator[SpanFacts]:
    """Return all spans of a request that has ended, parents first. arrived_s: when the router's API
    received it. attributes: see `request_attributes`."""
    over = _End(record.ended_s or record.began_s, record.error, record.error_type)
    yield _of_request(record, over, arrived_s, attributes)
    for number, (asked_s, because, attempt) in enumerate(record.tries(), start=1):
        end = over if attempt is None else _end_of(attempt, over)
        began_s = arrived_s if number == 1 else asked_s
        parent = ROOT if number == 1 else f"attempt {number}"
        phases = list(_phases(attempt, number, parent, began_s, end))
        if number > 1:
            yield SpanFacts(
                "attempt",
                parent,
                ROOT,
                began_s,
                end.time_s,
                attributes={
                    "diptych.attempt": number,
                    "diptych.retry_reason": _cut(because),
                    **_error_type(end.error_type),
                },
                error=phases[-1][0].error,
            )
        for phase, placement in phases:
            yield phase
            engines = None if placement is None else _of_engine(phase, placement)
            if engines is not None:
                yield engines


def _end_of(attempt: Attempt, over: _End) -> _End:
    """over: the end of the request."""
    if attempt.ended_s is None or attempt.setback is None:
        return over
    if attempt.setback is Setback.MOVE:
        return _End(attempt.ended_s, "", "")
    return _End(attempt.ended_s, attempt.why, attempt.setback.name.lower())


def _phases(
    attempt: Attempt | None, number: int, parent: str, asked_s: float, end: _End
) -> Iterator[tuple[SpanFacts, Placement | None]]:
    """The queue, and then what each engine had to do until the next one took over."""
    queue = SpanFacts("queue", f"queue {number}", parent, asked_s, end.time_s)
    queue.attributes["diptych.attempt"] = number
    yield queue, None
    if attempt is None:
        _fail(queue, end)
        return
    queue.ended_s = attempt.began_s
    queue.attributes["diptych.reason"] = _cut(attempt.decision.reason)
    queue.attributes["diptych.prefill_engine"] = _cut(str(attempt.facts["prefill"]))
    queue.attributes["diptych.decode_engine"] = _cut(attempt.decode)
    decodes_at_once = attempt.prefill in ("", attempt.decode)
    for at, placement in enumerate(attempt.placements):
        is_last = at == len(attempt.placements) - 1
        until_s = end.time_s if is_last else attempt.placements[at + 1].sent_s
        came_s = placement.first_word_s if placement.first_tokens else None
        told: dict[str, Value] = {
            "diptych.attempt": number, "diptych.engine": _cut(placement.name)
        }  # fmt: skip
        first = SpanFacts(
            "hand-off" if at else "prefill",
            placement.core_id,
            parent,
            placement.sent_s,
            until_s if came_s is None else came_s,
            "client",
            attributes={**told, "diptych.tokens": placement.first_tokens},
        )
        if is_last and came_s is None:
            _fail(first, end)
        yield first, placement
        if came_s is not None and (at or decodes_at_once):
            told["diptych.tokens"] = placement.num_tokens - placement.first_tokens
            key = f"decode {placement.core_id}"
            decode = SpanFacts("decode", key, parent, came_s, until_s, "client", attributes=told)
            if is_last:
                _fail(decode, end)
            yield decode, placement


def _fail(phase: SpanFacts, end: _End) -> None:
    """It was running when the attempt failed."""
    phase.error = _cut(end.error)
    if end.error:
        phase.attributes |= _error_type(end.error_type)


def _of_request(
    record: RequestRecord, over: _End, arrived_s: float, attributes: Mapping[str, Value]
) -> SpanFacts:
    told: dict[str, Value] = {
        **attributes,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.tokens.total,
        "gen_ai.latency.e2e": over.time_s - arrived_s,
        "diptych.attempts": record.num_attempts + record.is_waiting,
        **_error_type(over.error_type),
    }
    if record.first_token_s is not None:
        told["gen_ai.latency.time_to_first_token"] = record.first_token_s - arrived_s
    if not over.error_type:
        told["gen_ai.response.finish_reasons"] = [record.outcome]
    return SpanFacts(
        "request",
        ROOT,
        None,
        arrived_s,
        over.time_s,
        "server",
        attributes=told,
        error=_cut(over.error),
    )


def _of_engine(parent: SpanFacts, placement: Placement) -> SpanFacts | None:
    """What the engine did in a phase, by its own word; None if it said nothing of it."""
    stations = _stations_in(parent.name, placement)
    if not stations:
        return None
    last, *_, preemptions = stations[-1]
    goal = Station.FINISHED if parent.name == "decode" else Station.FIRST_TOKEN
    is_over = last in (goal, Station.FINISHED)

    def within(time_s: float) -> float:
        return min(max(time_s, parent.began_s), parent.ended_s)

    events = [(kind.name, within(time_s)) for kind, time_s, *_ in stations]
    return SpanFacts(
        f"engine {parent.name}",
        f"engine {parent.key}",
        parent.key,
        events[0][1],
        events[-1][1] if is_over else parent.ended_s,
        "server",
        engine=_cut(placement.name),
        attributes={
            "diptych.preemptions": preemptions,
            "diptych.core_request_id": _cut(placement.core_id),
        },
        events=events,
    )


def _stations_in(phase: str, placement: Placement) -> list[tuple[Station, float, int, int]]:
    """Those of decode begin with the first token, and those before decode end with it."""
    told = list(placement.stations())
    kinds = [kind for kind, *_ in told]
    first = kinds.index(Station.FIRST_TOKEN) if Station.FIRST_TOKEN in kinds else len(told)
    return told[first:] if phase == "decode" else told[: first + 1]


def _error_type(kind: str) -> dict[str, Value]:
    return {"error.type": kind} if kind else {}


def _cut(text: str) -> str:
    return text[:MOST_TEXT]
