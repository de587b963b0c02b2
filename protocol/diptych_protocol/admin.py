"""What engine and router pods tell an operator over their admin port, as JSON.

The admin port wants a bearer token (`ADMIN_TOKEN_FILE` of the service's Secret) on every path.

    router   GET  /admin/state    RouterReport
    engine   GET  /admin/state    DrainReport
    engine   POST /admin/drain    DrainReport, once drained or after `?timeout_s=`

Engines take control calls there, too (`diptych_frontend.admin`),
which no operator makes: docs/admin-api.md lists them.
"""

from __future__ import annotations

import msgspec

ADMIN_TOKEN_FILE = "admin-token"
PREVIOUS_ADMIN_TOKEN_FILE = "previous-admin-token"
"""Accepted too, so that a rotation refuses nobody while the new Secret travels to the pods."""


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
    (with a first token)."""


class PromiseCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often one promise of the service was kept, by one pool."""

    pool: str
    """prefill or decode: who computed the prompt, for a first token; who generated, otherwise."""
    promise: str
    """first_token or inter_token."""
    outcome: str
    """kept, missed, or refused: the request was not taken on, because it would have been missed."""
    requests: int


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


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine may go, and what it still holds."""

    draining: bool
    drained: bool
    """Draining, and neither a request nor a lease is left."""
    num_running: int
    num_waiting: int
    leases_held: int
