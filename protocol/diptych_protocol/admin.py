"""The reports of engine and router pods to the operator, as JSON over their admin port.

The admin port requires a bearer token (`ADMIN_TOKEN_FILE` of the service's Secret) on every path.

    router   GET  /admin/state              RouterReport
    router   GET  /admin/requests           RequestList, the newest first; `?limit=`
    router   GET  /admin/requests/ID/why    Explanation
    router   GET  /admin/load               LoadReport
    engine   GET  /admin/state              DrainReport
    engine   POST /admin/drain              DrainReport, once drained or after `?timeout_s=`

Engines also accept control calls there (`diptych_frontend.admin`), which the operator does not use;
docs/admin-api.md lists them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ADMIN_TOKEN_FILE = "admin-token"
PREVIOUS_ADMIN_TOKEN_FILE = "previous-admin-token"
"""Also accepted, so that nobody is refused while a rotated Secret is on its way to the pods."""
RECENT_S = 60.0
"""A router's reports call recent what happened within this many seconds."""


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True):
    """One real request that a router sent through a pair before it trusted an engine."""

    prefill: str
    decode: str
    revision: str
    ok: bool
    """Whether the KV was transferred, and the decode engine computed nothing of the prompt."""
    error: str = ""
    """What went wrong, if it is not ok."""
    prompt_tokens: int = 0
    computed_by_decode: int = 0
    """Prompt tokens that the decode engine computed itself; 0 if the hand-off works."""
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
    """What it does now."""
    home: str = ""
    """The pool that its pod belongs to; empty: the one of its role."""
    revision: str
    usable: bool
    """Whether discovery lists it, it is neither draining nor paused, and it is verified as the
    service requires."""
    listed: bool
    draining: bool
    verified: bool
    open_tokens: int
    """Tokens of this router's open requests there."""
    num_running: int
    num_waiting: int
    queued_prompt_tokens: int
    """Prompt tokens that no step has computed and no cached prefix covers."""
    kv_usage: float
    """Share of KV blocks that requests and leases hold, 0 to 1."""
    leases_held: int
    blocks_held: int
    """Blocks that wait for decode engines to read them."""
    loads_failed: int
    leases_expired: int
    stale_reads_refused: int
    paused: bool = False
    """Whether it is paused or asleep; it gets no new requests meanwhile."""
    prefix_fetches: int = 0
    """Prefixes that it tried to fetch from other engines."""
    prefix_fetches_failed: int = 0
    """Those of them that it had to compute."""
    prefix_tokens_fetched: int = 0
    silent: bool = False
    """Whether a heartbeat of its loop is overdue, or it has work and makes no steps."""
    breaker: str = "closed"
    """State of its circuit breaker: closed, open or half-open."""
    kept_out: bool = False
    """Whether its breaker is open, so that it gets no requests while others of its pool can take
    them."""
    failures: dict[str, int] = {}
    """Kind of failure -> count, since the router knows its address: error, lost, hang or late (with
    a first token)."""
    node: str = ""
    zone: str = ""
    """The zone in which it runs; empty if unknown."""


class PromiseCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often one pool kept one promise of the service."""

    pool: str
    """prefill or decode: for a first token, the pool that computed the prompt; otherwise the one
    that generated."""
    promise: str
    """first_token or inter_token."""
    outcome: str
    """kept, missed, or refused: the request was not accepted, because its promise would have been
    missed."""
    requests: int


class RefusedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that this router cannot obey, and which keeps it from getting ready."""

    setting: str
    """The field of `RouterSettings`."""
    why: str
    """What is wrong with its value, and what it may be, without a full stop."""


