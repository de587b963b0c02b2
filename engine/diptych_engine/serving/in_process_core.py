"""An EngineCore in the caller's own process and thread, with the interface of a client."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from select import POLLIN, poll
from typing import Any

from diptych_engine.control.core import EngineCore
from diptych_engine.serving.build_core import build_core
from diptych_frontend.core_client.sync_client import OUTPUT_WAIT_S
from diptych_protocol import (
    ClientClosedError,
    EngineConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityCall,
    UtilityError,
    UtilityOutput,
    wire,
)
from diptych_protocol.as_sent import encode_call

CLIENT = b""
"""The only client of such a core."""


class InProcessCore:
    """Makes a step whenever outputs are requested; nothing happens in between."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model. Raises what `build_core` raises."""
        core = build_core(config)
        self._core: EngineCore | None = core
        self.description = core.description
        self._rank = config.data_parallel_rank
        self._outputs: list[EngineCoreOutput] = []
        """Made while something else was waited for."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poll = poll()
        self._poll.register(self._wake_fd, POLLIN)
        for descriptor in core.watched:
            self._poll.register(descriptor, POLLIN)
        if core.connector is not None:
            self._poll.register(core.connector.wake_fd, POLLIN)

    @property
    def core(self) -> EngineCore:
        """The core. Raises `ClientClosedError` after `close`."""
        if self._core is None:
            raise ClientClosedError("the engine was shut down")
        return self._core

    def add(self, request: EngineCoreRequest) -> None:
        self.core.add(request, CLIENT)

    def abort(self, request_ids: list[str]) -> None:
        self.core.abort(request_ids)

    def get_output(self, wait_s: float = OUTPUT_WAIT_S) -> EngineCoreOutputs:
        """Make one step and return its outputs.

        If there is nothing to compute, because everything waits for another engine, for a grammar
        or for the end of a pause, it waits for news, at most `wait_s`.
        """
        self._outputs += self.core.take_outputs().get(CLIENT, ())  # of what failed when it came
        if not self._outputs:
            self._turn(wait_s)
        outputs, self._outputs = self._outputs, []
        stations = self.core.scheduler.take_stations().get(CLIENT)
        message = EngineCoreOutputs(self._rank, outputs, journey_events=stations)
        message.finished_requests = {x.request_id for x in outputs if x.finished} or None
        return message

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Make a utility call, whose arguments and answer are encoded and decoded as on the wire.

        Requests continue while the call waits for its answer.

        Raises:
            InvalidRequestError: the arguments cannot be sent.
            UtilityError: the core refused it or it failed there.
            TimeoutError: no answer in time.
        """
        sent = wire.utility_decoder.decode(encode_call(UtilityCall(0, 0, method, [*args])))
        core = self.core
        result = _attempt(
            method, lambda: core.call(sent.method, sent.args, wire.utility_decoder.convert)
        )
        if isinstance(result, Future):
            self._wait_for(result, timeout_s)
            result = _attempt(method, result.result)
        answer = EngineCoreOutputs(utility_output=UtilityOutput(0, result=result))
        received = wire.outputs_decoder.decode(wire.encoder.encode(answer)).utility_output
        return None if received is None else received.result

    def close(self) -> None:
        """Release memory and threads. Safe to call twice."""
        if self._core is not None:
            self._core.close()
            self._core = None
            os.close(self._wake_fd)
            gc.collect()  # an engine's parts refer to each other; the next one needs their memory

    def _wait_for(self, answer: Future[Any], timeout_s: float) -> None:
        """Go on with requests until a call has its answer, which may come from any thread.

        Raises `TimeoutError`.
        """
        deadline = time.monotonic() + timeout_s
        answer.add_done_callback(lambda _: os.eventfd_write(self._wake_fd, 1))
        self.core.deferred.settle()
        while not answer.done():
            wait_s = min(OUTPUT_WAIT_S, deadline - time.monotonic())
            if wait_s <= 0:
                answer.cancel()
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            self._turn(wait_s)

    def _turn(self, wait_s: float) -> None:
        """Take a step if there is anything to compute, else wait for news."""
        core = self.core
        self._hear(0.0 if core.has_work else wait_s)
        if core.has_work:
            plan, pending = core.start_step()
            core.finish_step(plan, pending)
            if not plan.scheduled:
                # Everything waits for blocks that only the hinge or an abort can free.
                self._hear(wait_s)
        self._outputs += core.take_outputs().get(CLIENT, ())
        core.deferred.settle()

    def _hear(self, wait_s: float) -> None:
        """Handle all news that is here; wait for the first `wait_s` at most."""
        core = self.core
        for descriptor, _ in self._poll.poll(wait_s * 1000):
            if descriptor == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif descriptor in core.watched:
                core.watched[descriptor]()
            else:
                core.handle_transfer_events()


def _attempt(method: str, function: Callable[[], Any]) -> Any:
    """Whatever goes wrong in a utility call fails that call only."""
    try:
        return function()
    except Exception as exc:
        raise UtilityError(f"{method}: {str(exc) or type(exc).__name__}") from exc
