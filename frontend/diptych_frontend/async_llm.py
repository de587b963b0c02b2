"""AsyncLLM: the asynchronous face of one EngineCore in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self

import msgspec

from diptych_frontend.async_engine import AsyncEngine
from diptych_frontend.core_client import CoreClient
from diptych_frontend.core_launcher import TERMINATE_GRACE_S, CoreProcess
from diptych_frontend.input_processor import InputProcessor
from diptych_frontend.model_source import resolve_model
from diptych_frontend.output_processor import OutputProcessor
from diptych_frontend.pulse import Pulse
from diptych_frontend.renderer import TextRenderer
from diptych_protocol import (
    DiptychError,
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineDescription,
    EngineOverloadedError,
    KVTransferParams,
    SchedulerStats,
    WithoutControl,
)
from diptych_protocol.admin import DrainReport

START_TIMEOUT_S = 600.0
NOTIFY_TIMEOUT_S = 5.0
CAUSE_GRACE_S = 0.2
STALL_LIMIT_S = 60.0
"""A core that has work and makes no step for so long will not come round. The longest step of the
slowest machine must fit in."""
PROBE_WAIT_S = 0.5
"""A probe waits this long for the core, and otherwise goes by what is known."""
DRAIN_POLL_S = 0.1


class AsyncLLM(AsyncEngine, WithoutControl):
    """One engine. Create it with `await AsyncLLM.start(config)`; end it with `shutdown()`."""

    description: EngineDescription

    def __init__(
        self,
        config: EngineConfig,
        *,
        public_endpoint: str | None = None,
        keys_dir: Path | None = None,
        stall_limit_s: float = STALL_LIMIT_S,
    ) -> None:
        """Start the core's process; `ready` waits until it can serve.

        Raises `InvalidRequestError` for a configuration or a model that cannot work.
        """
        config.check()
        source = resolve_model(config.model)
        model_limit = source.config.max_position_embeddings
        inputs = InputProcessor(
            TextRenderer(source),
            max_model_len=min(config.max_model_len or model_limit, model_limit),
            vocab_size=source.config.vocab_size,
            eos_token_ids=source.config.eos_token_ids,
        )
        super().__init__(
            config.name,
            inputs,
            OutputProcessor(inputs.renderer.tokenizer),
            max_open_requests=config.max_num_waiting + config.max_num_seqs,
        )
        self._stats = SchedulerStats()
        self._core = CoreProcess(config, public_endpoint, keys_dir)
        self._client: CoreClient | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stall_limit_s = stall_limit_s
        self._pulse = Pulse()
        self._question: asyncio.Task[None] | None = None
        """Statistics that the core was asked for, to take its pulse."""
        self._draining = False

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        public_endpoint: str | None = None,
        keys_dir: Path | None = None,
        stall_limit_s: float = STALL_LIMIT_S,
    ) -> Self:
        """Start an engine and wait until it is ready."""
        engine = cls(
            config,
            public_endpoint=public_endpoint,
            keys_dir=keys_dir,
            stall_limit_s=stall_limit_s,
        )
        try:
            await engine.ready()
        except BaseException:
            engine.shutdown()
            raise
        return engine

    async def ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the core has loaded its model.

        Raises `EngineDeadError` if it ends instead, `TimeoutError` if it takes too long.
        """
        if self._client is None:
            self._client = CoreClient(
                self._core.endpoint, None, on_outputs=self._on_outputs, on_lost=self._lose_core
            )
            self._watcher = asyncio.create_task(self._watch_core(), name="core watcher")
        self.description = await self._unless_dead(self._client.describe(timeout_s))
        self._core.unlink()
        self.input_processor.max_model_len = self.description.max_model_len

    async def _unless_dead(
        self, greeting: Coroutine[Any, Any, EngineDescription]
    ) -> EngineDescription:
        """A core that ends before it listens is nobody that a greeting could notice missing."""
        described = asyncio.create_task(greeting)
        watcher = self._watcher
        try:
            tasks = (described,) if watcher is None else (described, watcher)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not described.done():
                raise self.dead_error
            return described.result()
        finally:
            described.cancel()

    async def died(self) -> EngineDeadError:
        """Wait for the end of the core, and return its cause."""
        return await self._core.wait()

    def _lose_core(self, cause: EngineDeadError) -> None:
        """The connection ended; the process, if it ended too, knows better why."""
        asyncio.get_running_loop().call_later(CAUSE_GRACE_S, self._die, cause)

    async def _watch_core(self) -> None:
        cause = await self._core.wait()
        self._die(cause)
        if self._client is not None:
            self._client.lost(cause)

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        if message.scheduler_stats is not None:
            self._take_stats(message.scheduler_stats)
        self._deliver(message.outputs)

    @property
    def _connected(self) -> CoreClient:
        if self._client is None:
            raise EngineDeadError("the engine is not started: await ready() first")
        return self._client

    def _submit(self, request: EngineCoreRequest) -> None:
        self._connected.add(request)

    def _withdraw(self, request_ids: list[str]) -> None:
        if request_ids and not self.errored and not self._closed:
            self._connected.abort(request_ids)

    def stats_by_engine(self) -> dict[str, SchedulerStats]:
        return {self.description.engine_id: self._stats}

    async def refresh_stats(self) -> SchedulerStats:
        """Ask the core for its statistics now."""
        self._take_stats(await self._connected.fetch_stats())
        return self._stats

    def _take_stats(self, stats: SchedulerStats) -> None:
        self._stats = stats
        self._pulse.heard(stats)

    # --- is it well? --------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise if the engine is dead, stalled or draining."""
        self._check_usable()
        if self._draining or self._stats.draining:
            raise EngineOverloadedError("draining")
        await self.check_live()

    async def check_live(self) -> None:
        """Raise if the core is dead, or stalled: it has work, or does not even say that it has
        none, and made no step within the limit."""
        self._check_usable()
        if self._question is None or self._question.done():
            self._pulse.asked(time.monotonic())
            self._question = asyncio.create_task(self._ask(), name="core pulse")
        await asyncio.wait((self._question,), timeout=PROBE_WAIT_S)
        doubtful = self._pulse.doubtful_s(time.monotonic())
        if doubtful > self._stall_limit_s:
            raise EngineDeadError(f"stalled: the engine core made no step for {doubtful:.0f} s")

    async def _ask(self) -> None:
        """The answer may come after the probe that asked: at the end of a long step."""
        with contextlib.suppress(TimeoutError, DiptychError):
            await self.refresh_stats()

    # --- leaving ------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> DrainReport:
        """Let all clients of the core know that it is about to leave, and wait until it may.

        Nothing is refused meanwhile: a router may have sent a request before it knew. What still
        holds the engine after `timeout_s` is in the report.

        Raises:
            EngineOverloadedError: the core did not answer in time.
            EngineDeadError: it died.
        """
        self._draining = True
        deadline = time.monotonic() + timeout_s
        report = await self._ask_to_drain("drain")
        drained_before = False
        # Twice: what was sent before its sender knew has arrived by the second time.
        while not (report.drained and drained_before) and time.monotonic() < deadline:
            drained_before = report.drained
            await asyncio.sleep(DRAIN_POLL_S)
            report = await self._ask_to_drain("drain_report")
        return report

    async def drain_report(self) -> DrainReport:
        """What holds the engine; changes nothing. Raises as `drain` does."""
        return await self._ask_to_drain("drain_report")

    async def _ask_to_drain(self, method: str) -> DrainReport:
        try:
            answer = await self._connected.call(method, timeout_s=self._stall_limit_s)
        except TimeoutError as exc:
            raise EngineOverloadedError("the engine core does not answer; ask again") from exc
        return msgspec.convert(answer, DrainReport)

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        KVTransferParams.parse(kv_transfer_params)
        await self._connected.call(
            "reject_kv_transfer", request_id, kv_transfer_params, timeout_s=NOTIFY_TIMEOUT_S
        )

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        done = await self._connected.call(
            "reset_prefix_cache", reset_running_requests, reset_connector
        )
        return bool(done)

    def shutdown(self, timeout: float | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        if self._watcher is not None and not self._watcher.get_loop().is_closed():
            self._watcher.cancel()
            if self._question is not None:
                self._question.cancel()
        if self._client is not None:
            self._client.close()
        self.output_processor.fail_all(EngineDeadError("the engine was shut down"))
        self._core.stop(TERMINATE_GRACE_S if timeout is None else timeout)