class TrialReport(msgspec.Struct, frozen=True, kw_only=True):
    """A new revision that gets a share of the requests, and how those went since the share is what
    it is."""

    revision: str
    weight: int
    """Percent of new requests."""
    requests: int = 0
    """Those whose first token came, or that failed before it, or were given up when it was late;
    and those that ended well without a token, because they asked for none."""
    failed: int = 0
    late: int = 0
    """Those whose first token came later than promised (`slo.ttftMs`)."""
    ended: int = 0
    """Answers of at least two tokens that did not fail, whether or not clients gave them up."""
    slow: int = 0
    """Those of them whose tokens came slower than promised (`slo.interTokenMs`)."""
    handed_over: int = 0
    """Those of them that were continued by an engine which received the prompt's KV."""
    open: int = 0
    """Those of `requests` whose answers go on, and may yet fail or be slow."""


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the service as one router sees it."""

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
    """The same for the last `RECENT_S` seconds, but only what more pods can change: it excludes
    prompts that take longer than promised on an idle engine, and failures without any relation to
    load."""
    admits_nobody: bool = False
    """Whether it asks for API keys and knows none, so that it refuses everybody."""
    trial: TrialReport | None = None
    """None while no revision is tried."""
    refused_certificate: str = ""
    """Why it goes on with a former certificate; empty if it uses the newest."""
    expired_certificate: str = ""
    """When the certificate in use ended, an RFC 3339 time; empty if it has not."""
    quiet_s: float | None = None
    """Seconds since the newest request came, however soon it ended; None if none is known."""
    left_out_keys: list[str] = []
    """What is wrong with entries of the API keys that are none."""


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine may end, and what it still holds."""

    draining: bool
    drained: bool
    """Whether it is draining, and neither a request nor a lease is left."""
    num_running: int
    num_waiting: int
    leases_held: int


# --- why a request went where it did -----------------------------------------------------------
# No text and no token of a prompt or an answer is told, only how many there are.

Duty = Literal["prefill", "decode", "both"]
"""The task of an engine: to compute the prompt for another, to continue after that,
or to do both."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that could have taken a request."""

    engine: str
    """Its name, or its address if it has gone since."""
    chosen: bool
    cost: float
    """The sum of `terms`."""
    terms: dict[str, float]
    """Its expected cost, by the name of the reason; docs/routing.md explains the names. In seconds
    with the policy `prefixAware`."""
    cached_tokens: int
    """Tokens of the prompt whose KV it had, as far as the router knew."""
    near: str = ""
    """For the duty decode: its distance from the engine chosen to compute the prompt: `same node`,
    `same zone` or `other zone`; empty if unknown, or if the policy does not use it."""
    stored_tokens: int = 0
    """The next tokens of the prompt, whose KV it had on disk only."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that were compared for one duty."""

    duty: Duty
    num_able: int
    """The number of engines that could have taken the request."""
    candidates: list[Candidate]
    """The cheapest of them, the cheapest first, and the chosen one."""


