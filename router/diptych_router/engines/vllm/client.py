"""A client of one vLLM server, with the calls that an `EngineLink` makes of a `CoreClient`.

A request is one HTTP request, whose answer is a stream. To abort it is to close its connection:
vLLM notices, and ends it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

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
from diptych_router.engines.vllm.answer_stream import MalformedStreamError
from diptych_router.engines.vllm.busy_time import BusyTime
from diptych_router.engines.vllm.description import UnfitServerError
from diptych_router.engines.vllm.early import EarlyAnswers
from diptych_router.engines.vllm.event_socket import follow
from diptych_router.engines.vllm.exchange import Exchanger
from diptych_router.engines.vllm.kv_events import RememberedBlocks
from diptych_router.engines.vllm.messages import broken, given_up
from diptych_router.engines.vllm.metrics import ServerFigures
from diptych_router.engines.vllm.server import (
    CONNECTION_ERRORS,
    TooLongError,
    VllmServer,
    open_session,
)
from diptych_router.engines.vllm.service import VllmService
from diptych_router.engines.vllm.suspicion import Suspicion

log = logging.getLogger(__name__)

ANNOUNCE: Final = "announce_kv_transfer"
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


class VllmClient:
    """Talks to the server at one address; must be created inside a running event loop.

    `on_outputs` and `on_lost` are as for `CoreClient`. Statistics come through `on_outputs`, as
    heartbeats, once they were asked for. `on_doubt`: hand-offs of the server are not to be trusted
    until it is verified again.
    """

    def __init__(
        self,
        endpoint: str,
        service: VllmService,
        *,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_lost: Callable[[EngineDeadError], None],
        on_doubt: Callable[[str], None],
    ) -> None:
        self._address = endpoint.removeprefix("tcp://")
        self._service = service
        self._on_outputs, self._on_lost, self._on_doubt = on_outputs, on_lost, on_doubt
        self._session = open_session(self._address)
        self._server = VllmServer(
            self._session, self._address, may_have_route=service.connector == "diptych"
        )
        self._exchanger: Exchanger | None = None
        """None until it has described itself."""
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
        self._early = EarlyAnswers(service)
        self._blocks_free = 0
        """So many of its blocks were free when it was last asked."""
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
            about = await self._server.describe(self._service.model, timeout_s)
        except UnfitServerError as exc:
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                log.warning("the vLLM server at %s gets no requests: %s", self._address, exc)
            await asyncio.sleep(COMPLAIN_S)
            raise
        self._complaint = ""
        about.kv_transfer = self._service.connector != "none"
        # Whoever answers after a loss may have read blocks too late meanwhile.
        salt = "" if self._exchanger is None else self._new_salt()
        self._exchanger = Exchanger(self._session, self._service, self._address, about, salt)
        self._service.enter(self._address, self)
        self._blocks = about.block_size, about.num_blocks
        self._busy = BusyTime()
        self._connected = True
        return about

    async def fetch_stats(self, timeout_s: float) -> SchedulerStats:
        """Its statistics of this moment. Raises as `describe` does."""
        return (await self._fetch_figures(timeout_s)).stats

    async def _fetch_figures(self, timeout_s: float) -> ServerFigures:
        figures = await self._server.figures(timeout_s)
        stats = figures.stats
        self._blocks_free = stats.blocks_free
        if stats.kv_transfer is not None:
            stats.kv_transfer.transport = self._service.connector
        stats.seconds_stepping = self._busy.reported(time.monotonic(), runs=stats.num_running > 0)
        stats.queued_prompt_tokens = sum(self._unstarted.values())
        return figures

    def add(self, request: EngineCoreRequest) -> None:
        """Send a request. Raises `NotConnectedError`."""
        if self._closed:
            raise ClientClosedError(f"the client of {self._address} was closed")
        if not self._connected or self._exchanger is None:
            raise NotConnectedError(f"no vLLM server answers at {self._address}")
        core_id = request.request_id
        self._num_sent += 1
        self._unstarted[core_id] = len(request.prompt_token_ids or ())
        self._busy.opened(time.monotonic())
        self._open[core_id] = self._spawn(self._serve(request, self._exchanger))

    def abort(self, request_ids: list[str]) -> None:
        """End these requests."""
        for core_id in request_ids:
            self._early.drop(core_id)
            task = self._forget(core_id)
            if task is None:
                continue
            end = task.cancel
            if task is asyncio.current_task():
                # One of its outputs has led here: let that come to its end.
                asyncio.get_running_loop().call_soon(end)
            else:
                end()

    def tell(self, method: str, *args: Any) -> None:
        """A call without an answer. What vLLM has no use for is left out."""
        if not self._connected:
            return
        if method == FOLLOW_HEARTBEAT:
            _end(self._beating)
            self._beating = self._spawn(self._beat())
        elif method == ANNOUNCE and self._exchanger is not None:
            [request] = args
            self._early.announced(request, self._exchanger, self._blocks[0], self._blocks_free)
        elif method == FOLLOW_PREFIXES:
            _end(self._following)
            self._following = self._spawn(self._follow_blocks())

    async def call(self, method: str, *args: Any, timeout_s: float = 0.0) -> Any:
        """A control call. Raises `UtilityError` for all that a vLLM server does not offer."""
        if method == "reject_kv_transfer":
            _request_id, lease = args
            await self._reject(lease, timeout_s)
            return None
        raise UtilityError(f"{method}: engines of the runtime vllm do not offer this call")

    async def _reject(self, lease: dict[str, Any], timeout_s: float) -> None:
        """Have the blocks of a lease freed: by this server, or by the one that lends them.

        Where decode engines read unchecked, one that was asked to read frees them itself.
        """
        even_if_taken = not self._service.reads_unchecked
        params = self._service.references.release(
            lease, time.monotonic(), even_if_taken=even_if_taken
        )
        if params is not None:
            await self._server.give_back(params, timeout_s)

    def lost(self, cause: EngineDeadError) -> None:
        """It is gone, and all requests with it."""
        if not self._connected:
            return
        self._connected = False
        self._service.leave(self._address)
        _end(self._beating)
        _end(self._following)
        self.abort(list(self._open))
        self._early.drop_all()
        self._on_lost(cause)

    def close(self) -> None:
        """Disconnect, which ends all that is open there. Calling it again is harmless."""
        if self._closed:
            return
        self._closed, self._connected = True, False
        self._service.leave(self._address)
        self._early.drop_all()
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

    async def _serve(self, request: EngineCoreRequest, exchanger: Exchanger) -> None:
        """Send a request and hand on what comes. Whatever happens, it ends."""
        core_id = request.request_id
        hand_on = functools.partial(self._hand_on, core_id)
        early = self._early.take(core_id)
        try:
            if early is None or not await early.take_over(request, hand_on):
                await exchanger.run(request, hand_on)
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
        except Exception as exc:  # a fault of this router: the request ends all the same
            log.exception("request %s", core_id)
            end = broken(core_id, repr(exc))
        self._hand_on(core_id, [end])

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
        answered_at, overslept_s = time.monotonic(), 0.0
        suspicion = Suspicion(self._service.lease_seconds)
        while self._connected:
            num_sent = self._num_sent
            try:
                figures = await self._fetch_figures(LOST_S)
            except NotConnectedError as exc:
                self.lost(exc)
                return
            except (UtilityError, TimeoutError) as exc:
                log.debug("the vLLM server at %s: %s", self._address, exc)
                if time.monotonic() - answered_at >= LOST_S:
                    self.lost(EngineDeadError(f"{self._address}: no answer for {LOST_S:g} s"))
                    return
            else:
                now = time.monotonic()
                silent_s, answered_at = now - answered_at, now
                self._on_outputs(
                    EngineCoreOutputs(
                        scheduler_stats=figures.stats,
                        requests_received=num_sent,
                        heartbeat=Heartbeat(WITHIN_S),
                    )
                )
                self._judge(suspicion, figures, silent_s, overslept_s)
            asleep_at = time.monotonic()
            await asyncio.sleep(BEAT_S)
            overslept_s = time.monotonic() - asleep_at - BEAT_S

    def _judge(
        self, suspicion: Suspicion, figures: ServerFigures, silent_s: float, own_s: float
    ) -> None:
        """Look for what speaks against this server's hand-offs, and those that read from it."""
        if not self._service.reads_unchecked:
            return
        references, now = self._service.references, time.monotonic()
        if why := suspicion.late_reads(figures):
            self.doubt(why)
            readers = references.readers(self._address, now)
            for address, line in self._service.others(self._address):
                line.forget()  # other processes may have had it read
                if address in readers:
                    line.doubt(f"it has read from {self._address}: {why}")
        reads = references.reads(self._address, now)
        if why := suspicion.long_silence(silent_s, own_s, reads=reads):
            self.forget()
            self.doubt(why)

    def forget(self) -> None:
        """Let the server use nothing of what it remembers now: some of it may be of other
        prompts."""
        if self._exchanger is not None:
            self._exchanger.salt = self._new_salt()

    def doubt(self, why: str) -> None:
        """Its hand-offs are not to be trusted until it is verified again."""
        self._on_doubt(why)

    def _new_salt(self) -> str:
        return secrets.token_hex(8) if self._service.reads_unchecked else ""

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
