"""Answers the messages of a vLLM server's clients in the way of our own core."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from diptych_frontend.core_client.heartbeat_timer import BEAT_S, CALL_S, QUICK_CALLS, HeartbeatTimer
from diptych_frontend.core_client.prefix_news import PrefixNews, RemembersPrefixes
from diptych_frontend.core_client.wire_server import WireServer, check_pending, failure_of
from diptych_protocol import (
    DiptychError,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDescription,
    FinishReason,
    SchedulerStats,
    UtilityOutput,
    wire,
)
from diptych_protocol.admin import DrainReport
from diptych_protocol.arrays import Frame
from diptych_protocol.wire import DOUBT_KV, Heartbeat, UtilityCall
from diptych_vllm.serve.adapters import VllmAdapters
from diptych_vllm.serve.answers import VllmAnswers
from diptych_vllm.serve.calls import VllmCalls
from diptych_vllm.serve.early import EarlyPrompts
from diptych_vllm.serve.engine_view import ServedEngine
from diptych_vllm.serve.hand_off import VllmHandOffs
from diptych_vllm.serve.translation import failure

log = logging.getLogger(__name__)

ANNOUNCE: Final = "announce_kv_transfer"

Send = Callable[[bytes, list[Frame]], bool]
"""A function that sends frames to a client, and returns False if the client is gone."""


class WireService(WireServer):
    """Serves one engine to all clients of a port."""

    def __init__(
        self,
        engine: ServedEngine,
        about: EngineDescription,
        hand_offs: VllmHandOffs,
        memory: RemembersPrefixes | None,
        send: Send,
        on_death: Callable[[], None],
    ) -> None:
        """
        Args:
            memory: the blocks that the engine has cached; None if they are not known.
            on_death: called when the engine's core has ended.
        """
        self._adapters = VllmAdapters(engine)
        digests = self._adapters.digests
        super().__init__(None if memory is None else PrefixNews(memory, digests))
        self._engine, self._about, self._hand_offs = engine, about, hand_offs
        self._deliver, self._on_death = send, on_death
        self._loop = asyncio.get_running_loop()
        self._answers = VllmAnswers(
            engine, self._adapters, hand_offs, self._put, on_death, self._early_prompts
        )
        self._control = VllmCalls(
            engine.llm,
            self._adapters,
            can_sleep=engine.can_sleep,
            has_adapters=engine.abilities.adapters,
        )
        self._beats = CoreBeats(self._timer, self._ask_core, self._tell_beat, self._stood_still)
        self._pending: set[asyncio.Task[None]] = set()
        self._outputs: dict[bytes, list[EngineCoreOutput]] = {}
        """Outputs to be sent at the end of this turn of the event loop."""
        self._own_calls: dict[str, Callable[..., Any]] = {
            "describe": lambda: msgspec.to_builtins(about),
            "stats": lambda: engine.load.stats,
            "drain": self.drain,
            "drain_report": self.drain_report,
            "hand_off": lambda _: False,  # vLLM does not let a request go in its middle
        }

    def _early_prompts(self, fetch: Any) -> EarlyPrompts:
        load, engine = self._engine.load, self._engine
        announced_from = engine.announced_from if engine.remembers else None
        return EarlyPrompts(
            fetch, announced_from, self._about.block_size, lambda: load.stats.blocks_free
        )

    @property
    def clients(self) -> list[bytes]:
        """Return the clients that have sent a message and are not known to be gone."""
        return list(self._clients)

    async def watch(self) -> None:
        """Ask the core all the time, and send heartbeats, until the core has died."""
        while True:
            try:
                await self._beats.run()
            except Exception as exc:
                if self._engine.has_died(exc):
                    self._on_death()
                    return
                log.exception("the core could not be asked")
                await asyncio.sleep(BEAT_S)

    def abort_all(self) -> None:
        """End all requests, and tell their clients that they have ended."""
        self._answers.abort_all()
        self._flush()

    def drain(self) -> Any:
        """Begin to drain. Requests that are here and requests that still come are served."""
        self._engine.load.stats.draining = True
        self._tell_state()
        return self.drain_report()

    def drain_report(self) -> DrainReport:
        """Return what still keeps this engine from ending."""
        stats, num_open = self._engine.load.stats, len(self._answers)
        leases = 0 if stats.kv_transfer is None else stats.kv_transfer.leases_held
        return DrainReport(
            draining=stats.draining,
            drained=stats.draining and not num_open and not leases,
            num_running=min(num_open, stats.num_running),
            num_waiting=max(0, num_open - stats.num_running),
            leases_held=leases,
        )

    # --- messages -----------------------------------------------------------------------------

    def _add(self, request: EngineCoreRequest, client: bytes) -> None:
        if request.prefetches:  # vLLM brings nothing for a prompt that is still to come
            ended = FinishReason.LENGTH
            self._put(client, EngineCoreOutput(request.request_id, [], finish_reason=ended))
            return
        self._answers.add(client, request)

    def _abort(self, request_ids: list[str], client: bytes) -> None:
        for request_id in request_ids:
            self._answers.abort(client, request_id)

    def _answer_malformed(self, client: bytes, frames: list[bytes], error: Exception) -> None:
        self._engine.load.stats.malformed_messages += 1
        super()._answer_malformed(client, frames, error)

    def _unreadable(self, request_id: str, client: bytes, reason: str) -> None:
        self._put(client, failure(request_id, reason))

    # --- calls --------------------------------------------------------------------------------

    def _call(self, client: bytes, call: UtilityCall) -> None:
        if call.method == DOUBT_KV and call.args:
            self._answers.doubt(str(call.args[0]))
            self._send_answer(client, UtilityOutput(call.call_id))
            return
        if call.method == ANNOUNCE and call.args:
            request = wire.utility_decoder.convert(call.args[0], EngineCoreRequest)
            self._answers.announced(client, request)
            self._send_answer(client, UtilityOutput(call.call_id))
            return
        try:
            check_pending(len(self._pending))
        except DiptychError as exc:
            self._send_answer(client, failure_of(call, exc))
            return
        task = self._loop.create_task(self._run_call(client, call))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _run_call(self, client: bytes, call: UtilityCall) -> None:
        try:
            answer = UtilityOutput(call.call_id, result=await self._result_of(call))
        except Exception as exc:  # it fails the call, not the engine
            answer = failure_of(call, exc)
        self._send_answer(client, answer)

    async def _result_of(self, call: UtilityCall) -> Any:
        own = self._own_calls.get(call.method)
        if own is not None:
            return own(*call.args)
        if call.method == "reject_kv_transfer":
            _request_id, lease = call.args
            return await self._answers.reject(lease)
        with self._beats.during_call(call.method):
            result = await self._control.run(call.method, call.args)
        await self._ask_core()
        return result

    # --- the core -----------------------------------------------------------------------------

    async def _ask_core(self) -> None:
        """Wait for an answer of the core, which comes between two steps."""
        self._engine.load.stats.paused = bool(await self._engine.llm.is_paused())
        self._tell_state()
        self.tell_prefixes()

    def _tell_beat(self, heartbeat: Heartbeat) -> None:
        heartbeat.adapters = list(self._adapters.digests())
        self._tell_heartbeat(heartbeat, None if heartbeat.in_call else self._stats())

    def _tell_state(self) -> None:
        stats = self._stats()
        self._tell_posture((stats.draining, stats.paused, stats.sleep_level))

    def _stood_still(self, seconds: float) -> None:
        """Doubt the KV that was read if the core gave no answer for this long, because it may have
        read blocks too late."""
        patience_s = self._hand_offs.patience_s
        if patience_s is not None and seconds > patience_s:
            self._answers.doubt(f"the engine stood still for {seconds:.0f} s")

    # --- sending ------------------------------------------------------------------------------

    def _put(self, client: bytes, output: EngineCoreOutput) -> None:
        """Send an output together with all others of this turn of the event loop."""
        if not self._outputs:
            self._loop.call_soon(self._flush)
        self._outputs.setdefault(client, []).append(output)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, {}
        num_ended = sum(x.finished for made in outputs.values() for x in made)
        self._send_made(outputs, {}, idle=len(self._answers) <= num_ended)

    def _send_frames(self, client: bytes, frames: list[Frame]) -> None:
        if not self._deliver(client, frames):
            self._forget(client)
            self._answers.lose(client)

    def _stats(self) -> SchedulerStats:
        return self._engine.load.stats


UNSEEN_STEP_S: Final = 10.0
"""A step may always take this many seconds, however short the steps before it were, because nobody
here knows what it will compute."""
ONE_SIZE: Final = 1


class CoreBeats:
    """Asks one core all the time, and sends a heartbeat for each answer."""

    def __init__(
        self,
        timer: HeartbeatTimer,
        ask: Callable[[], Awaitable[None]],
        tell: Callable[[Heartbeat], None],
        stood_still: Callable[[float], None],
    ) -> None:
        """
        Args:
            timer: knows the followers, and when a heartbeat is due.
            ask: returns when the core has answered.
            tell: sends a heartbeat to the followers.
            stood_still: called with the seconds that an answer took.
        """
        self._timer, self._ask, self._tell, self._stood_still = timer, ask, tell, stood_still
        self._calls = 0
        """Control calls that are being carried out, without quick ones."""

    @contextmanager
    def during_call(self, method: str) -> Iterator[None]:
        """Promise the time of a call while it lasts, even if the core answers meanwhile."""
        if method in QUICK_CALLS:
            yield
            return
        self._calls += 1
        self._promise(CALL_S, in_call=True)
        try:
            yield
        finally:
            self._calls -= 1

    async def run(self) -> None:
        """Ask the core and send heartbeats, for ever. Raises what `ask` raises."""
        while True:
            begin = time.monotonic()
            asked = asyncio.ensure_future(self._ask())
            try:
                done, _ = await asyncio.wait({asked}, timeout=BEAT_S)
                if not done and not self._calls:
                    bound_s = self._timer.steps.bound_s(ONE_SIZE)
                    self._promise(max(bound_s, UNSEEN_STEP_S))
                await asked
            finally:
                asked.cancel()
            now = time.monotonic()
            self._timer.steps.took(ONE_SIZE, now - begin)
            self._stood_still(now - begin)
            heartbeat = None if self._calls else self._timer.beat(now)
            if heartbeat is not None:
                self._tell(heartbeat)
            await asyncio.sleep(max(0.0, BEAT_S - (now - begin)))

    def _promise(self, seconds: float, *, in_call: bool = False) -> None:
        heartbeat = self._timer.before_silence(time.monotonic(), seconds, in_call=in_call)
        if heartbeat is not None:
            self._tell(heartbeat)
