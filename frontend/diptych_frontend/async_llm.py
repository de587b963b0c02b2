"""AsyncLLM: the asynchronous face of one EngineCore, or of several, in processes of their own."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Self

import msgspec

from diptych_frontend.async_engine import AsyncEngine
from diptych_frontend.core_group import CoreGroup
from diptych_frontend.core_launcher import TERMINATE_GRACE_S
from diptych_frontend.input_processor import InputProcessor
from diptych_frontend.model_source import resolve_model
from diptych_frontend.output_processor import OutputProcessor
from diptych_frontend.renderer import TextRenderer
from diptych_protocol import (
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
STALL_LIMIT_S = 60.0
"""A core that has work and makes no step for so long will not come round. The longest step of the
slowest machine must fit in."""
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
            scheduling_policy=config.scheduling_policy,
        )
        super().__init__(
            config.name,
            inputs,
            OutputProcessor(inputs.renderer.tokenizer),
            max_open_requests=config.max_num_waiting + config.max_num_seqs,
        )
        self._cores = CoreGroup(
            config,
            public_endpoint,
            keys_dir,
            on_outputs=self._on_outputs,
            on_death=self._die,
        )
        self._stall_limit_s = stall_limit_s
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
        await self._cores.connect(timeout_s)
        self.description = self._cores.description
        self.input_processor.max_model_len = self.description.max_model_len

    async def died(self) -> EngineDeadError:
        """Wait for the end of a core, and return its cause."""
        return await self._cores.died()

    @property
    def _connected(self) -> CoreGroup:
        """What control calls go through: they reach every core."""
        return self._cores

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        self._deliver(message.outputs)

    def _submit(self, request: EngineCoreRequest) -> None:
        self._cores.add(request)

    def _withdraw(self, request_ids: list[str]) -> None:
        if request_ids and not self.errored and not self._closed:
            self._cores.abort(request_ids)

    def stats_by_engine(self) -> dict[str, SchedulerStats]:
        return self._cores.stats_by_engine()

    async def refresh_stats(self) -> SchedulerStats:
        """Ask every core for its statistics now; returns the first one's."""
        await self._cores.refresh_stats()
        return self._cores.members[0].stats

    # --- is it well? --------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise if the engine is dead, stalled or draining."""
        self._check_usable()
        if self._draining or self._cores.draining:
            raise EngineOverloadedError("draining")
        await self.check_live()

    async def check_live(self) -> None:
        """Raise if the core is dead, or stalled: it has work, or does not even say that it has
        none, and made no step within the limit."""
        self._check_usable()
        doubtful = await self._cores.doubtful_s()
        if doubtful > self._stall_limit_s:
            raise EngineDeadError(f"stalled: the engine core made no step for {doubtful:.0f} s")

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
            answers = await self._cores.call_each(method, timeout_s=self._stall_limit_s)
        except TimeoutError as exc:
            raise EngineOverloadedError("the engine core does not answer; ask again") from exc
        return _sum_up(msgspec.convert(answers, list[DrainReport]))

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
        self._cores.disconnect()
        self.output_processor.fail_all(EngineDeadError("the engine was shut down"))
        self._cores.stop(TERMINATE_GRACE_S if timeout is None else timeout)


def _sum_up(reports: list[DrainReport]) -> DrainReport:
    """What holds the cores together."""
    return DrainReport(
        draining=all(report.draining for report in reports),
        drained=all(report.drained for report in reports),
        num_running=sum(report.num_running for report in reports),
        num_waiting=sum(report.num_waiting for report in reports),
        leases_held=sum(report.leases_held for report in reports),
    )
