"""What the request table decides: PoolClient carries it out over ZMQ, a simulation in its own way.

Ids of requests are R's own (`request_id`) or those by which engines know a placement (`core_id`).
Engines go by the keys under which the fleet files them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diptych_protocol import DiptychError, EngineCoreOutput, EngineCoreRequest


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


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell a user that her request has failed: it is over."""

    request_id: str
    error: DiptychError


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `RequestTable.tick` with this time when it has come. Too often does no harm."""

    time: float


Action = Add | Announce | Abort | AskHandOff | Release | Deliver | Fail | WakeAt
