"""What the request table decides: PoolClient carries it out over ZMQ, a simulation in its own way.

Ids of requests are R's own (`request_id`) or those by which engines know a placement (`core_id`).
Engines go by the keys under which the fleet files them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diptych_protocol import DiptychError, EngineCoreOutput, EngineCoreRequest
from diptych_router.policy import Decision
from diptych_router.routed_request import Setback


@dataclass(frozen=True, slots=True)
class Add:
    """Send a request to an engine. If that fails, tell `RequestTable.not_sent`.

    The table may have thought better of it since, because sending something else found out that
    the engine is gone: ask `RequestTable.is_placed` first.
    """

    engine: str
    request: EngineCoreRequest


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell a decode engine what will be added there when prefill is done, so that it can connect
    and reserve. Nobody waits for it, and it may be lost; it is taken back by `Abort`, which must
    not overtake it."""

    engine: str
    request: EngineCoreRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """End placements and announcements at an engine. If it is gone, they have ended with it."""

    engine: str
    core_ids: list[str]


@dataclass(frozen=True, slots=True)
class AskHandOff:
    """Ask an engine to let go of a placement and lend its KV: its last output then has a lease. If
    it cannot, tell `RequestTable.cannot_hand_off`."""

    engine: str
    core_id: str


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the engine that granted a lease that nobody will read it. Repeating it is harmless."""

    core_id: str
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand outputs to those who wait for them, under the ids of their requests. What ends there,
    such as by a stop string, comes back by `RequestTable.withdraw`."""

    outputs: list[EngineCoreOutput]
    time: float
    """When they came."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell a user that her request has failed: it is over."""

    request_id: str
    error: DiptychError


@dataclass(frozen=True, slots=True)
class Explain:
    """Engines were chosen for an attempt. Keep what the response headers tell about it."""

    request_id: str
    facts: dict[str, Any]
    decision: Decision
    output_tokens: float = 0.0
    """How many tokens it was expected to generate."""


@dataclass(frozen=True, slots=True)
class Heard:
    """An engine's first word about a placement; for those who explain requests."""

    request_id: str
    engine: str
    output: EngineCoreOutput


@dataclass(frozen=True, slots=True)
class Ended:
    """A request is over; for those who explain requests."""

    request_id: str
    outcome: str
    """Why it finished; error if it failed."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An attempt has ended early; for those who follow requests. What comes of it are the next
    actions."""

    request_id: str
    setback: Setback
    why: str
    again: bool
    """Another attempt begins, or waits for engines."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `RequestTable.tick` with this time when it has come. Too often does no harm."""

    time: float


Action = (
    Add
    | Announce
    | Abort
    | AskHandOff
    | Release
    | Deliver
    | Fail
    | Explain
    | Heard
    | Interrupted
    | Ended
    | WakeAt
)
