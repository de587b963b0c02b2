"""The actions that the request table requests. PoolClient carries them out over ZMQ, a simulation
in its own way.

Ids of requests are the router's own (`request_id`) or those by which engines know a placement
(`core_id`). Engines are named by their keys in the fleet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diptych_protocol import DiptychError, EngineCoreOutput, EngineCoreRequest


@dataclass(frozen=True, slots=True)
class Add:
    """Send a request to an engine. If that fails, call `RequestTable.not_sent`.

    Ask `RequestTable.is_placed` first, because an action before this one may have shown that the
    engine is gone.
    """

    engine: str
    request: EngineCoreRequest


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell a decode engine which request it will get when prefill is done, so that it can connect
    and reserve blocks. It has no answer and may be lost. `Abort` withdraws it, and must not
    overtake it."""

    engine: str
    request: EngineCoreRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """End placements and announcements at an engine. If the engine is gone, they have ended with
    it."""

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
