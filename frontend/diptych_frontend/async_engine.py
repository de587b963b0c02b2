"""What AsyncLLM and the router's PoolClient share: from prompts to requests, from tokens to text.

A subclass says how an `EngineCoreRequest` reaches an engine (`_submit`), how it is taken back
(`_withdraw`), and feeds the outputs that come in to `_deliver`.
"""

from __future__ import annotations

import logging
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
    InvalidRequestError,
    LoRARequest,
    PromptType,
    RequestOutput,
    SamplingParams,
    SchedulerStats,
    StreamingInput,
)

log = logging.getLogger(__name__)


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
        prompt: EngineCoreRequest | PromptType | AsyncGenerator[StreamingInput, None],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_usable()
        if isinstance(prompt, AsyncGenerator):
            raise InvalidRequestError("a prompt in pieces is not supported", param="prompt")
        request = self.input_processor.process(
            request_id,
            prompt,
            sampling_params,
            priority=priority,
            trace_headers=trace_headers,
            data_parallel_rank=data_parallel_rank,
        )
        n = request.sampling.n
        parent = ParentRequest(request) if n > 1 else None
        parts = [parent.child(index) for index in range(n)] if parent is not None else [request]
        collector = Collector()
        finished = False
        try:
            self._start(parts, parent, prompt_text, collector)
            while not finished:
                output = await collector.get()
                output.metrics = self._facts.get(parts[0].request_id, output.metrics)
                finished = output.finished
                yield output
        except EngineDeadError:
            finished = True  # there is nobody left to tell
            raise
        finally:
            if not finished:
                self._withdraw(self.output_processor.abort([request.request_id], internal=True))
            for part in parts:
                self._facts.pop(part.request_id, None)

    def _start(
        self,
        parts: list[EngineCoreRequest],
        parent: ParentRequest | None,
        prompt_text: str | None,
        collector: Collector,
    ) -> None:
        """Register a request, or its n children, and send them to an engine."""
        open_now = self.output_processor.num_unfinished
        if open_now + len(parts) > self._max_open_requests:
            raise EngineOverloadedError(f"{open_now} requests are open already; retry later")
        for index, part in enumerate(parts):
            self.output_processor.add(part, prompt_text, collector, parent, index)
            self._submit(part)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._withdraw(self.output_processor.abort(ids))

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
