"""The orders of the scheduler half to the worker half. vLLM pickles orders and sends them with each
step, in order; none is lost or repeated."""

from __future__ import annotations

from dataclasses import dataclass

from diptych_kv_transfer.tables.load import LeaseRef


@dataclass(frozen=True, slots=True)
class Promise:
    """Promise a lease: its request has arrived, and its prompt is not computed yet."""

    lease_id: str
    request_id: str
    num_blocks: int
    digest: str


@dataclass(frozen=True, slots=True)
class Lend:
    """Lend the first blocks of a promised lease, so that its reader need not wait for all."""

    lease_id: str
    block_ids: list[int]
    """All blocks that are lent so far."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Lend these blocks of a promised lease. Its request keeps them until they are sent."""

    lease_id: str
    request_id: str
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """End a lease that is only promised. Nothing is reported."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """End a lease of this engine, in any state. If granted, its request is reported as sent."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class RevokeAll:
    """End every lease of this engine: its KV must not be used any more."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep another engine's lease alive while its request queues."""

    load: str
    """A name that no other load of this engine ever has."""
    lease: LeaseRef


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch blocks of a lease; it ends in one report about the request."""

    load: str
    request_id: str
    lease: LeaseRef
    digest: str
    wanted: dict[int, int]
    """Block of the lease -> our block."""
    num_tokens: int
    """Number of tokens of the lease."""
    early: bool = False
    """The lease may be only promised, or not even that. It outlives a failed fetch."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give up a held or fetched load. One that is being fetched is still reported, once."""

    load: str


@dataclass(frozen=True, slots=True)
class Release:
    """Tell another engine that nobody wants its lease."""

    lease: LeaseRef


@dataclass(frozen=True, slots=True)
class Fail:
    """Report that a load failed that was never begun: vLLM has no other way to fail a request."""

    request_id: str


Order = (
    Promise | Lend | Grant | Withdraw | Revoke | RevokeAll | Hold | Fetch | Cancel | Release | Fail
)