class AttemptReport(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of engines, and its outcome. Seconds count from the choice on."""

    unix_time: float
    reason: str
    prefill: str
    """The engine chosen to compute the prompt; empty: the one that decodes."""
    decode: str
    fetch: str = ""
    """The engine chosen to lend the beginning of the prompt's KV; empty: none."""
    fetch_tokens: int = 0
    terms: dict[str, float] = {}
    """The expected costs of the chosen engines."""
    to_compute: float = 0.0
    """Tokens of the prompt that were expected to be computed."""
    choices: list[Choice] = []
    """The candidates; empty if there was no choice, or if it is no longer recorded."""
    first_token_expected_s: float | None = None
    """The sum of `wait_s`, `compute_s` and `fetch_s`; None if the policy gives no seconds."""
    first_token_s: float | None = None
    """None if this attempt brought no token."""
    cached_tokens: int | None = None
    """Tokens of the prompt whose KV the engine that computed it had, as it reported."""
    hand_off_expected_s: float | None = None
    """`transfer_s` and one step of decode; None without a hand-off, or if the policy gives no
    seconds."""
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
    """When that happened; None if nothing did."""
    pinned_tokens: int = 0
    """Those of `cached_tokens` that an earlier turn had pinned."""


class StationReport(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a request that an engine reported."""

    name: str
    """queued, scheduled, chunk, first_token, preempted, finished, kv_wait, kv_done or kv_fail: the
    names of `RequestJourneyEventType`."""
    at_s: float
    """Seconds after the request's arrival, on the router's clock. The engine's time is converted by
    its fastest message."""
    prompt_tokens: int = 0
    """How many tokens of the prompt were computed, at most."""


class PlacementReport(msgspec.Struct, frozen=True, kw_only=True):
    """A request at one engine. Seconds count from the request's arrival."""

    engine: str
    attempt: int
    """The number of the attempt, from 1 on."""
    sent_s: float
    """When the router sent it there."""
    first_word_s: float | None = None
    """When the engine's first token came; None if none came."""
    received_tokens: int = 0
    """Tokens whose KV the engine received."""
    stations: list[StationReport] = []
    """The engine's reports, in order; empty for engines that report none, such as vLLM's."""


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a prompt. A request for n answers has n of them."""

    request_id: str
    """The id for the client: the header `X-Request-Id` of its answer."""
    core_id: str
    """The id in the router and its log."""
    unix_time: float
    prompt_tokens: int
    output_tokens: int = 0
    """Tokens of the answer, once it has ended."""
    waited_s: float | None = None
    """From its arrival to the first choice of engines; None while it waits."""
    seconds: float | None = None
    """From its arrival to its end; None if it has not ended."""
    outcome: str = ""
    """stop, length, abort or error; empty if it has not ended."""
    attempts: list[AttemptReport] = []
    attempts_left_out: int = 0
    """Later attempts that are not recorded, because there were so many."""
    tenant: str = ""
    """The name of its API key; empty without keys."""
    placements: list[PlacementReport] = []
    """The engines that had it, one after the other."""
    token_times_s: list[float] = []
    """When tokens came, in seconds after the arrival. For a short answer it has every token, for
    longer ones every second, fourth, ..."""
    token_counts: list[int] = []
    """How many tokens there were by each of these times."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """All that a router has recorded under one id."""

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
    """The requests in a router's record, the newest first."""

    requests: list[RequestLine]
    num_remembered: int
    most_remembered: int


# --- what a service has to do, for advice ------------------------------------------------------


class PastRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended, without its words."""

    unix_time: float
    """When it arrived."""
    prompt_tokens: int
    cached_tokens: int
    """Those of them whose KV the engine that computed the prompt had."""
    output_tokens: int
    first_token_s: float | None
    """From its arrival; None: it was refused, or failed."""
    seconds: float
    """From its arrival to its end."""
    prefixes: list[tuple[int, int]] | None = None
    """How many tokens some beginnings of its prompt have, and a number for each that is the same
    where prompts begin alike, and tells nothing else of them; None: this is not known."""


class PoolLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of one pool. What has a unit of time is the median of what they reported."""

    role: str
    engines: int
    """Those that are up."""
    step_s: float
    """Seconds of a step, beside its tokens."""
    prompt_token_s: float
    """Seconds of each prompt token in it."""
    row_s: float
    """Seconds of each stream that gets a token in it."""
    move_s: float
    """Seconds that a request waits for KV from another engine."""
    move_token_s: float
    """Seconds that each token of that KV takes besides."""
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int = 0
    """The token budget of one step; 0: not known."""
    enough_prompt_tokens: int = 0
    """A step that holds so many prompt tokens begins no further prompt; 0: not known."""
    processors_part: float = 0.0
    """The part of their processors that a step computes on, where all engines of the service have
    them in common; otherwise 0."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one router's service was asked of late, and what it takes its engines."""

    policy: str
    disaggregate: str
    ttft_ms: int | None
    """`spec.slo`; None: nothing is promised."""
    inter_token_ms: int | None
    pools: list[PoolLoad]
    """Those that have engines which have reported what steps take."""
    requests: list[PastRequest]
    """The newest first."""
