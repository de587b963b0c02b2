"""A client of one vLLM server, with the calls that an `EngineLink` makes of a `CoreClient`.

A request is one HTTP request, whose answer is a stream. To abort it is to close its connection:
vLLM notices, and ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from diptych_frontend.core_client.client import NotConnectedError
from diptych_protocol import (
    ClientClosedError,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineDescription,
    SchedulerStats,
    UtilityError,
)
from diptych_protocol.wire import FOLLOW_HEARTBEAT, FOLLOW_PREFIXES, Heartbeat, PrefixChanges
from diptych_router.features import FEATURES
from diptych_router.vllm.answer_stream import AnswerStream, MalformedStreamError, refusal
from diptych_router.vllm.busy_time import BusyTime
from diptych_router.vllm.description import ServedModel, UnfitServerError
from diptych_router.vllm.event_socket import follow
from diptych_router.vllm.kv_events import RememberedBlocks
from diptych_router.vllm.messages import (
    GENERATE,
    broken,
    cannot_go_on,
    cut_short,
    generate_body,
    given_up,
    max_tokens_of,
)
from diptych_router.vllm.server import (
    CONNECT_S,
    CONNECTION_ERRORS,
    TooLongError,
    VllmServer,
    open_session,
    read_body,
)

log = logging.getLogger(__name__)

BEGIN_S: Final = 30.0
"""From a request to the head of its answer. vLLM sends the head before it computes."""
IDLE_S: Final = 600.0
"""A stream that brings nothing for so long is broken, even if its request waits for its turn there.
Servers that hang are found out much sooner, by their health."""
DRAIN_S: Final = 5.0
"""After the last output, how long the rest of a stream may take before its connection is closed."""
BEAT_S: Final = 1.0
WITHIN_S: Final = 3.0
"""A server is asked for its health every `BEAT_S`, and should answer within this time: it is a
Python program that does other work, too."""
LOST_S: Final = 30.0
"""A server that has not answered for so long is lost, with all that it has."""
LIVES_S: Final = 3.0
"""When a stream breaks, the server is asked whether it lives, and has so long for the answer."""
COMPLAIN_S: Final = 2.0
"""A server that cannot serve is asked again after this time."""
MAX_ERROR_BYTES: Final = 64 << 10
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=IDLE_S)


class VllmClient:
    """Talks to the server at one address; must be created inside a running event loop.

    `on_outputs` and `on_lost` are as for `CoreClient`. Statistics come through `on_outputs`, as
    heartbeats, once they were asked for.
    """

    def __init__(
        self,
        endpoint: str,
        served: ServedModel,
        *,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_lost: Callable[[EngineDeadError], None],
    ) -> None:
        self._address = endpoint.removeprefix("tcp://")
        self._served = served
        self._on_outputs, self._on_lost = on_outputs, on_lost
        self._session = open_session(self._address)
        self._server = VllmServer(self._session, self._address)
        self._max_model_len = 0
        self._connected = self._closed = False
        self._open: dict[str, asyncio.Task[None]] = {}
        """By the ids of requests that have not ended."""
        self._tasks: set[asyncio.Task[Any]] = set()
        """All that run, to be ended with this client."""
        self._beating: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._blocks = (1, 0)
        """The size of its blocks in tokens, and how many it has."""
        self._asking: asyncio.Task[bool] | None = None
        """Whether it lives."""
        self._unstarted: dict[str, int] = {}
        """Requests without a token yet -> the tokens of their prompts."""
        self._num_sent = 0
        self._busy = BusyTime()
        self._complaint = ""

    # --- what a link asks ---------------------------------------------------------------------

    async def describe(self, timeout_s: float) -> EngineDescription:
        """Learn what answers there.

        Raises `NotConnectedError` if nobody does, `UtilityError` if it cannot serve here, and
        `TimeoutError`.
        """
        try:
            about = await self._server.describe(self._served, timeout_s)
        except UnfitServerError as exc:
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                log.warning("the vLLM server at %s gets no requests: %s", self._address, exc)
            await asyncio.sleep(COMPLAIN_S)
            raise
        self._complaint = ""
        self._max_model_len = about.max_model_len
        self._blocks = about.block_size, about.num_blocks
        self._busy = BusyTime()
        self._connected = True
        return about

    async def fetch_stats(self, timeout_s: float) -> SchedulerStats:
        """Its statistics of this moment. Raises as `describe` does."""
        stats = (await self._server.figures(timeout_s)).stats
        stats.seconds_stepping = self._busy.reported(time.monotonic(), runs=stats.num_running > 0)
        stats.queued_prompt_tokens = sum(self._unstarted.values())
        return stats

    def add(self, request: EngineCoreRequest) -> None:
        """Send a request. Raises `NotConnectedError`."""
        if self._closed:
            raise ClientClosedError(f"the client of {self._address} was closed")
        if not self._connected:
            raise NotConnectedError(f"no vLLM server answers at {self._address}")
        core_id = request.request_id
        self._num_sent += 1
        self._unstarted[core_id] = len(request.prompt_token_ids or ())
        self._busy.opened(time.monotonic())
        self._open[core_id] = self._spawn(self._serve(request))

    def abort(self, request_ids: list[str]) -> None:
        """End these requests."""
        for core_id in request_ids:
            task = self._forget(core_id)
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def tell(self, method: str, *args: Any) -> None:
        """A call without an answer. What vLLM has no use for is left out."""
        if not self._connected:
            return
        if method == FOLLOW_HEARTBEAT:
            _end(self._beating)
            self._beating = self._spawn(self._beat())
        elif method == FOLLOW_PREFIXES:
            _end(self._following)
            self._following = self._spawn(self._follow_blocks())

    async def call(self, method: str, *args: Any, timeout_s: float = 0.0) -> Any:
        """A control call. Raises `UtilityError`: a vLLM server has none of them."""
        raise UtilityError(f"{method}: engines of the runtime vllm do not offer this call")

    def lost(self, cause: EngineDeadError) -> None:
        """It is gone, and all requests with it."""
        if not self._connected:
            return
        self._connected = False
        _end(self._beating)
        _end(self._following)
        self.abort(list(self._open))
        self._on_lost(cause)

    def close(self) -> None:
        """Disconnect, which ends all that is open there. Calling it again is harmless."""
        if self._closed:
            return
        self._closed, self._connected = True, False
        for task in self._tasks:
            task.cancel()
        self._spawn(self._session.close())

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_coro(), exc_info=task.exception())

    # --- requests -----------------------------------------------------------------------------

    async def _serve(self, request: EngineCoreRequest) -> None:
        """Send a request and hand on what comes. Whatever happens, it ends."""
        core_id = request.request_id
        try:
            await self._exchange(request)
            return
        except (MalformedStreamError, TooLongError) as exc:
            end = broken(core_id, str(exc))
        except CONNECTION_ERRORS as exc:
            if core_id not in self._open:
                return
            why = f"the connection to the vLLM server at {self._address} broke: {exc!r}"
            if not await self._lives():
                self.lost(EngineDeadError(why))
                return
            log.warning("request %s: %s", core_id, why)
            end = given_up(core_id)
        self._hand_on(core_id, [end])

    async def _exchange(self, request: EngineCoreRequest) -> None:
        core_id = request.request_id
        if not FEATURES["vllm"].goes_on_with_forms and cannot_go_on(request):
            self._hand_on(core_id, [cut_short(core_id)])
            return
        headers = {"content-type": "application/json", **(request.trace_headers or {})}
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(BEGIN_S) as limit:
            response = await self._session.post(
                GENERATE,
                data=generate_body(request, self._max_model_len),
                headers=headers,
                timeout=_TIMEOUT,
                allow_redirects=False,
            )
            try:
                if response.status != 200:
                    body = await read_body(response, MAX_ERROR_BYTES)
                    self._hand_on(core_id, [refusal(core_id, response.status, body)])
                    return
                limit.reschedule(None)
                most = max_tokens_of(request, self._max_model_len)
                stream = AnswerStream(request, most, self._served.vocab_size)
                async for data in response.content.iter_any():
                    self._hand_on(core_id, stream.feed(data))
                    if stream.ended:
                        limit.reschedule(loop.time() + DRAIN_S)
                if not stream.ended:
                    raise ConnectionResetError("the stream ended before the answer")
            finally:
                response.close()  # one that was read to its end has given its connection back

    def _hand_on(self, core_id: str, outputs: list[EngineCoreOutput]) -> None:
        if not outputs or core_id not in self._open:
            return
        self._unstarted.pop(core_id, None)
        if outputs[-1].finished:
            self._forget(core_id)
        self._on_outputs(EngineCoreOutputs(outputs=outputs))

    def _forget(self, core_id: str) -> asyncio.Task[None] | None:
        """A request is over here. Returns its task; None: it was over already."""
        task = self._open.pop(core_id, None)
        if task is not None:
            self._unstarted.pop(core_id, None)
            self._busy.ended(time.monotonic())
        return task

    # --- its health ---------------------------------------------------------------------------

    async def _lives(self) -> bool:
        """Ask, once for all who want to know at the same time."""
        if self._asking is None or self._asking.done():
            self._asking = self._spawn(self._server.lives(LIVES_S))
        return await asyncio.shield(self._asking)

    async def _beat(self) -> None:
        """Pass its statistics on as heartbeats, until it is lost."""
        answered_at = time.monotonic()
        while self._connected:
            num_sent = self._num_sent
            try:
                stats = await self.fetch_stats(LOST_S)
            except NotConnectedError as exc:
                self.lost(exc)
                return
            except (UtilityError, TimeoutError) as exc:
                log.debug("the vLLM server at %s: %s", self._address, exc)
                if time.monotonic() - answered_at >= LOST_S:
                    self.lost(EngineDeadError(f"{self._address}: no answer for {LOST_S:g} s"))
                    return
            else:
                answered_at = time.monotonic()
                beat = Heartbeat(WITHIN_S)
                self._on_outputs(
                    EngineCoreOutputs(
                        scheduler_stats=stats, requests_received=num_sent, heartbeat=beat
                    )
                )
            await asyncio.sleep(BEAT_S)

    async def _follow_blocks(self) -> None:
        """Pass on what the server remembers. Without that, requests go by its load alone."""
        try:
            source = await self._server.event_source()
            if source is None:
                return
            await follow(source, RememberedBlocks(*self._blocks), self._tell_blocks)
        except (EngineDeadError, UtilityError, TimeoutError) as exc:
            log.warning("the vLLM server at %s: no more KV events: %s", self._address, exc)
            self._tell_blocks(PrefixChanges(0, whole=True))

    def _tell_blocks(self, changes: PrefixChanges) -> None:
        self._on_outputs(EngineCoreOutputs(prefix_changes=changes))


def _end(task: asyncio.Task[None] | None) -> None:
    """Cancel a task, unless it is this one."""
    if task is not None and task is not asyncio.current_task():
        task.cancel()
