"""How V0's client asks its engine: with a time limit, without one, or without an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import zmq.asyncio

from diptych_frontend.v0.errors import MQClientClosedError
from diptych_frontend.v0.rpc import (
    RPC_REQUEST_T,
    VLLM_RPC_TIMEOUT,
    RPCStartupRequest,
    RPCStartupResponse,
    answer_in,
    failure_in,
    frames_of,
    startup_response,
)
from diptych_frontend.v0.sockets import QuestionSocket, RequestSocket
from diptych_protocol import UtilityOutput

CLOSED = "this engine client was closed"


class RpcCalls:
    """Mixed into a client of V0. Every call raises `MQClientClosedError` on a closed socket.

    The time limit, in milliseconds, is the socket's own, or `VLLM_RPC_TIMEOUT` if it has none.
    """

    @staticmethod
    async def _send_get_data_rpc_request(
        request: RPCStartupRequest,
        expected_type: Any,
        error_message: str,
        socket: zmq.asyncio.Socket,
    ) -> Any:
        """Ask the engine for something, and wait for it.

        Raises:
            TimeoutError: there is no answer in time.
            UtilityError: the engine refused.
            MQEngineDeadError: it ends.
            ValueError: the answer is of another type; with `error_message`.
        """
        _check_open(socket)
        await socket.send_multipart(frames_of(request))
        try:
            answer = await _answer(error_message, socket)
        except TimeoutError as exc:
            raise TimeoutError(f"RPCServer didn't reply within {_timeout_ms(socket)} ms") from exc
        data = startup_response(answer.result)
        if not isinstance(data, expected_type):
            raise ValueError(error_message)
        return data

    @staticmethod
    async def _send_one_way_rpc_request(
        request: RPC_REQUEST_T, socket: zmq.asyncio.Socket | RequestSocket
    ) -> None:
        """Have the engine do something. That it cannot is in its log.

        Raises `InvalidRequestError` for values that mean nothing, and on the client's own
        connection `EngineDeadError` if that is lost.
        """
        _check_open(socket)
        frames = frames_of(request)
        if frames:
            await socket.send_multipart(frames)

    async def _await_ack(self, error_message: str, socket: zmq.asyncio.Socket) -> None:
        """Wait for the answer to what was asked on the socket.

        Raises `TimeoutError` if there is none in time, and what `_check_success` raises.
        """
        _check_open(socket)
        try:
            await _answer(error_message, socket)
        except TimeoutError as exc:
            raise TimeoutError(f"MQLLMEngine didn't reply within {_timeout_ms(socket)}ms") from exc

    @staticmethod
    async def _check_success(error_message: str, socket: zmq.asyncio.Socket) -> None:
        """Take the next message of the engine, which is well if that says nothing else.

        Raises:
            UtilityError: something that was asked for has failed.
            MQEngineDeadError: the engine ends.
            ValueError: the message is none of an engine's; with `error_message`.
        """
        _check_open(socket)
        await _read(socket, error_message)

    async def _wait_for_server_rpc(self, socket: zmq.asyncio.Socket) -> RPCStartupResponse:
        """Greet the engine. Raises what `_send_get_data_rpc_request` raises."""
        response: RPCStartupResponse = await self._send_get_data_rpc_request(
            request=RPCStartupRequest.IS_SERVER_READY,
            expected_type=RPCStartupResponse,
            error_message="Unable to start RPC Server",
            socket=socket,
        )
        return response


async def _answer(error_message: str, socket: zmq.asyncio.Socket) -> UtilityOutput:
    """The next answer of the engine; what it tells everybody may come before it. Raises
    `TimeoutError`, and what `RpcCalls._check_success` raises."""
    try:
        async with asyncio.timeout(_timeout_ms(socket) / 1000):
            while (answer := await _read(socket, error_message)) is None:
                pass
    except asyncio.CancelledError:
        # Closing a socket cancels whatever waits for it, which is no end of the waiting task.
        _check_open(socket)
        raise
    return answer


async def _read(socket: zmq.asyncio.Socket, error_message: str) -> UtilityOutput | None:
    """The answer in the next message; None if that is news for every client. Raises as
    `RpcCalls._check_success` does."""
    frames = await socket.recv_multipart(copy=False)
    try:
        answer = answer_in([frame.buffer for frame in frames])
    except ValueError as exc:
        raise ValueError(error_message) from exc
    failure = failure_in(answer) if isinstance(answer, UtilityOutput) else answer
    if failure is not None:
        raise failure
    return answer if isinstance(answer, UtilityOutput) else None


def _timeout_ms(socket: zmq.asyncio.Socket) -> int:
    return socket.timeout_ms if isinstance(socket, QuestionSocket) else VLLM_RPC_TIMEOUT


def _check_open(socket: zmq.asyncio.Socket | RequestSocket) -> None:
    if socket.closed:
        raise MQClientClosedError(CLOSED)
