"""What the scheduler half orders of the worker half. vLLM pickles orders and carries them with each
step, in order; none is lost, and none comes twice."""

from __future__ import annotations

from dataclasses import dataclass

from diptych_kv_transfer.tables.load import LeaseRef


@dataclass(frozen=True, slots=True)
class Promise:
    """Promise a lease: its request is here, and its prompt is not computed yet."""

    lease_id: str
    request_id: str
    num_blocks: int
    digest: str


@dataclass(frozen=True, slots=True)
class Lend:
    """Lend the first blocks of a promised lease, which are computed: its reader need not wait for
    the others."""

    lease_id: str
    block_ids: list[int]
    """All that are lent by now."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Lend these blocks under a promised lease. Its request keeps them until it is reported as
    sent."""

    lease_id: str
    request_id: str
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """End a lease that is only promised. Nothing is reported."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """End a lease of our own, whatever its state. If it was granted, its request is reported as
    sent."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class RevokeAll:
    """End every lease of our own: its KV is not to be used any more."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep another engine's lease alive while the request that came with it queues."""

    load: str
    """A name that no other load of this engine has or had."""
    lease: LeaseRef


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch blocks of a lease; ends in one report of the request."""

    load: str
    request_id: str
    lease: LeaseRef
    digest: str
    wanted: dict[int, int]
    """Block of the lease -> our block."""
    num_tokens: int
    """Number of tokens of the lease."""
    early: bool = False
    """The lease may be only promised, or not even that yet. It outlives a fetch that fails."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give up a load that is held or fetched. One that is fetched is still reported, once."""

    load: str


@dataclass(frozen=True, slots=True)
class Release:
    """Tell another engine that nobody wants its lease."""

    lease: LeaseRef


@dataclass(frozen=True, slots=True)
class Fail:
    """Report that a load failed which was never begun: vLLM has no other way to fail a request."""

    request_id: str


Order = (
    Promise | Lend | Grant | Withdraw | Revoke | RevokeAll | Hold | Fetch | Cancel | Release | Fail
)
