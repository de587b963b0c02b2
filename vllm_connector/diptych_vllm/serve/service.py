"""Answers the messages of a vLLM server's clients in the way of our own core."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from diptych_frontend.core_client.heartbeat_timer import BEAT_S, HeartbeatTimer
from diptych_frontend.core_client.prefix_news import PrefixNews, RemembersPrefixes
from diptych_protocol import (
    UNREADABLE,
    DiptychError,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineDescription,
    InvalidRequestError,
    UtilityOutput,
    wire,
)
from diptych_protocol.admin import DrainReport
from diptych_protocol.arrays import Frame
from diptych_protocol.salvage import asker_of
from diptych_protocol.wire import (
    DOUBT_KV,
    FOLLOW_HEARTBEAT,
    FOLLOW_PREFIXES,
    Heartbeat,
    UtilityCall,
)
from diptych_vllm.serve.answers import VllmAnswers
from diptych_vllm.serve.beats import CoreBeats
from diptych_vllm.serve.calls import VllmCalls
from diptych_vllm.serve.early import EarlyPrompts
from diptych_vllm.serve.engine_view import ServedEngine
from diptych_vllm.serve.hand_off import VllmHandOffs
from diptych_vllm.serve.translation import failure

log = logging.getLogger(__name__)

STATS_INTERVAL_S: Final = 0.25
MAX_PENDING_CALLS: Final = 256
"""The most utility calls that may wait for their answers at the same time."""
ANNOUNCE: Final = "announce_kv_transfer"

Send = Callable[[bytes, list[Frame]], bool]
"""A function that sends frames to a client, and returns False if the client is gone."""
Posture = tuple[bool, bool, int]


class WireService:
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
        self._engine, self._about, self._hand_offs = engine, about, hand_offs
        self._send_frames, self._on_death = send, on_death
        self._loop = asyncio.get_running_loop()
        self._clients: dict[bytes, int] = {}
        """Client that has sent any message -> number of its requests."""
        self._told: dict[bytes, Posture] = {}
        """Client -> the posture that was reported to it last."""
        self._answers = VllmAnswers(engine, hand_offs, self._put, on_death, self._early_prompts)
        self._control = VllmCalls(
            engine.llm,
            engine.add_lora,
            can_sleep=engine.can_sleep,
            has_adapters=engine.abilities.adapters,
        )
        self._beats = CoreBeats(self._ask_core, self._tell_beat, self._stood_still)
        self._prefix_news = None if memory is None else PrefixNews(memory, dict)
        self._pending: set[asyncio.Task[None]] = set()
        self._outputs: dict[bytes, list[EngineCoreOutput]] = {}
        """Outputs to be sent at the end of this turn of the event loop."""
        self._stats_due = 0.0
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

    def take(self, client: bytes, frames: list[bytes], arrays: list[Frame]) -> None:
        """Process a message of a client."""
        self._clients.setdefault(client, 0)
        try:
            self._handle(client, frames, arrays)
        except (ValueError, *UNREADABLE) as exc:
            self._answer_malformed(client, frames, exc)

    def abort_all(self) -> None:
        """End all requests, and tell their clients that they have ended."""
        self._answers.abort_all()
        self._flush()

    def drain(self) -> Any:
        """Begin to drain. Requests that are here and requests that still come are served."""
        self._engine.load.stats.draining = True
        self._tell_posture()
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

    def _handle(self, client: bytes, frames: list[bytes], arrays: list[Frame]) -> None:
        if len(frames) < 2:
            raise ValueError("a message without a payload")
        kind, message = frames
        payload: list[Frame] = [message, *arrays]
        match EngineCoreRequestType(kind):
            case EngineCoreRequestType.ADD:
                self._clients[client] += 1
                self._answers.add(client, wire.request_decoder.decode(payload))
            case EngineCoreRequestType.ABORT:
                for request_id in wire.abort_decoder.decode(payload):
                    self._answers.abort(client, request_id)
            case EngineCoreRequestType.UTILITY:
                self._call(client, wire.utility_decoder.decode(payload))
            case other:
                raise ValueError(f"{other.name} is not accepted from a socket")

    def _answer_malformed(self, client: bytes, frames: list[bytes], error: Exception) -> None:
        """Send an error to whoever waits for the answer to an unreadable message, if known."""
        self._engine.load.stats.malformed_messages += 1
        reason = f"the message cannot be read: {error}"
        request_id, call_id = asker_of(frames)
        if request_id is not None:
            self._put(client, failure(request_id, reason))
        elif call_id is not None:
            self._answer(client, UtilityOutput(call_id, failure_message=reason))
        else:
            log.warning("a client sent a malformed message, dropped: %s", error)

    # --- calls --------------------------------------------------------------------------------

    def _call(self, client: bytes, call: UtilityCall) -> None:
        if call.method == FOLLOW_HEARTBEAT:
            if not self._beats.follow(client, *call.args[:1]):
                log.warning("a client may not hear the heartbeat: too many do")
            return
        if call.method == FOLLOW_PREFIXES:
            self._follow_prefixes(client)
            return
        if call.method == DOUBT_KV and call.args:
            self._answers.doubt(str(call.args[0]))
            self._answer(client, UtilityOutput(call.call_id))
            return
        if call.method == ANNOUNCE and call.args:
            request = wire.utility_decoder.convert(call.args[0], EngineCoreRequest)
            self._answers.announced(client, request)
            self._answer(client, UtilityOutput(call.call_id))
            return
        if len(self._pending) >= MAX_PENDING_CALLS:
            why = "too many calls wait for their answers already"
            self._answer(client, UtilityOutput(call.call_id, failure_message=why))
            return
        task = self._loop.create_task(self._run_call(client, call))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _run_call(self, client: bytes, call: UtilityCall) -> None:
        try:
            answer = UtilityOutput(call.call_id, result=await self._result_of(call))
        except Exception as exc:  # it fails the call, not the engine
            if not isinstance(exc, DiptychError):
                log.exception("the utility call %s failed", call.method)
            text = f"{call.method}: {str(exc) or type(exc).__name__}"
            param = exc.param if isinstance(exc, InvalidRequestError) else None
            answer = UtilityOutput(call.call_id, failure_message=text, failure_param=param)
        self._answer(client, answer)

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
        self._tell_posture()
        self.tell_prefixes()

    def _tell_beat(self, heartbeat: Heartbeat, timer: HeartbeatTimer) -> None:
        heartbeat.adapters = list(self._control.adapters.values())
        stats = None if heartbeat.in_call else self._engine.load.stats
        message = EngineCoreOutputs(scheduler_stats=stats, heartbeat=heartbeat)
        received = self._clients
        told = timer.addressed(heartbeat, lambda client: received.get(client, 0))
        for client, message.requests_received in told:
            self._send(client, message)

    def _tell_posture(self) -> None:
        """Tell each client, busy or not, when the engine drains, pauses, sleeps or wakes."""
        stats = self._engine.load.stats
        posture = stats.draining, stats.paused, stats.sleep_level
        at_work = False, False, 0
        for client in [x for x in self._clients if self._told.get(x, at_work) != posture]:
            self._told[client] = posture
            self._send(client, EngineCoreOutputs(scheduler_stats=stats))

    def _stood_still(self, seconds: float) -> None:
        """Doubt the KV that was read if the core gave no answer for this long, because it may have
        read blocks too late."""
        patience_s = self._hand_offs.patience_s
        if patience_s is not None and seconds > patience_s:
            self._answers.doubt(f"the engine stood still for {seconds:.0f} s")

    # --- prefixes -----------------------------------------------------------------------------

    def _follow_prefixes(self, client: bytes) -> None:
        if self._prefix_news is None:
            return
        self.tell_prefixes(at_once=True)
        snapshot = self._prefix_news.follow(client)
        if snapshot is None:
            log.warning("a client may not follow the prefixes: too many do")
        else:
            self._send(client, EngineCoreOutputs(prefix_changes=snapshot))

    def tell_prefixes(self, *, at_once: bool = False) -> None:
        """Report the changes of cached prefixes to the clients that follow them."""
        if self._prefix_news is None:
            return
        changes = self._prefix_news.take(time.monotonic(), at_once=at_once)
        if changes is not None:
            for client in list(self._prefix_news.followers):
                self._send(client, EngineCoreOutputs(prefix_changes=changes))

    # --- sending ------------------------------------------------------------------------------

    def _put(self, client: bytes, output: EngineCoreOutput) -> None:
        """Send an output together with all others of this turn of the event loop."""
        if not self._outputs:
            self._loop.call_soon(self._flush)
        self._outputs.setdefault(client, []).append(output)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, {}
        now = self._loop.time()
        stats = None
        num_ended = sum(x.finished for made in outputs.values() for x in made)
        if outputs and (now >= self._stats_due or len(self._answers) <= num_ended):
            self._stats_due = now + STATS_INTERVAL_S
            stats = self._engine.load.stats
        for client, made in outputs.items():
            message = EngineCoreOutputs(outputs=made, scheduler_stats=stats)
            message.finished_requests = {x.request_id for x in made if x.finished} or None
            if stats is not None:
                message.requests_received = self._clients.get(client, 0)
            self._send(client, message)

    def _answer(self, client: bytes, answer: UtilityOutput) -> None:
        if answer.call_id < 0:  # nobody waits for it
            if answer.failure_message is not None:
                log.info("a call without an answer: %s", answer.failure_message)
            return
        self._send(client, EngineCoreOutputs(utility_output=answer))

    def _send(self, client: bytes, message: EngineCoreOutputs) -> None:
        if not self._send_frames(client, wire.encoder.encode(message)):
            self._clients.pop(client, None)
            self._told.pop(client, None)
            self._beats.forget(client)
            if self._prefix_news is not None:
                self._prefix_news.forget(client)
            self._answers.lose(client)
