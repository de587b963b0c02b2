"""LLMEngine: one engine for programs without an event loop, which call it step by step."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

from diptych_engine.serving.engine_reports import EngineReports, log_interval_s
from diptych_engine.serving.sync_core import SyncCore, lockstep_group_of, make_core, wants_process
from diptych_frontend.core_client.engine_args import EngineArgs
from diptych_frontend.core_client.foreign_options import MM_REGISTRY, with_executor
from diptych_frontend.observability.metrics import RequestProgress, ServerMetrics
from diptych_frontend.observability.stat_loggers import StatLoggerFactory, StatLoggerManager
from diptych_frontend.observability.tracing import start_tracer
from diptych_frontend.text.input_processor import InputProcessor, name_alike, warn_of_made_requests
from diptych_frontend.text.output_processor import Collector, OutputProcessor, fan_out
from diptych_frontend.text.renderer import text_of
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import (
    ClientClosedError,
    CompletionOutput,
    ControlCall,
    DiptychError,
    EngineConfig,
    EngineCoreRequest,
    InvalidRequestError,
    OneCoreOptions,
    PoolingParams,
    PoolingRequestOutput,
    PromptType,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    UsageContext,
)
from diptych_protocol.as_sent import check_id, check_whole, ids_of
from diptych_protocol.control_calls import CALL_TIMEOUT_S
from diptych_protocol.engine_client import ADD_ORDER, by_name, spelled_out
from diptych_protocol.errors import AbsentError

if TYPE_CHECKING:
    from diptych_engine.parallel.group import LockstepGroup
    from diptych_frontend.observability.request_tracer import RequestTracer


_NOTHING = nullcontext()
_ORDER: Final = tuple(name for name in ADD_ORDER if name != "data_parallel_rank")
"""The options that callers of `add_request` may give by position."""


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    external_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    collector: Collector[Any]
    progress: RequestProgress


class LLMEngine(EngineReports):
    """Add requests, and call `step` until none is left; see `LLM` for whole batches.

    The core runs in this process and thread, or with `multiprocess_mode` in a process of its own.
    End it with `shutdown()`; an engine that is dropped or left at exit ends too.
    """

    def __init__(
        self,
        vllm_config: EngineConfig,
        executor_class: type[Any] | None = None,
        log_stats: bool = True,
        aggregate_engine_logging: bool = False,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        mm_registry: None = None,
        multiprocess_mode: bool = False,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the model. The names are vLLM's.

        executor_class: runs the model in place of the engine's own class; see `EngineConfig`.
        log_stats: keep statistics; without them there are no metrics.
        usage_context: kept for its reader.
        clock: seconds; tells when statistics are due in the log.

        Raises `InvalidRequestError` for a configuration or a model that cannot work, and
        `UnsupportedFeatureError` for an option that means nothing here.
        """
        MM_REGISTRY.judge("mm_registry", mm_registry)
        self.dp_group = lockstep_group_of(vllm_config, multiprocess_mode)
        """The engines that step together with this one; None for an engine of its own."""
        config_of_core = with_executor(vllm_config, executor_class)
        self.usage_context = usage_context
        self.vllm_config = vllm_config
        self.input_processor = InputProcessor.of(vllm_config)
        self.renderer = self.input_processor.renderer
        self.model_config = self.renderer.model_config
        self.output_processor = OutputProcessor(
            self.renderer.tokenizer,
            stream_interval=vllm_config.stream_interval,
            reasoning_parser=vllm_config.reasoning_parser,
        )
        self.log_stats = log_stats
        log_interval_s()  # so that a wrong one is an error here, not in a step
        self.engine_core = make_core(config_of_core, multiprocess_mode)
        self._tracer = start_tracer(vllm_config)
        group = self.dp_group
        self._finalizer = weakref.finalize(self, _close, self.engine_core, self._tracer, group)
        if group is not None:
            group.join()
        self.should_execute_dummy_batch = False
        """The next `step` runs the model for nobody, because other engines have work."""
        self.observability_config = vllm_config.observability_config
        self.external_launcher_dp = group is not None
        """Every rank is a program of its own, which somebody else started."""
        self.description = self.engine_core.description
        self.input_processor.max_model_len = self.description.max_model_len
        self._open: dict[str, _Open] = {}
        """By the internal id of the request, or of each child of it."""
        stats = self._newest_stats = {}
        self._metrics = ServerMetrics(vllm_config.name, lambda: stats)
        self.logger_manager: StatLoggerManager | None = None
        if log_stats:
            self.logger_manager = StatLoggerManager(
                vllm_config,
                stat_loggers or (),
                aggregate=aggregate_engine_logging,
                stat_mm_cache=self.renderer.stat_mm_cache,
            )
            self.logger_manager.log_engine_initialized()
        self._clock = clock
        self._process = os.getpid()
        self.reset_mm_cache()

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        disable_log_stats: bool = False,
    ) -> Self:
        """Do the same as the constructor; the environment may request a separate process for the
        core."""
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            multiprocess_mode=wants_process(),
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """Create the engine that the arguments describe."""
        return cls(
            engine_args.create_engine_config(usage_context),
            log_stats=not engine_args.disable_log_stats,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            multiprocess_mode=enable_multiprocessing or wants_process(),
        )

    # --- requests -----------------------------------------------------------------------------

    @spelled_out(OneCoreOptions, _ORDER)
    def add_request(
        self,
        request_id: str,
        prompt: EngineCoreRequest | PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        *documented: Any,
        **options: Unpack[OneCoreOptions],
    ) -> str:
        """Queue a request; its outputs come from `step`, under `request_id`.

        Returns the internal id, by which `abort_request` can distinguish it from others of the same
        `request_id`. A prompt that is an `EngineCoreRequest` gets this id too. Its own parameters,
        if any, have precedence, and `prompt_text` is its text; any other prompt brings its own.

        Raises as `EngineClient.generate`; for an id that is not a string, the error is also a
        `TypeError`.
        """
        self._check_process()
        check_id(request_id)
        check_whole(prompt)
        if documented:
            options = by_name(_ORDER, documented, options)
        prompt_text = options.pop("prompt_text", None)
        if prompt_text is not None and not isinstance(prompt_text, str):
            raise InvalidRequestError("prompt_text must be a string", param="prompt_text")
        if isinstance(prompt, EngineCoreRequest):
            warn_of_made_requests(self, request_id, prompt)
        request = self.input_processor.process_inputs(
            request_id,
            prompt,
            params,
            self.get_supported_tasks(),
            arrival_time,
            data_parallel_rank=None,  # whoever names one is refused: there is one core
            **options,
        )
        self.input_processor.assign_request_id(request)
        if not isinstance(prompt, EngineCoreRequest):
            prompt_text = text_of(prompt)
        parent, parts, collector = fan_out(request)
        kind = getattr(request.params, "output_kind", RequestOutputKind.FINAL_ONLY)
        token_ids = request.prompt_token_ids or []
        deltas = kind is RequestOutputKind.DELTA
        progress = RequestProgress(self._metrics, len(token_ids), deltas=deltas)
        opened = _Open(request.shown_id, prompt_text, token_ids, collector, progress)
        try:
            for index, part in enumerate(parts):
                self.output_processor.add(part, prompt_text, collector, parent, index)
                self._open[part.request_id] = opened
                self.engine_core.add(part)
                if self._tracer is not None:
                    self._tracer.begin(part)
                if self.logger_manager is not None:
                    self.logger_manager.begin(part)
        except BaseException:
            self._end(collector.request_ids)
            raise
        if isinstance(prompt, EngineCoreRequest):
            name_alike(prompt, request)
        return request.request_id

    def abort_request(self, request_ids: Iterable[str], internal: bool = False) -> None:
        """End requests. `step` returns nothing more of them; unknown ids are ignored.

        The ids are the users' or, with `internal`, those that `add_request` returned.
        """
        aborted = self.output_processor.abort(ids_of(request_ids), internal)
        for request_id in aborted:
            self._open.pop(request_id, None)
        if self.logger_manager is not None:
            self.logger_manager.ended(aborted)
        self.engine_core.abort(aborted)

    def _end(self, request_ids: Sequence[str]) -> None:
        """Forget a request, and abort what is left of it."""
        self.abort_request(request_ids, internal=True)
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests; one with n answers counts n times."""
        return len(self.output_processor.answers)

    def has_unfinished_requests(self) -> bool:
        """Whether to call `step`: in lock-step, because any engine has work."""
        return self.has_unfinished_requests_dp(bool(self._open))

    def has_unfinished_requests_dp(self, has_unfinished: bool) -> bool:
        """Whether some engine of the group has work. In lock-step, all of them have to ask.

        An engine without work makes steps along with the others.
        """
        if self.dp_group is None:
            return has_unfinished
        anywhere = self.dp_group.any_unfinished(has_unfinished)
        if anywhere and not has_unfinished:
            self.should_execute_dummy_batch = True
        return anywhere

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Let the core make a step, and return its outputs, one per request.

        A request that failed in the engine, or that the core refused, has a last `RequestOutput`,
        whose answers have the finish reason "error" and the message as their `stop_reason`. So has
        a request for a vector. Raises `EngineDeadError` when the core has ended.
        """
        if self.should_execute_dummy_batch:
            self.should_execute_dummy_batch = False
            self.collective_rpc("execute_dummy_batch")
            return []
        if not self._open:
            return []
        with self._span("get_output"):
            message = self.engine_core.get_output()
        with self._span("process_outputs"):
            stopped = self.output_processor.process(message.outputs)
        with self._span("abort_requests"):
            self.engine_core.abort(stopped)
        with self._span("record_stats"):
            self._record(message, stopped)
        touched = {
            id(opened): opened
            for output in message.outputs
            if (opened := self._open.get(output.request_id)) is not None
        }
        return [output for opened in touched.values() if (output := self._take(opened))]

    def _span(self, name: str) -> AbstractContextManager[Any]:
        """Marks a part of a step in a profile of this process."""
        core = getattr(self.engine_core, "core", None)
        return _NOTHING if core is None else core.runner.profiler.span(f"llm_engine step: {name}")

    def _take(self, opened: _Open) -> RequestOutput | PoolingRequestOutput | None:
        try:
            output = opened.collector.take()
        except DiptychError as error:
            output = _failed(opened, error)
        if output is None:
            return None
        if isinstance(output, RequestOutput) and self.log_stats:
            opened.progress.saw(output)
            if output.finished:
                opened.progress.ended()
        if output.finished:
            self._end(opened.collector.request_ids)
        return output

    # --- facts --------------------------------------------------------------------------------

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what the model can do, from the core's description."""
        return self.description.tasks

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None for a model without one, or with `skip_tokenizer_init`."""
        return self.renderer.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `InvalidRequestError` if there is none."""
        return self.renderer.get_tokenizer()

    @property
    def model_executor(self) -> Any:
        """The object that runs the model. Raises `AbsentError` if that is in another process."""
        core = getattr(self.engine_core, "core", None)
        if core is None:
            raise AbsentError("the model runs in another process")
        return core.runner

    # --- the core -----------------------------------------------------------------------------

    def control(self, call: ControlCall[Any]) -> Any:
        if call.forgets_images:
            self.renderer.clear_mm_cache()
        answer = super().control(call)
        if self.logger_manager is not None:
            self.logger_manager.carried_out(call)
        return answer

    def call_core(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        self._check_process()
        return self.engine_core.call(method, *args, timeout_s=timeout_s)

    def _check_process(self) -> None:
        """Raise `ClientClosedError` in a fork, which has neither the threads nor the sockets."""
        if self._process != os.getpid():
            raise ClientClosedError("the engine did not come along to a fork; make one there")

    @property
    def only_worker(self) -> Any:
        core = getattr(self.engine_core, "core", None)
        if core is None or self.vllm_config.tensor_parallel_size > 1:
            return None
        return core.runner

    def shutdown(self) -> None:
        """End the core. Safe to call twice."""
        self._finalizer()


def _close(core: SyncCore, tracer: RequestTracer | None, group: LockstepGroup | None) -> None:
    if group is not None:
        group.leave()
    core.close()
    if tracer is not None:
        tracer.close()


def _failed(opened: _Open, error: DiptychError) -> RequestOutput:
    """What a failed or refused request ends with: each of its answers says why."""
    answers = [
        CompletionOutput(index, "", [], finish_reason="error", stop_reason=str(error))
        for index in range(len(opened.collector.request_ids))
    ]
    return RequestOutput(
        opened.external_id, opened.prompt, opened.prompt_token_ids, answers, finished=True
    )
