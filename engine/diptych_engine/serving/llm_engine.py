"""LLMEngine: one engine for programs without an event loop, driven step by step."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import msgspec

from diptych_engine.serving.engine_controls import EngineControls
from diptych_engine.serving.engine_metrics import EngineMetrics, RequestFacts
from diptych_frontend.core_client.engine_args import EngineArgs
from diptych_frontend.core_client.foreign_options import refuse_foreign
from diptych_frontend.core_client.launcher import CoreProcess
from diptych_frontend.core_client.sync_client import SyncCoreClient
from diptych_frontend.observability.metric_snapshot import Metric
from diptych_frontend.observability.stat_loggers import (
    LoggingStatLogger,
    StatLogger,
    StatLoggerFactory,
)
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import Collector, OutputProcessor, fan_out
from diptych_frontend.text.renderer import text_of
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import (
    CompletionOutput,
    EngineConfig,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDescription,
    EngineGenerateError,
    InvalidRequestError,
    LoRARequest,
    PoolingParams,
    PoolingRequestOutput,
    PromptType,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
    UnsupportedFeatureError,
)
from diptych_protocol.as_sent import check_id, check_whole, ids_of
from diptych_protocol.control_calls import CALL_TIMEOUT_S

if TYPE_CHECKING:
    from diptych_engine.serving.lockstep_peers import LockstepPeers

MULTIPROCESSING = "DIPTYCH_ENABLE_MULTIPROCESSING"
"""Environment: `1` gives every engine's core a process of its own."""
LOG_INTERVAL = "DIPTYCH_LOG_STATS_INTERVAL"
"""Environment: seconds between two lines of statistics."""
DEFAULT_LOG_INTERVAL_S = 10.0
START_TIMEOUT_S = 600.0

T = TypeVar("T")


class SyncCore(Protocol):
    """A core that is called, not awaited: `InProcessCore` or `SyncCoreClient`."""

    description: EngineDescription

    def add(self, request: EngineCoreRequest) -> None: ...

    def abort(self, request_ids: list[str]) -> None: ...

    def get_outputs(self) -> list[EngineCoreOutput]: ...

    def call(self, method: str, *args: Any, timeout_s: float) -> Any: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    external_id: str
    collector: Collector[Any]
    facts: RequestFacts


