"""What engine and router pods tell an operator over their admin port, as JSON.

The admin port wants a bearer token (`ADMIN_TOKEN_FILE` of the service's Secret) on every path.

    router   GET  /admin/state              RouterReport
    router   GET  /admin/requests           RequestList, the newest first; `?limit=`
    router   GET  /admin/requests/ID/why    Explanation
    engine   GET  /admin/state              DrainReport
    engine   POST /admin/drain              DrainReport, once drained or after `?timeout_s=`

Engines take control calls there, too (`diptych_frontend.admin`),
which no operator makes: docs/admin-api.md lists them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ADMIN_TOKEN_FILE = "admin-token"
PREVIOUS_ADMIN_TOKEN_FILE = "previous-admin-token"
"""Accepted too, so that a rotation refuses nobody while the new Secret travels to the pods."""
RECENT_S = 60.0
"""What a router reports as recent happened within so many seconds."""


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True):
    """One real request that a router sent through a pair before it trusted an engine."""

    prefill: str
    decode: str
    revision: str
    ok: bool
    """Blocks crossed the hinge, and decode computed nothing of the prompt."""
    error: str = ""
    """Why it is not ok, in words."""
    prompt_tokens: int = 0
    computed_by_decode: int = 0
    """Prompt tokens that decode computed itself; 0 on a working hinge."""
    blocks: int = 0
    bytes: int = 0
    milliseconds: float = 0.0
    """From the request to its last token."""
    transport: str = ""
    unix_time: float = 0.0


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as a router sees it."""

    engine_id: str
    """The pod's name."""
    role: str
    revision: str
    usable: bool
    """Listed by discovery, neither draining nor paused, and verified as far as the service asks
    for it."""
    listed: bool
    draining: bool
    verified: bool
    open_tokens: int
    """Tokens of work that this router has open there."""
    num_running: int
    num_waiting: int
    queued_prompt_tokens: int
    """Prompt tokens that no step has computed and no cached prefix covers."""
    kv_usage: float
    """Share of KV blocks that requests and leases hold, 0 to 1."""
    leases_held: int
    blocks_held: int
    """Blocks that wait to be read by decode engines."""
    loads_failed: int
    leases_expired: int
    stale_reads_refused: int
    paused: bool = False
    """Somebody paused it or put it to sleep; it gets no new requests meanwhile."""
    prefix_fetches: int = 0
    """Prefixes that it was to fetch from engines that remember them."""
    prefix_fetches_failed: int = 0
    """Those that it had to compute."""
    prefix_tokens_fetched: int = 0
    silent: bool = False
    """A heartbeat of its loop is overdue, or it has work and makes no steps."""
    breaker: str = "closed"
    """State of its circuit breaker: closed, open or half-open."""
    kept_out: bool = False
    """Its breaker is open, and it gets no requests while others of its pool can take them."""
    failures: dict[str, int] = {}
    """What it did wrong since the router knows its address -> how often: error, lost, hang or late
    (with a first token). doubted: it had to be verified again, because hand-offs of it could not be
    trusted."""
    node: str = ""
    zone: str = ""
    """Where it runs; empty: not known."""


class PromiseCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often one promise of the service was kept, by one pool."""

    pool: str
    """prefill or decode: who computed the prompt, for a first token; who generated, otherwise."""
    promise: str
    """first_token or inter_token."""
    outcome: str
    """kept, missed, or refused: the request was not taken on, because it would have been missed."""
    requests: int


class RefusedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that this router cannot obey, and which keeps it from getting ready."""

    setting: str
    """The field of `RouterSettings`."""
    why: str
    """What is wrong with its value, and what it may be, without a full stop."""


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one router knows of the service."""

    ready: bool
    reason: str
    """Why it is not ready; empty if it is."""
    open_requests: int
    held_requests: int
    """Requests that wait for an engine because a pool is empty."""
    serving_revisions: list[str]
    """Revisions this router may send requests to; empty means all."""
    engines: list[EngineReport]
    canaries: list[CanaryReport]
    """The newest of each pair, newest last."""
    promises: list[PromiseCount] = []
    """Since the router's start."""
    refused_settings: list[RefusedSetting] = []
    recent_promises: list[PromiseCount] = []
    """The same for the last `RECENT_S` seconds, and only what more pods can change: neither prompts
    that take longer than promised on an idle engine, nor failures that have nothing to do with
    load."""


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine may go, and what it still holds."""

    draining: bool
    drained: bool
    """Draining, and neither a request nor a lease is left."""
    num_running: int
    num_waiting: int
    leases_held: int


# --- why a request went where it did -----------------------------------------------------------
# No text and no token of a prompt or an answer is told, only how many there are.

Duty = Literal["prefill", "decode", "both"]
"""What an engine was to do: compute the prompt for another, go on after that, or everything."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that could have taken a request."""

    engine: str
    """Its name; its address if it has gone since."""
    chosen: bool
    cost: float
    """The sum of `terms`."""
    terms: dict[str, float]
    """What it would have cost, by the name of the reason; docs/routing.md explains the names. In
    seconds with the policy `prefixAware`."""
    cached_tokens: int
    """Tokens of the prompt whose KV it had, as far as the router knew."""
    near: str = ""
    """For the duty decode: how near it was to the engine that was to compute the prompt: `same
    node`, `same zone` or `other zone`; empty: not known, or the policy does not ask."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that were weighed for one duty."""

    duty: Duty
    num_able: int
    """Engines that could have taken the request."""
    candidates: list[Candidate]
    """The cheapest of them, the cheapest first, and the chosen one."""


