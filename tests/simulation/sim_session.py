"""What engines and their clients say to each other, and the connections over which they do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diptych_protocol import EngineCoreOutput, EngineCoreRequest

if TYPE_CHECKING:
    from sim_engine import SimEngine

PATIENCE_S = 1.5
"""An engine that is silent or out of reach for so long is lost to its clients."""


@dataclass(frozen=True, slots=True)
class Posture:
    """What an engine tells its clients unasked."""

    draining: bool
    paused: bool


@dataclass(frozen=True, slots=True)
class Add:
    request: EngineCoreRequest


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class Call:
    """A utility call; `answer` is told its result, or the exception."""

    method: str
    args: tuple[Any, ...]
    answer: Callable[[Any], None] | None = None


ToEngine = Add | Abort | Call
FromEngine = list[EngineCoreOutput] | Posture


@dataclass(slots=True, eq=False)
class Session:
    """A client's connection to one incarnation of an engine: in order and reliable, or broken."""

    identity: bytes
    host: str
    """The client's."""
    engine: SimEngine
    receive: Callable[[Session, FromEngine], None]
    lost: Callable[[Session, str], None]
    """The client is told that nothing more will come."""
    open: bool = True
    told: Posture = Posture(False, False)
    last_sent: float = 0.0
    last_received: float = 0.0
    to_engine: deque[ToEngine] = field(default_factory=deque)
    to_client: deque[FromEngine] = field(default_factory=deque)
