"""The spans of a request's trail: those of the router, and below them those of its engines.

An engine tells its router the stations of each request. From these the router makes the engine's
spans, as an engine's front-end does with the requests that it has sent itself. Names of attributes
follow the semantic conventions for generative AI where there are any. Only the span `request` has
usage, since backends add up what the spans of a trace have used. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from diptych_protocol import RequestJourneyEvent
from diptych_protocol import RequestJourneyEventType as Station
from diptych_router.trail import Attempt, Phase, Placement, Trail

MAX_TEXT = 1024
"""Longer texts, such as engines' reasons, are cut."""
Value = str | int | float | list[str]


@dataclass(slots=True)
class SpanFacts:
    """A span but for its trace. Times are in seconds of the trail's clock."""

    name: str
    parent_id: int | None
    """None: the parent is the client's span, if there is one."""
    began_s: float
    ended_s: float
    kind: Literal["server", "client", "internal"] = "internal"
    span_id: int | None = None
    """None: nobody else knows it yet."""
    engine: str = ""
    """The engine whose span it is; empty: the router's."""
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""
    events: list[tuple[str, float]] = field(default_factory=list)


def spans_of(trail: Trail, model_name: str) -> Iterator[SpanFacts]:
    """All spans of a trail that has ended, parents first."""
    yield _of_request(trail, model_name)
    for number, attempt in enumerate(trail.attempts, start=1):
        if number > 1:
            yield _of_attempt(trail, attempt, number)
        for phase in attempt.phases:
            own = _of_phase(trail, attempt, phase, number)
            yield own
            engines = None if phase.placement is None else _of_engine(own, phase, phase.placement)
            if engines is not None:
                yield engines


def _of_request(trail: Trail, model_name: str) -> SpanFacts:
    request, params = trail.request, trail.request.sampling_params
    lora = request.lora_request
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "embeddings" if params is None else "text_completion",
        "gen_ai.provider.name": "diptych",
        "gen_ai.request.model": model_name if lora is None else _cut(lora.lora_name),
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": _cut(request.shown_id),
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids or ()),
        "gen_ai.usage.output_tokens": trail.num_tokens,
        "gen_ai.latency.e2e": trail.ended_s - trail.began_s,
        "diptych.attempts": len(trail.attempts),
    }
    if params is not None:
        attributes["gen_ai.request.temperature"] = params.temperature
        attributes["gen_ai.request.top_p"] = params.top_p
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if trail.first_token_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = trail.first_token_s - trail.began_s
    if trail.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = [trail.finish_reason]
    if request.tenant:
        attributes["diptych.tenant"] = _cut(request.tenant)
    _tell_error(attributes, trail.error_type)
    return SpanFacts(
        "request",
        None,
        trail.began_s,
        trail.ended_s,
        "server",
        trail.span_id,
        attributes=attributes,
        error=_cut(trail.error),
    )


def _of_attempt(trail: Trail, attempt: Attempt, number: int) -> SpanFacts:
    attributes: dict[str, Value] = {
        "diptych.attempt": number,
        "diptych.retry_reason": _cut(attempt.because),
    }
    _tell_error(attributes, attempt.error)
    return SpanFacts(
        "attempt",
        trail.span_id,
        attempt.began_s,
        trail.ended_s if attempt.ended_s is None else attempt.ended_s,
        span_id=attempt.span_id,
        attributes=attributes,
        error=_cut(attempt.phases[-1].error),
    )


def _of_phase(trail: Trail, attempt: Attempt, phase: Phase, number: int) -> SpanFacts:
    attributes: dict[str, Value] = {"diptych.attempt": number}
    if phase.placement is None:
        for key, name in (
            ("reason", "diptych.reason"),
            ("prefill", "diptych.prefill_engine"),
            ("decode", "diptych.decode_engine"),
        ):
            if key in attempt.facts:
                attributes[name] = _cut(str(attempt.facts[key]))
    else:
        attributes["diptych.engine"] = _cut(phase.placement.engine)
        attributes["diptych.tokens"] = phase.num_tokens
    if phase.error:
        _tell_error(attributes, attempt.error)
    return SpanFacts(
        phase.name,
        attempt.span_id,
        phase.began_s,
        trail.ended_s if phase.ended_s is None else phase.ended_s,
        "internal" if phase.placement is None else "client",
        phase.span_id,
        attributes=attributes,
        error=_cut(phase.error),
    )


def _of_engine(parent: SpanFacts, phase: Phase, placement: Placement) -> SpanFacts | None:
    """What the engine did in a phase, by its own word; None if it said nothing of it."""
    stations = _stations_in(phase, placement)
    if not stations:
        return None
    *_, last = stations
    goal = Station.FINISHED if phase.name == "decode" else Station.FIRST_TOKEN
    is_over = last.event_type in (goal, Station.FINISHED)

    def within(time_s: float) -> float:
        return min(max(time_s, parent.began_s), parent.ended_s)

    times = [(station, within(placement.time_of(station))) for station in stations]
    return SpanFacts(
        f"engine {phase.name}",
        parent.span_id,
        times[0][1],
        times[-1][1] if is_over else parent.ended_s,
        "server",
        engine=_cut(placement.engine),
        attributes={
            "diptych.preemptions": last.num_preemptions_so_far,
            "diptych.core_request_id": _cut(placement.core_id),
        },
        events=[(station.event_type.name, time_s) for station, time_s in times],
    )


def _stations_in(phase: Phase, placement: Placement) -> list[RequestJourneyEvent]:
    """Those of decode begin with the first token, and those before decode end with it. Departure is
    not one of them: it is the moment at which the engine told of the end."""
    told = [x for x in placement.stations if x.event_type is not Station.DEPARTED]
    kinds = [x.event_type for x in told]
    first = kinds.index(Station.FIRST_TOKEN) if Station.FIRST_TOKEN in kinds else len(told)
    return told[first:] if phase.name == "decode" else told[: first + 1]


def _tell_error(attributes: dict[str, Value], kind: str) -> None:
    if kind:
        attributes["error.type"] = kind


def _cut(text: str) -> str:
    return text[:MAX_TEXT]
