"""Turns a router's record of a request into lanes with bars and marks, without I/O.

There is a lane for the router and one for each engine. Times are in seconds after the request's
arrival, on the router's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from diptych_protocol.admin import PlacementReport, RequestReport

Kind = Literal["wait", "queue", "prefill", "kv", "decode", "preempted"]
MEANINGS: Final[dict[Kind, str]] = {
    "wait": "waits for engines",
    "queue": "waits at an engine",
    "prefill": "prompt",
    "kv": "KV comes over",
    "decode": "tokens",
    "preempted": "lost its blocks",
}
ROUTER: Final = "router"
SHORTEST_WAIT_S: Final = 0.0005
"""A shorter wait for engines is not drawn."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of time."""

    kind: Kind
    began_s: float
    ended_s: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """One moment."""

    at_s: float
    label: str
    is_bad: bool = False


@dataclass(slots=True)
class Lane:
    """The lane of the router or of an engine."""

    name: str
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    ticks_s: list[float] = field(default_factory=list)
    """The times at which it sent tokens."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One answer to a prompt."""

    request_id: str
    title: str
    seconds: float
    """From the arrival to the end, or to the last known time."""
    lanes: list[Lane]
    """The router's first, then the engines' in the order in which they had the request."""


def timeline(request: RequestReport) -> Timeline:
    """Return the lanes of a request. What an engine does not report is in the bar before."""
    seconds = _seconds(request)
    router = Lane(ROUTER)
    lanes = {ROUTER: router}
    _fill_router(router, request, seconds)
    for index, placement in enumerate(request.placements):
        lane = lanes.setdefault(placement.engine, Lane(placement.engine))
        end_s = _end_of(request, index, seconds)
        lane.bars += _bars(request, index, end_s)
        lane.marks += _kv_marks(placement)
        lane.ticks_s += [t for t in request.token_times_s if placement.sent_s < t <= end_s]
    tokens = f"{request.prompt_tokens} + {request.output_tokens} tokens"
    outcome = request.outcome or "not ended"
    title = f"{request.request_id}: {tokens}, {outcome}"
    return Timeline(request.request_id, title, seconds, list(lanes.values()))


def _kv_marks(placement: PlacementReport) -> Iterator[Mark]:
    """KV that did not come, and KV that was fetched before the request was there: a decode engine
    is told of it while another one computes the prompt."""
    waited = any(station.name == "kv_wait" for station in placement.stations)
    for station in placement.stations:
        if station.name == "kv_fail":
            yield Mark(station.at_s, "KV did not come", is_bad=True)
        elif station.name == "kv_done" and not waited:
            yield Mark(station.at_s, f"KV of {placement.received_tokens} tokens came before")


def _seconds(request: RequestReport) -> float:
    if request.seconds is not None:
        return request.seconds
    known = [request.waited_s or 0.0, *request.token_times_s]
    for placement in request.placements:
        known += [placement.sent_s, *(station.at_s for station in placement.stations)]
    return max(known)


def _fill_router(router: Lane, request: RequestReport, seconds: float) -> None:
    """Waits for engines, and what the client saw."""
    waited_s = seconds if request.waited_s is None else request.waited_s
    if waited_s >= SHORTEST_WAIT_S:
        router.bars.append(Bar("wait", 0.0, waited_s, MEANINGS["wait"]))
    for number, attempt in enumerate(request.attempts, start=1):
        if not attempt.setback:
            continue
        at_s = _setback_s(request, number)
        went_on = next((p.sent_s for p in request.placements if p.attempt > number), seconds)
        if went_on - at_s >= SHORTEST_WAIT_S:
            router.bars.append(Bar("wait", at_s, went_on, MEANINGS["wait"]))
        kind = "moves" if attempt.setback == "move" else attempt.setback
        router.marks.append(Mark(at_s, f"{kind}: {attempt.why}", attempt.setback != "move"))
    if request.token_times_s:
        router.marks.append(Mark(request.token_times_s[0], "first token"))
    if request.outcome:
        router.marks.append(Mark(seconds, request.outcome, request.outcome == "error"))