class AttemptReport(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of engines, and what came of it. Seconds count from the choice on."""

    unix_time: float
    reason: str
    prefill: str
    """The engine that was to compute the prompt; empty: the one that decodes."""
    decode: str
    fetch: str = ""
    """The engine that was to lend the beginning of the prompt's KV; empty: none."""
    fetch_tokens: int = 0
    terms: dict[str, float] = {}
    """What the chosen engines were expected to cost."""
    to_compute: float = 0.0
    """Tokens of the prompt that were expected to be computed."""
    choices: list[Choice] = []
    """What was weighed; empty if there was no choice, or if it is no longer remembered."""
    first_token_expected_s: float | None = None
    """The sum of `wait_s`, `compute_s` and `fetch_s`; None: the policy does not say."""
    first_token_s: float | None = None
    """None: this attempt brought no token."""
    cached_tokens: int | None = None
    """Tokens of the prompt whose KV the engine that computed it had, by its own word."""
    hand_off_expected_s: float | None = None
    """`transfer_s` and one step of decode; None: there was none to be, or the policy does not
    say."""
    hand_off_s: float | None = None
    """From the first token to the next one, which another engine generated."""
    received_tokens: int = 0
    """Tokens whose KV that engine received."""
    decoded_by: list[str] = []
    """The engines that decoded, one after the other: more than one if the stream was moved."""
    setback: str = ""
    """What ended the attempt early: error, loss, full, late or move; empty if nothing did."""
    why: str = ""
    """The same in words."""
    setback_s: float | None = None
    """When that was; None: nothing was."""


class StationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine told of a request at one moment."""

    name: str
    """queued, scheduled, chunk, first_token, preempted, finished, kv_wait, kv_done or kv_fail: the
    names of `RequestJourneyEventType`."""
    at_s: float
    """Seconds after the request's arrival, on the router's clock: the engine's time, placed by the
    fastest of its messages."""
    prompt_tokens: int = 0
    """The furthest that the prompt was computed."""


class PlacementReport(msgspec.Struct, frozen=True, kw_only=True):
    """A request at one engine. Seconds count from the request's arrival."""

    engine: str
    attempt: int
    """The number of the attempt, from 1 on."""
    sent_s: float
    """When the router sent it there."""
    first_word_s: float | None = None
    """When the engine's first token came; None: none came."""
    received_tokens: int = 0
    """Tokens whose KV the engine received."""
    stations: list[StationReport] = []
    """What the engine told, as it happened; empty if it tells nothing, as engines of vLLM."""


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a prompt. A request for n answers is n of them."""

    request_id: str
    """What the client knows it by: the header `X-Request-Id` of its answer."""
    core_id: str
    """What the router and its log know it by."""
    unix_time: float
    prompt_tokens: int
    output_tokens: int = 0
    """Tokens of the answer, once it has ended."""
    waited_s: float | None = None
    """From its arrival to the first choice of engines; None: it waits."""
    seconds: float | None = None
    """From its arrival to its end; None: it has not ended."""
    outcome: str = ""
    """stop, length, abort or error; empty: it has not ended."""
    attempts: list[AttemptReport] = []
    attempts_left_out: int = 0
    """Later attempts that are not remembered, because there were so many."""
    tenant: str = ""
    """Whose request it is: the name of its API key; empty without keys."""
    placements: list[PlacementReport] = []
    """The engines that had it, one after the other."""
    token_times_s: list[float] = []
    """When tokens came, in seconds after the arrival: of a short answer every token, of a longer
    one every second, fourth, ..."""
    token_counts: list[int] = []
    """How many tokens there were by each of these times."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """All that a router remembers under one id."""

    policy: str
    disaggregate: str
    requests: list[RequestReport]
    """The newest first."""


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request in a list."""

    request_id: str
    unix_time: float
    prompt_tokens: int
    output_tokens: int
    prefill: str
    """The engine of the newest attempt that computed the prompt; empty: the one that decoded."""
    decode: str
    attempts: int
    first_token_s: float | None
    """From its arrival."""
    outcome: str


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that a router remembers, the newest first."""

    requests: list[RequestLine]
    num_remembered: int
    most_remembered: int
