"""What AsyncLLM and the router's PoolClient share: from prompts to requests, from tokens to text.

A subclass says how an `EngineCoreRequest` reaches an engine (`_submit`), how it is taken back
(`_withdraw`), and feeds the outputs that come in to `_deliver`.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

from diptych_frontend.input_processor import InputProcessor
from diptych_frontend.output_processor import Collector, OutputProcessor, ParentRequest
from diptych_protocol import (
    ClientClosedError,
    EngineClient,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDeadError,
    EngineOverloadedError,
    PromptType,
    RequestOutput,
    SamplingParams,
    SchedulerStats,
)

log = logging.getLogger(__name__)

STALL_LIMIT_S = 60.0
"""With requests open, an engine that says nothing for so long is reported unhealthy."""


class AsyncEngine(EngineClient):
    """An EngineClient whose requests are answered by engine cores elsewhere."""

    def __init__(
        self,
        model_name: str,
        inputs: InputProcessor,
        outputs: OutputProcessor,
        *,
        max_open_requests: int,
    ) -> None:
        self.renderer = inputs.renderer
        self.input_processor = inputs
        self.output_processor = outputs
        self._model_name = model_name
        self._max_open_requests = max_open_requests
        self._dead: EngineDeadError | None = None
        self._closed = False
        self._last_news = time.monotonic()
        self._facts: dict[str, dict[str, Any]] = {}
        """Internal request id -> what the response headers tell about it."""

    # --- for subclasses -----------------------------------------------------------------------

    @abstractmethod
    def _submit(self, request: EngineCoreRequest) -> None:
        """Send a request on its way. Raises `EngineOverloadedError` when nobody can take it."""

    @abstractmethod
    def _withdraw(self, request_ids: list[str]) -> None:
        """End requests (internal ids) wherever they are; unknown ids are ignored."""

    @abstractmethod
    def stats_by_engine(self) -> dict[str, SchedulerStats]:
        """The newest statistics of each engine, by its id."""

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        """Hand a step's outputs to those who wait for them."""
        self._last_news = time.monotonic()
        self._withdraw(self.output_processor.process(outputs))

    # --- EngineClient -------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def max_model_len(self) -> int:
        return self.input_processor.max_model_len

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def errored(self) -> bool:
        return self._dead is not None

    @property
    def dead_error(self) -> BaseException:
        return self._dead or EngineDeadError("the engine is alive")

    async def generate(
        self,
        prompt: EngineCoreRequest | PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_usable()
        request = self.input_processor.process(
            request_id,
            prompt,
            sampling_params,
            priority=priority,
            trace_headers=trace_headers,
            data_parallel_rank=data_parallel_rank,
        )
        collector = Collector()
        finished = False
        self._last_news = max(self._last_news, time.monotonic() if self._idle else 0.0)
        try:
            self._start(request, prompt_text, collector)
            while not finished:
                output = await collector.get()
                output.metrics = self._facts.get(request.request_id, output.metrics)
                finished = output.finished
                yield output
        except EngineDeadError:
            finished = True  # there is nobody left to tell
            raise
        finally:
            if not finished:
                self._withdraw(self.output_processor.abort([request.request_id], internal=True))
            self._facts.pop(request.request_id, None)

    def _start(
        self, request: EngineCoreRequest, prompt_text: str | None, collector: Collector
    ) -> None:
        """Register a request and send it, or its n children, to an engine."""
        n = request.params.n
        if self.output_processor.num_unfinished + n > self._max_open_requests:
            raise EngineOverloadedError(
                f"{self.output_processor.num_unfinished} requests are open already; retry later"
            )
        if n == 1:
            self.output_processor.add(request, prompt_text, collector, None, 0)
            self._submit(request)
            return
        parent = ParentRequest(request)
        for index in range(n):
            child = parent.child(index)
            self.output_processor.add(child, prompt_text, collector, parent, index)
            self._submit(child)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._withdraw(self.output_processor.abort(ids))

    async def check_health(self) -> None:
        self._check_usable()
        silence = time.monotonic() - self._last_news
        if not self._idle and silence > STALL_LIMIT_S:
            raise EngineDeadError(f"requests are open but no engine spoke for {silence:.0f} s")

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        for name, stats in self.stats_by_engine().items():
            used = stats.blocks_total - stats.blocks_free
            log.info(
                "%s: %d running, %d waiting, %d loading, %d of %d blocks held, %d tokens generated",
                name,
                stats.num_running,
                stats.num_waiting,
                stats.num_waiting_for_remote_kv,
                used,
                stats.blocks_total,
                stats.tokens_generated,
            )

    # --- life and death -----------------------------------------------------------------------

    @property
    def _idle(self) -> bool:
        return self.output_processor.num_unfinished == 0

    def _check_usable(self) -> None:
        if self._closed:
            raise ClientClosedError("this engine client was shut down")
        if self._dead is not None:
            raise self._dead

    def _die(self, cause: EngineDeadError) -> None:
        """Record the first cause of death and wake everybody who waits."""
        if self._dead is None:
            self._dead = cause
            log.error("%s", cause)
        self.output_processor.fail_all(self._dead)
