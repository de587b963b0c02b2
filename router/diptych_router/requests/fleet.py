"""What the request table may know of engines, and what it asks of both pools."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from diptych_protocol import KVTransferParams
from diptych_router.choosing.first_token import FirstToken
from diptych_router.choosing.policy import Decision, RequestView
from diptych_router.engines.health.health_book import Failure


class Engine(Protocol):
    """One engine, and its account."""

    def charge(self, tokens: int, planned: int = 0) -> None:
        """So many more tokens of this router's work are open there, and so many more requests are
        planned to be taken over there; negative: so much less."""

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
        """It leaves in good order, or is paused."""

    @property
    def lends(self) -> KVTransferParams | None:
        """What all its leases will say of it; None: it lends nothing, or does not say so now."""


class Fleet(Protocol):
    """Both pools, as they are when asked."""

    def get(self, key: str) -> Engine | None: ...
    def may_begin_at(self, key: str) -> bool:
        """This engine may get new requests, and does not hang."""

    def choose(self, request: RequestView, full: Collection[str] = ()) -> Decision | None:
        """The engines for a new attempt, but none of `full`; None: there are none now."""

    def first_token(self, request: RequestView, decision: Decision) -> FirstToken | None:
        """When the first token is expected after this choice; None: too little is known."""

    def went_well(self, *keys: str) -> None:
        """These engines have done their parts of a request. Empty keys mean nobody."""

    def went_badly(self, key: str, failure: Failure) -> None:
        """This engine failed at a request, by its own fault."""

    def was_full(self, key: str) -> None:
        """This engine had no room for a request just now."""

    def placed(self, request: RequestView, decision: Decision) -> None:
        """A request goes to these engines, which will have the KV of its prompt."""

    def successor(self, fingerprint: str) -> Engine | None:
        """A decode engine that may take over KV of this fingerprint."""

    def num_decoding(self) -> int:
        """Engines of the decode pool that may get new requests."""

    def draining(self) -> Sequence[Engine]:
        """Decode engines whose streams should go elsewhere."""
