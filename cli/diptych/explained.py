"""Formats what routers report about requests, for both commands `why`, without I/O."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from diptych.router_admin import Told
from diptych.watching import bare_table, harmless
from diptych_protocol.admin import (
    AttemptReport,
    Choice,
    Explanation,
    RequestLine,
    RequestList,
    RequestReport,
)

DUTIES: Final = {
    "prefill": "to compute the prompt",
    "decode": "to decode",
    "both": "to compute the prompt and decode",
}
CHOSEN: Final = ">"


def as_json(told: Sequence[Told[Any]]) -> list[dict[str, Any]]:
    """Return values for programs: one entry for each router that answered."""
    return [{"router": one.router, **msgspec.to_builtins(one.known)} for one in told]


def listing(found: Sequence[Told[RequestList]]) -> RenderableType:
    """Format one line for each request, the newest first."""
    lines = [(one.router, line) for one in found for line in one.known.requests]
    if not lines:
        return Text("no request has come since the routers started")
    numbers = ("PROMPT", "ANSWER", "ATTEMPTS", "FIRST TOKEN")
    names = ("REQUEST", "TIME", "ROUTER", "PREFILL", "DECODE", "OUTCOME")
    table = bare_table(*names, *numbers, right=numbers)
    for router, line in sorted(lines, key=lambda pair: -pair[1].unix_time):
        table.add_row(*map(escape, _cells(router, line)))
    return table


def _cells(router: str, line: RequestLine) -> Iterator[str]:
    yield line.request_id
    yield _clock(line.unix_time)
    yield router
    yield line.prefill or line.decode or "-"
    yield line.decode or "-"
    yield line.outcome or "open"
    yield str(line.prompt_tokens)
    yield str(line.output_tokens) if line.outcome else "-"
    yield str(line.attempts)
    yield _seconds(line.first_token_s)


def explanation(found: Sequence[Told[Explanation]]) -> RenderableType:
    """Format all that routers have recorded under one id."""
    parts: list[RenderableType] = []
    for one in found:
        for request in one.known.requests:
            parts += [*_request(one, request), Text()]
    return Group(*parts[:-1])


def _request(told: Told[Explanation], request: RequestReport) -> Iterator[RenderableType]:
    known = told.known
    yield Text(f"{request.request_id}  {_clock(request.unix_time)}  {told.router}", style="bold")
    yield Text(f"policy    {known.policy}, disaggregate: {known.disaggregate}")
    yield Text(f"prompt    {request.prompt_tokens} tokens")
    yield Text(f"answer    {_answer(request)}")
    if request.waited_s is None:
        yield Text("waits for an engine: none was chosen yet")
    elif request.waited_s >= 0.001:
        yield Text(f"waited    {_seconds(request.waited_s)} until engines were chosen")
    for number, attempt in enumerate(request.attempts, start=1):
        yield Text()
        yield from _attempt(number, attempt, request)
    if request.attempts_left_out:
        yield Text(f"\n{request.attempts_left_out} later attempts are not remembered")


def _answer(request: RequestReport) -> str:
    if request.seconds is None:
        return "not ended"
    return f"{request.output_tokens} tokens in {_seconds(request.seconds)}, {request.outcome}"


def _attempt(
    number: int, attempt: AttemptReport, request: RequestReport
) -> Iterator[RenderableType]:
    engines = f"{attempt.prefill} -> {attempt.decode}" if attempt.prefill else attempt.decode
    yield Text(f"attempt {number}: {engines} ({attempt.reason})", style="bold")
    if attempt.fetch:
        yield Text(f"fetches {attempt.fetch_tokens} tokens of KV from {attempt.fetch}")
    moved = [engine for engine in attempt.decoded_by if engine != attempt.decode]
    if moved:
        yield Text(f"decoded by {', '.join(attempt.decoded_by)}")
    if attempt.setback:
        yield Text(harmless(f"{attempt.setback}: {attempt.why}"), style="red")
    if not attempt.choices:
        yield Text("the other candidates are not remembered")
        yield _terms_alone(attempt)
    for choice in attempt.choices:
        yield _candidates(choice)
    yield _came_true(attempt, request)


def _candidates(choice: Choice) -> Table:
    """Candidates x terms, the cheapest first."""
    terms = list(dict.fromkeys(name for x in choice.candidates for name in x.terms))
    places = any(candidate.near for candidate in choice.candidates)
    total = "total_s" if any(name.endswith("_s") for name in terms) else "total"
    disks = any(candidate.stored_tokens for candidate in choice.candidates)
    cached = ("CACHED TOKENS", *(("ON DISK",) if disks else ()))
    numbers = [*cached, *map(_heading, (*terms, total))]
    names = ("", DUTIES[choice.duty].upper(), *(("PLACE",) if places else ()))
    table = bare_table(*names, *numbers, right=numbers)
    for candidate in choice.candidates:
        amounts = [_amount(name, candidate.terms.get(name)) for name in terms]
        table.add_row(
            CHOSEN if candidate.chosen else "",
            escape(candidate.engine),
            *((candidate.near or "-",) if places else ()),
            str(candidate.cached_tokens),
            *((str(candidate.stored_tokens),) if disks else ()),
            *amounts,
            _amount(total, candidate.cost),
            style="bold" if candidate.chosen else "",
        )
    more = choice.num_able - len(choice.candidates)
    if more > 0:
        table.add_row("", f"and {more} more")
    return table


def _terms_alone(attempt: AttemptReport) -> RenderableType:
    if not attempt.terms:
        return Text("no cost was weighed")
    numbers = [_heading(name) for name in attempt.terms]
    table = bare_table("COST", *numbers, right=numbers)
    table.add_row("chosen", *(_amount(name, value) for name, value in attempt.terms.items()))
    return table


def _came_true(attempt: AttemptReport, request: RequestReport) -> Table:
    """Predicted against real."""
    numbers = ("PREDICTED", "REAL", "REAL / PREDICTED")
    table = bare_table("WHAT CAME TRUE", *numbers, right=numbers)
    for what, predicted, real in (
        ("first token", attempt.first_token_expected_s, attempt.first_token_s),
        ("hand-off", attempt.hand_off_expected_s, attempt.hand_off_s),
    ):
        ratio = f"{real / predicted:.2f}" if real is not None and predicted else "-"
        table.add_row(what, _seconds(predicted), _seconds(real), ratio)
    had = "-" if attempt.cached_tokens is None else str(attempt.cached_tokens)
    expected = str(round(request.prompt_tokens - attempt.to_compute)) if attempt.terms else "-"
    table.add_row("tokens of the prompt in cache", expected, had, "-")
    if attempt.pinned_tokens:
        table.add_row("of them pinned by a turn", "-", str(attempt.pinned_tokens), "-")
    return table


def _heading(term: str) -> str:
    name = term.removesuffix("_s")
    return name.replace("_", " ").upper() + (" ms" if name != term else "")


def _amount(term: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f}" if term.endswith("_s") else f"{value:g}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1.0 else f"{value * 1e3:.1f} ms"


def _clock(unix_time: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_time))
