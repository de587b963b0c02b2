"""V0's sockets by role, on the one ROUTER socket that an engine core has.

Questions and heartbeats have DEALER sockets of their own. Requests and outputs share a connection,
because a core answers on the connection of the request; V0's two names for it stand for a
`RequestSocket`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import zmq
import zmq.asyncio

from diptych_frontend.core_client.client import set_dealer_options
from diptych_frontend.core_client.group import CoreGroup
from diptych_protocol import (
    UNREADABLE,
    EngineCoreRequestType,
    EngineDeadError,
    UtilityCall,
    UtilityError,
    wire,
)
from diptych_protocol.arrays import Frame
from diptych_protocol.as_sent import encode_call

HOW_ARE_YOU: Final = (
    EngineCoreRequestType.UTILITY.value,
    *encode_call(UtilityCall(0, 0, "stats", [])),
)
"""The question for a heartbeat. V0's engine sent heartbeats unasked."""


class MQEngineDeadError(EngineDeadError, RuntimeError):
    """The engine is not running any more. In V0 this is a `RuntimeError`."""


def open_question_socket(context: zmq.asyncio.Context, endpoint: str) -> zmq.asyncio.Socket:
    """Connect to a core. Messages that are sent before it listens wait until then."""
    socket = context.socket(zmq.DEALER)
    set_dealer_options(socket, None)
    socket.setsockopt(zmq.IMMEDIATE, 0)
    socket.connect(endpoint)
    return socket


def check_heartbeat(frames: Sequence[Frame]) -> None:
    """Check a message on the socket of heartbeats. Every message counts as a sign of life unless it
    says otherwise.

    Raises:
        UtilityError: the core refused the question.
        MQEngineDeadError: the core ends.
        ValueError: the message is none of an engine's.
    """
    if bytes(frames[0]) == wire.ENGINE_CORE_DEAD:
        raise MQEngineDeadError("the engine core has ended")
    try:
        outputs = wire.outputs_decoder.decode(frames)
    except UNREADABLE as exc:
        raise ValueError("Heartbeat failed.") from exc
    if outputs.last_words is not None:
        raise MQEngineDeadError(f"the engine core has ended: {outputs.last_words}")
    answer = outputs.utility_output
    if answer is not None and answer.failure_message is not None:
        raise UtilityError(answer.failure_message, param=answer.failure_param)


class RequestSocket:
    """The connection that sends requests and receives outputs; the client itself reads it."""

    def __init__(self, cores: CoreGroup) -> None:
        self._cores = cores

    @property
    def closed(self) -> bool:
        return all(member.closed for member in self._cores.members)

    async def send_multipart(self, msg_parts: Sequence[Frame], copy: bool = True) -> None:
        """Send a message, in the order of the calls. `copy` has no effect.

        Raises `EngineDeadError` if the connection was never opened, or is lost.
        """
        for member in self._cores.members:
            member.client.send(msg_parts)
