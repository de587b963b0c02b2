"""What the request table asks of the engines of both pools, and the actions that it requests.

PoolClient carries the actions out over ZMQ, a simulation in its own way. Ids of requests are the
router's own (`request_id`) or those by which engines know a placement (`core_id`). Engines are
named by their keys in the fleet.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diptych_protocol import DiptychError, EngineCoreOutput, EngineCoreRequest, KVTransferParams
from diptych_router.choosing.first_token import FirstToken
from diptych_router.choosing.policy import Decision, RequestView
from diptych_router.engines.engine_table import Role
from diptych_router.engines.health_book import Failure


class EngineAccount(Protocol):
    """One engine, and its account."""

    def charge(self, tokens: int, planned: int = 0) -> None:
        """Count so many more tokens of this router's work as open there, and so many more requests
        as planned to be taken over there; negative: fewer."""

    @property
    def key(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def up(self) -> bool: ...
    @property
    def withdrawn(self) -> bool:
        """Whether it is draining or paused."""

    @property
    def lends(self) -> KVTransferParams | None:
        """The common part of all its leases; None if it lends nothing, or is not up."""


class Fleet(Protocol):
    """Both pools at the moment of each call."""

    def get(self, key: str, /) -> EngineAccount | None: ...
    def may_begin_at(self, key: str) -> bool:
        """Whether this engine may get new requests, and does not hang."""

    def choose(self, request: RequestView, full: Collection[str] = ()) -> Decision | None:
        """Return the engines for a new attempt, none of `full`; None if there are none now."""

    def first_token(self, request: RequestView, decision: Decision) -> FirstToken | None:
        """Return when the first token is expected then; None if too little is known."""

    def went_well(self, *keys: str) -> None:
        """Record that engines have done their parts of a request. Empty keys mean none."""

    def went_badly(self, key: str, failure: Failure) -> None:
        """Record that this engine failed at a request and is at fault."""

    def was_full(self, key: str) -> None:
        """Record that this engine had no room for a request just now."""

    def placed(self, request: RequestView, decision: Decision, now: float) -> None:
        """Record that a request goes to these engines, which will have the KV of its prompt."""

    def successor(self, fingerprint: str) -> EngineAccount | None:
        """Return a decode engine that may take over KV of this fingerprint."""

    def num_decoding(self) -> int:
        """The number of decode engines that may get new requests."""

    def draining(self) -> Sequence[EngineAccount]:
        """Return engines whose streams should move: those that drain, or that decode no more."""


@dataclass(frozen=True, slots=True)
class Add:
    """Send a request to an engine. If that fails, call `RequestTable.not_sent`. Do so only if it is
    in `RequestTable.placed`: an action before this one may have shown that the engine is gone."""

    engine: str
    request: EngineCoreRequest


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell a decode engine which request it will get after prefill, so that it can connect and
    reserve blocks. It may be lost. `Abort` withdraws it, and must not overtake it."""

    engine: str
    request: EngineCoreRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """End placements and announcements at an engine. If it is gone, they have ended with it."""

    engine: str
    core_ids: list[str]


@dataclass(frozen=True, slots=True)
class AskHandOff:
    """Ask an engine to release a placement and lend its KV: its last output then has a lease. If it
    cannot, call `RequestTable.cannot_hand_off`."""

    engine: str
    core_id: str


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the engine that granted a lease that nobody will read it. Repeating it is harmless."""

    core_id: str
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand outputs to their consumers, under the ids of their requests. If a request ends there,
    for example by a stop string, call `RequestTable.withdraw`."""

    outputs: list[EngineCoreOutput]


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell a user that the request has failed. It is over."""

    request_id: str
    error: DiptychError


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `RequestTable.tick` at this time. Calling it too often does no harm."""

    time: float


Action = Add | Announce | Abort | AskHandOff | Release | Deliver | Fail | WakeAt
