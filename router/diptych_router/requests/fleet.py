"""The request table's interface to the engines of both pools."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from diptych_protocol import KVTransferParams
from diptych_router.choosing.first_token import FirstToken
from diptych_router.choosing.policy import Decision, RequestView
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
    def fingerprint(self) -> str: ...
    @property
    def up(self) -> bool: ...
    @property
    def withdrawn(self) -> bool:
        """Whether it is draining or paused."""

    @property
    def lends(self) -> KVTransferParams | None:
        """The common part of all its leases; None if it lends nothing, or does not
        report it now."""


class Fleet(Protocol):
    """Both pools at the moment of each call."""

    def get(self, key: str, /) -> EngineAccount | None: ...
    def may_begin_at(self, key: str) -> bool:
        """Whether this engine may get new requests, and does not hang."""

    def choose(self, request: RequestView, full: Collection[str] = ()) -> Decision | None:
        """Return the engines for a new attempt, without those of `full`; None if there are none
        now."""

    def first_token(self, request: RequestView, decision: Decision) -> FirstToken | None:
        """Return when the first token is expected after this choice; None if too
        little is known."""

    def went_well(self, *keys: str) -> None:
        """Record that these engines have done their parts of a request. Empty keys
        mean no engine."""

    def went_badly(self, key: str, failure: Failure) -> None:
        """Record that this engine failed at a request and is at fault."""

    def was_full(self, key: str) -> None:
        """Record that this engine had no room for a request just now."""

    def placed(self, request: RequestView, decision: Decision) -> None:
        """Record that a request goes to these engines, which will have the KV of its prompt."""

    def successor(self, fingerprint: str) -> EngineAccount | None:
        """Return a decode engine that may take over KV of this fingerprint."""

    def num_decoding(self) -> int:
        """The number of decode engines that may get new requests."""

    def draining(self) -> Sequence[EngineAccount]:
        """Return decode engines whose streams should move."""