class LLMEngine(EngineControls):
    """Requests are added, `step` is called until none is left; see `LLM` for whole batches.

    The core runs in this process and thread, or with `multiprocess_mode` in a process of its own.
    End it with `shutdown()`; an engine that is dropped or left at exit ends too.
    """

    def __init__(
        self,
        vllm_config: EngineConfig,
        executor_class: None = None,
        log_stats: bool = True,
        aggregate_engine_logging: bool = False,
        usage_context: None = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        mm_registry: None = None,
        multiprocess_mode: bool = False,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the model. The names are vLLM's; with one engine, its logging is aggregated as is.

        log_stats: keep statistics; without them there are no metrics.
        clock: seconds; tells when statistics are due in the log.

        Raises `InvalidRequestError` for a configuration or a model that cannot work, and
        `UnsupportedFeatureError` for an option that means nothing here.
        """
        refuse_foreign(
            executor_class=executor_class, usage_context=usage_context, mm_registry=mm_registry
        )
        self.vllm_config = vllm_config
        self.input_processor = InputProcessor.of(vllm_config)
        self.renderer = self.input_processor.renderer
        self.model_config = self.renderer.model_config
        self.output_processor = OutputProcessor(self.renderer.tokenizer)
        self.log_stats = log_stats
        self.engine_core = _make_core(vllm_config, multiprocess_mode)
        self._finalizer = weakref.finalize(self, self.engine_core.close)
        self._lockstep_peers = _lockstep_peers_of(self.engine_core, vllm_config)
        self.description = self.engine_core.description
        self.input_processor.max_model_len = self.description.max_model_len
        self._open: dict[str, _Open] = {}
        """By the internal id of the request, or of each child of it."""
        self._metrics = EngineMetrics(vllm_config.name)
        factories = (LoggingStatLogger, *(stat_loggers or ())) if log_stats else ()
        self._stat_loggers: list[StatLogger] = [make(vllm_config, 0) for make in factories]
        self._clock = clock
        self._log_interval_s = float(os.environ.get(LOG_INTERVAL, DEFAULT_LOG_INTERVAL_S))
        self._logged_at = clock()

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        usage_context: None = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        disable_log_stats: bool = False,
    ) -> Self:
        """As the constructor; the environment may ask for a process of the core's own."""
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            multiprocess_mode=_wants_process(),
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: None = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """The engine that the arguments describe."""
        return cls(
            engine_args.create_engine_config(),
            log_stats=not engine_args.disable_log_stats,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            multiprocess_mode=enable_multiprocessing or _wants_process(),
        )

    # --- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: EngineCoreRequest | PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> str:
        """Queue a request; its outputs come from `step`, under `request_id`.

        Returns the internal id, by which `abort_request` can tell it from others of the same
        `request_id`. Raises as `EngineClient.generate` does; for an id that is no string that is a
        `TypeError`, too.
        """
        check_id(request_id)
        check_whole(prompt)
        if prompt_text is not None and not isinstance(prompt_text, str):
            raise InvalidRequestError("prompt_text must be a string", param="prompt_text")
        request = self.input_processor.process(
            request_id,
            prompt,
            params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            arrival_time=arrival_time,
            priority=priority,
            trace_headers=trace_headers,
        )
        prompt_text = prompt_text or text_of(prompt)
        parent, parts = fan_out(request)
        kind = getattr(request.params, "output_kind", RequestOutputKind.FINAL_ONLY)
        facts = RequestFacts(
            len(request.prompt_token_ids or ()), deltas=kind is RequestOutputKind.DELTA
        )
        collector = Collector[Any]([part.request_id for part in parts])
        opened = _Open(request.external_req_id or request_id, collector, facts)
        try:
            for index, part in enumerate(parts):
                self.output_processor.add(part, prompt_text, collector, parent, index)
                self._open[part.request_id] = opened
                self.engine_core.add(part)
        except BaseException:
            self._end(collector.request_ids)
            raise
        return request.request_id

    def abort_request(self, request_ids: Iterable[str], internal: bool = False) -> None:
        """End requests, of which `step` then tells nothing more; unknown ids are ignored.

        The ids are the users', or with `internal` those that `add_request` returned.
        """
        aborted = self.output_processor.abort(ids_of(request_ids), internal)
        for request_id in aborted:
            self._open.pop(request_id, None)
        self.engine_core.abort(aborted)

    def _end(self, request_ids: Sequence[str]) -> None:
        """Forget a request, and abort what is left of it."""
        self.abort_request(request_ids, internal=True)
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def get_num_unfinished_requests(self) -> int:
        """A request with n answers counts n times."""
        return self.output_processor.num_unfinished

    def has_unfinished_requests(self) -> bool:
        """Whether there is reason to `step`: in lock-step, work of any engine is one."""
        return self.has_unfinished_requests_dp(bool(self._open))

    def has_unfinished_requests_dp(self, has_unfinished: bool) -> bool:
        """Whether some engine of the group has work; in lock-step, all of them have to ask.

        An engine that has none steps along with the others.
        """
        if self._lockstep_peers is None:
            return has_unfinished
        return self._lockstep_peers.any_unfinished(has_unfinished)

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Let the core take a step; what came of it, one output a request.

        A request that failed in the engine has a last output with the finish reason "error" and
        the message as its `stop_reason`. Raises `EngineDeadError` when the core has ended.
        """
        if not self._open:
            if self._lockstep_peers is not None:
                self._lockstep_peers.keep()
            return []
        made = self.engine_core.get_outputs()
        self.engine_core.abort(self.output_processor.process(made))
        touched = {
            id(opened): opened
            for output in made
            if (opened := self._open.get(output.request_id)) is not None
        }
        outputs = [output for opened in touched.values() if (output := self._take(opened))]
        if self.log_stats and made:
            self.do_log_stats_with_interval()
        return outputs

    def _take(self, opened: _Open) -> RequestOutput | PoolingRequestOutput | None:
        try:
            output = opened.collector.take()
        except EngineGenerateError as error:
            output = _failed(opened.external_id, error)
        if output is None:
            return None
        if isinstance(output, RequestOutput) and self.log_stats:
            self._metrics.saw(opened.facts, output)
        if output.finished:
            self._end(opened.collector.request_ids)
        return output

    # --- facts --------------------------------------------------------------------------------

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can do; known since the core said what it is."""
        return self.description.tasks

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a model without one, or with `skip_tokenizer_init`."""
        return self.renderer.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """Raises `InvalidRequestError` if there is none."""
        return self.renderer.get_tokenizer()

    @property
    def model_executor(self) -> Any:
        """What runs the model. Raises `UnsupportedFeatureError` if that is in another process."""
        core = getattr(self.engine_core, "core", None)
        if core is None:
            raise UnsupportedFeatureError("the model runs in another process")
        return core.runner

    # --- statistics ---------------------------------------------------------------------------

    def get_metrics(self) -> list[Metric]:
        """The values of all metrics now. Raises `UnsupportedFeatureError` without `log_stats`."""
        if not self.log_stats:
            raise UnsupportedFeatureError("this engine keeps no statistics: log_stats is False")
        self._metrics.stats_by_engine[self.description.engine_id] = self._fetch_stats()
        return self._metrics.snapshot()

    def do_log_stats(self) -> None:
        """Hand the statistics to every logger, and let it report; nothing without `log_stats`."""
        if not self._stat_loggers:
            return
        stats = self._fetch_stats()
        for logger in self._stat_loggers:
            logger.record(stats)
            logger.log()

    def do_log_stats_with_interval(self) -> None:
        """The same, if the interval has passed since the last time."""
        now = self._clock()
        if now - self._logged_at >= self._log_interval_s:
            self._logged_at = now
            self.do_log_stats()

    def _fetch_stats(self) -> SchedulerStats:
        return msgspec.convert(self.call_core("stats"), SchedulerStats)

    # --- the core -----------------------------------------------------------------------------

    def call_core(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        return self.engine_core.call(method, *args, timeout_s=timeout_s)

    def call_workers(self, function: Callable[[Any], T]) -> list[T]:
        if self.vllm_config.tensor_parallel_size > 1:
            raise UnsupportedFeatureError("the model is spread over several processes")
        return [function(self.model_executor)]

    def shutdown(self) -> None:
        """End the core. Safe to call twice."""
        self._finalizer()


def _lockstep_peers_of(core: SyncCore, config: EngineConfig) -> LockstepPeers | None:
    """The engines that step together with this one; None for an engine of its own.

    Raises `UnsupportedFeatureError` for cores that share requests: an `AsyncLLM` has those.
    """
    if config.data_parallel_size == 1:
        return None
    if not config.data_parallel_lockstep:
        raise UnsupportedFeatureError(
            "an LLMEngine has one core; for data_parallel_size > 1 use AsyncLLM, or "
            "data_parallel_lockstep with an engine in each program"
        )
    from diptych_engine.serving.lockstep_peers import join_lockstep_peers

    return join_lockstep_peers(core, config)


def _make_core(config: EngineConfig, in_process_of_its_own: bool) -> SyncCore:
    if in_process_of_its_own:
        return SyncCoreClient(CoreProcess(config), START_TIMEOUT_S)
    # Only here, so that a program whose cores run elsewhere needs no torch.
    from diptych_engine.serving.in_process_core import InProcessCore

    return InProcessCore(config)


def _wants_process() -> bool:
    return os.environ.get(MULTIPROCESSING, "0") not in ("", "0")


def _failed(request_id: str, error: EngineGenerateError) -> RequestOutput:
    answer = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(error))
    return RequestOutput(request_id, None, [], [answer], finished=True)