def _setback_s(request: RequestReport, number: int) -> float:
    """When an attempt ended early, after the request's arrival."""
    attempt = request.attempts[number - 1]
    return attempt.unix_time - request.unix_time + (attempt.setback_s or 0.0)


def _end_of(request: RequestReport, index: int, seconds: float) -> float:
    """When an engine had the request no longer."""
    placement, later = request.placements[index], request.placements[index + 1 :]
    if not later:
        return seconds
    if later[0].attempt == placement.attempt:
        return max(placement.sent_s, later[0].sent_s)
    if placement.attempt <= len(request.attempts):
        return max(placement.sent_s, _setback_s(request, placement.attempt))
    return later[0].sent_s


def _bars(request: RequestReport, index: int, end_s: float) -> Iterator[Bar]:
    """What an engine did, cut where its stations say so."""
    placement = request.placements[index]
    takes_over = index > 0 and request.placements[index - 1].attempt == placement.attempt
    kind: Kind = "kv" if takes_over else "prefill"
    if placement.stations:
        kind = "queue"
    began_s, done = placement.sent_s, _done_before(placement)
    for begins, at_s, tokens in _turns(placement, takes_over, end_s):
        if begins == kind != "prefill":
            continue
        at_s = min(max(at_s, began_s), end_s)
        if at_s > began_s:
            label = _label(request, placement, kind, began_s, at_s, tokens - done)
            yield Bar(kind, began_s, at_s, label)
        if begins == "end" or (begins == "decode" and _only_prompt(request, placement)):
            return
        kind, began_s, done = begins, at_s, max(done, tokens)


def _only_prompt(request: RequestReport, placement: PlacementReport) -> bool:
    """Whether the engine was to compute the prompt for another one."""
    if placement.attempt > len(request.attempts):
        return False
    attempt = request.attempts[placement.attempt - 1]
    return placement.engine == attempt.prefill != attempt.decode


_WAITS: Final[dict[str, Kind]] = {
    "queued": "queue",
    "kv_wait": "kv",
    "kv_done": "queue",
    "kv_fail": "queue",
    "preempted": "preempted",
}
"""What begins at a station."""


def _turns(
    placement: PlacementReport, has_kv: bool, end_s: float
) -> Iterator[tuple[Kind | Literal["end"], float, int]]:
    """What begins, when, and how much of the prompt was computed by then. has_kv: another engine
    computes the prompt."""
    has_token = False
    for station in placement.stations:
        has_kv = has_kv and station.name != "kv_fail"
        has_token = has_token or station.name == "first_token"
        computes: Kind = "decode" if has_kv or has_token else "prefill"
        if station.name == "finished":
            yield "end", station.at_s, 0
        yield _WAITS.get(station.name, computes), station.at_s, station.prompt_tokens
    if placement.first_word_s is not None and not has_token:
        yield "decode", placement.first_word_s, 0
    yield "end", end_s, 0


def _done_before(placement: PlacementReport) -> int:
    """Tokens of the prompt that the engine had before it computed any."""
    scheduled = [x.prompt_tokens for x in placement.stations if x.name == "scheduled"]
    return scheduled[0] if scheduled else 0


def _label(
    request: RequestReport,
    placement: PlacementReport,
    kind: Kind,
    began_s: float,
    ended_s: float,
    computed: int,
) -> str:
    if kind == "prefill" and placement.attempt > 1:
        return "the prompt, and the answer so far"
    if kind == "prefill":
        return f"{computed} tokens of the prompt" if computed > 0 else MEANINGS[kind]
    if kind == "kv" and placement.received_tokens:
        return f"KV of {placement.received_tokens} tokens"
    if kind == "decode":
        times, counts = request.token_times_s, request.token_counts
        by = [count for at_s, count in zip(times, counts, strict=False) if at_s <= ended_s]
        before = [count for at_s, count in zip(times, counts, strict=False) if at_s <= began_s]
        came = (by[-1] if by else 0) - (before[-1] if before else 0)
        if came > 0 and ended_s > began_s:
            return f"{came} tokens, {came / (ended_s - began_s):.0f}/s"
    return MEANINGS[kind]
