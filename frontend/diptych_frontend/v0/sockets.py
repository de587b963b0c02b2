"""V0's sockets by role, on the one ROUTER socket that an engine core has.

Questions and heartbeats have DEALER sockets of their own. Requests and outputs share a connection,
because a core answers where it was asked; V0's two names for it stand for a `RequestSocket`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import zmq
import zmq.asyncio

from diptych_frontend.core_client.client import set_dealer_options
from diptych_frontend.core_client.group import CoreGroup
from diptych_frontend.v0.rpc import VLLM_RPC_TIMEOUT
from diptych_protocol.arrays import Frame


class QuestionSocket(zmq.asyncio.Socket):
    """A socket for questions to a core. What is sent before somebody listens waits for that."""

    timeout_ms = VLLM_RPC_TIMEOUT
    """How long an answer may take."""


def open_question_socket(context: zmq.asyncio.Context, timeout_ms: int) -> QuestionSocket:
    """A new one, still to be connected."""
    # The type that pyzmq declares is the context's own, whatever class was asked for.
    socket = cast("QuestionSocket", context.socket(zmq.DEALER, socket_class=QuestionSocket))
    set_dealer_options(socket, None)
    socket.setsockopt(zmq.IMMEDIATE, 0)
    socket.timeout_ms = timeout_ms
    return socket


def close_all(sockets: Iterable[QuestionSocket]) -> None:
    """Close them without sending what they hold; harmless if that was done."""
    for socket in list(sockets):
        socket.close(linger=0)


class RequestSocket:
    """The connection that requests go out by and outputs come in by; the client itself reads it."""

    def __init__(self, cores: CoreGroup) -> None:
        self._cores = cores

    @property
    def closed(self) -> bool:
        return all(member.link.is_closed for member in self._cores.members)

    async def send_multipart(self, msg_parts: Sequence[Frame], copy: bool = True) -> None:
        """Send a message, in the order of the calls. `copy` is without effect.

        Raises `EngineDeadError` if the connection was never opened, or is lost.
        """
        for member in self._cores.members:
            member.client.send(msg_parts)
