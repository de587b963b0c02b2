"""AsyncLLM: the asynchronous client of one EngineCore, or of several, in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from diptych_frontend.core_client.elastic import Resizer
from diptych_frontend.core_client.engine_args import EngineArgs
from diptych_frontend.core_client.foreign_options import MM_REGISTRY, with_executor
from diptych_frontend.core_client.group import CoreGroup
from diptych_frontend.core_client.health import STALL_LIMIT_S
from diptych_frontend.core_client.launcher import START_TIMEOUT_S, TERMINATE_GRACE_S, Core, adopted
from diptych_frontend.core_client.weights import CoreWeights
from diptych_frontend.observability.stat_loggers import StatLoggerFactory, StatLoggerManager
from diptych_frontend.observability.tracing import start_tracer
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import (
    ClientClosedError,
    ControlCall,
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineDescription,
    InvalidRequestError,
    RefusedByEngineError,
    UsageContext,
    UtilityError,
)
from diptych_protocol.kv_transfer_params import PARAM

log = logging.getLogger(__name__)

NOTIFY_TIMEOUT_S = 5.0


class AsyncLLM(CoreWeights):
    """One engine. Its core starts with it, and the first request waits until the core can serve.

    `await AsyncLLM.start(config)` waits for that instead. End it with `shutdown()`; an engine that
    is dropped or left at exit ends too.
    """

    vllm_config: EngineConfig
    description: EngineDescription
    """The core's description, set once it is ready."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        executor_class: type[Any] | None = None,
        log_stats: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        mm_registry: None = None,
        use_cached_outputs: bool = False,
        log_requests: bool = False,
        start_engine_loop: bool = True,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        client_addresses: Mapping[str, str] | None = None,
        client_count: int = 1,
        client_index: int = 0,
        *,
        aggregate_engine_logging: bool = False,
        core: Core | None = None,
        public_endpoint: str | None = None,
        keys_dir: Path | None = None,
        stall_limit_s: float = STALL_LIMIT_S,
        reads_texts: bool = True,
    ) -> None:
        """Start the core's process; needs no event loop. The names are vLLM's.

        executor_class: runs the model in place of the engine's own class; see `EngineConfig`.
        log_stats: keep and log statistics.
        usage_context: kept for its reader.
        use_cached_outputs: of no effect, as in vLLM V1: outputs are never cached.
        start_engine_loop: connect to the core now, if an event loop runs, and not only with the
            first request.
        log_requests: write a line to the log for each request.
        stat_loggers: make further receivers of the statistics.
        client_addresses: `{"input_address": ENDPOINT}` of a core that runs already; with
            `keys_dir` if its endpoint asks for keys.
        client_count, client_index: how many front-ends that core has, and which one this is.
        aggregate_engine_logging: write one line of statistics for all cores together.
        core: the same, as an object; or a process of our own, which starts already.
        reads_texts: see `InputProcessor.of`.

        Raises `InvalidRequestError` for a configuration or a model that cannot work, and
        `UnsupportedFeatureError` for an option that means nothing here.
        """
        MM_REGISTRY.judge("mm_registry", mm_registry)
        vllm_config = with_executor(vllm_config, executor_class)
        if not 0 <= client_index < client_count:
            raise InvalidRequestError(
                f"client_index {client_index} is not one of {client_count}", param="client_index"
            )
        inputs = InputProcessor.of(vllm_config, reads_texts=reads_texts)
        super().__init__(
            vllm_config,
            inputs,
            OutputProcessor(
                inputs.renderer.tokenizer,
                stream_interval=vllm_config.stream_interval,
                reasoning_parser=vllm_config.reasoning_parser,
            ),
            max_open_requests=_most_open(vllm_config, vllm_config.data_parallel_size),
        )
        self._client_index = client_index
        self._home_loop: asyncio.AbstractEventLoop | None = None
        self._log_requests = log_requests
        self.log_stats = log_stats
        self.logger_manager = None
        if log_stats:
            self.logger_manager = StatLoggerManager(
                vllm_config,
                stat_loggers or (),
                client_index,
                aggregate=aggregate_engine_logging,
                stat_mm_cache=inputs.renderer.stat_mm_cache,
            )
        self._stall_limit_s = stall_limit_s
        if core is None and client_addresses is not None:
            core = adopted(client_addresses, keys_dir)
        self._tracer = start_tracer(vllm_config)
        self._cores = CoreGroup(
            vllm_config,
            public_endpoint,
            keys_dir,
            on_outputs=self._on_outputs,
            on_death=self._die,
            adopted=core,
        )
        self._resizer = Resizer(self._cores)
        self._finalizer = weakref.finalize(self, self._cores.close)
        self.usage_context = usage_context
        if start_engine_loop and asyncio._get_running_loop() is not None:
            self._run_output_handler()

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool = False,
        client_addresses: Mapping[str, str] | None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> Self:
        """Do the same as the constructor."""
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            usage_context=usage_context,
            log_requests=enable_log_requests,
            start_engine_loop=start_engine_loop,
            stat_loggers=stat_loggers,
            aggregate_engine_logging=aggregate_engine_logging,
            client_addresses=client_addresses,
            client_count=client_count,
            client_index=client_index,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
    ) -> Self:
        """Create the engine that the arguments describe."""
        return cls.from_vllm_config(
            engine_args.create_engine_config(usage_context),
            start_engine_loop,
            usage_context,
            stat_loggers,
            enable_log_requests=engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
        )

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        core: Core | None = None,
        public_endpoint: str | None = None,
        keys_dir: Path | None = None,
        stall_limit_s: float = STALL_LIMIT_S,
        reads_texts: bool = True,
    ) -> Self:
        """Start an engine and wait until it is ready."""
        engine = cls(
            config,
            core=core,
            public_endpoint=public_endpoint,
            keys_dir=keys_dir,
            stall_limit_s=stall_limit_s,
            reads_texts=reads_texts,
        )
        try:
            await engine.ready()
        except BaseException:
            engine.shutdown()
            raise
        return engine

    async def ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the core has loaded its model; harmless if it has.

        Raises `EngineDeadError` if it ends instead, `TimeoutError` if it takes too long.
        """
        self._keep_to_loop()
        await self._cores.connect(timeout_s)
        if self.logger_manager is not None and not hasattr(self, "description"):
            self.logger_manager.log_engine_initialized()
        self.description = self._cores.description
        self.input_processor.max_model_len = self.description.max_model_len
        self.input_processor.logits_processors = self.description.logits_processors

    async def _connect(self) -> None:
        if not self._cores.is_ready:
            await self.ready()

    def _run_output_handler(self) -> None:
        """Begin to take outputs from the cores; the first request does it."""
        self._keep_to_loop()
        self._cores.open()

    def _check_usable(self) -> None:
        super()._check_usable()
        self._keep_to_loop()

    def _keep_to_loop(self) -> None:
        """Sockets and tasks are of the loop in which they were made. Raises `ClientClosedError` in
        any other one."""
        loop = asyncio._get_running_loop()
        if self._home_loop is None:
            self._home_loop = loop
        elif loop is not self._home_loop and loop is not None:
            raise ClientClosedError(
                "this engine client belongs to the event loop that used it first, as of an earlier "
                "asyncio.run; do all in one asyncio.run, or make an engine in each"
            )

    async def died(self) -> EngineDeadError:
        """Wait for the end of a core, and return the cause."""
        return await self._cores.died()

    @property
    def errored(self) -> bool:
        if self._dead is None and not self._closed:
            cause = self._cores.ended_unseen()
            if cause is not None:
                self._die(cause)
        return super().errored

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        if self._tracer is not None:
            self._tracer.take(message)
        stopped = self.output_processor.process(message.outputs)
        if stopped and self._tracer is not None:
            self._tracer.stopped(stopped)
        if self.logger_manager is not None:
            self.logger_manager.take(message, stopped)
        self._withdraw(stopped)

    def _submit(self, request: EngineCoreRequest, leader: str | None = None) -> None:
        if self._log_requests:
            log.info("request %s: %s", request.request_id, request.params)
        request.client_index = self._client_index
        if self.logger_manager is not None:
            self.logger_manager.begin(request)
        self._cores.add(request)

    def _withdraw(self, request_ids: list[str]) -> None:
        if self.logger_manager is not None:
            self.logger_manager.ended(request_ids)
        if request_ids and not self.errored:
            self._cores.abort(request_ids)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None for a model without one, or with `skip_tokenizer_init`."""
        return self.renderer.tokenizer

    async def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `InvalidRequestError` if there is none."""
        return self.renderer.get_tokenizer()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks of the core's description, without asking it again."""
        self._check_usable()
        await self._connect()
        return self.description.tasks

    # --- the cores ----------------------------------------------------------------------------

    async def control(self, call: ControlCall[Any]) -> Any:
        """Send a call to the core, which answers when the call is done.

        Raises `UtilityError` when the core refuses, `TimeoutError` when it takes too long, and
        `EngineDeadError` when it is gone.
        """
        if call.forgets_images:
            self.renderer.clear_mm_cache()
        with self.silence_expected() if call.SILENT else contextlib.nullcontext():
            answer = await self.call_core(call.METHOD, *call.arguments, timeout_s=call.timeout_s)
        if self.logger_manager is not None:
            self.logger_manager.carried_out(call)
        return answer

    async def call_core(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Make a utility call to the core."""
        self._check_usable()
        await self._connect()
        return await self._cores.call(method, *args, timeout_s=timeout_s)

    async def reject_kv_transfer(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        if data_parallel_rank is not None:  # an engine of several cores takes part in no hand-off
            self._cores.member_of(data_parallel_rank)
        try:
            await self.call_core(
                "reject_kv_transfer", request_id, kv_transfer_params, timeout_s=NOTIFY_TIMEOUT_S
            )
        except UtilityError as exc:
            if exc.param != PARAM:
                raise
            why = str(exc).removeprefix("reject_kv_transfer: ")
            raise RefusedByEngineError(why, param=PARAM) from exc

    async def scale_elastic_ep(
        self, new_data_parallel_size: int, drain_timeout: float = 300
    ) -> None:
        """Change the number of engine cores without losing a request.

        drain_timeout: seconds within which requests of a removed core may end there; the remaining
        cores take over the rest.

        Raises `InvalidRequestError` for a number or an engine with which this is not possible, and
        `EngineDeadError` if a new core does not start; the engine is as before then.
        """
        await self._connect()
        await self._resizer.resize(new_data_parallel_size, drain_timeout)
        self._max_open_requests = _most_open(self.vllm_config, new_data_parallel_size)

    def shutdown(self, timeout: float | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._finalizer.detach()
        if timeout:
            self._cores.finish_requests(timeout)
        self._cores.disconnect()
        self.output_processor.fail_all(EngineDeadError("the engine was shut down"))
        self._cores.stop(TERMINATE_GRACE_S if timeout is None else timeout)
        if self._tracer is not None:
            self._tracer.close()


def _most_open(config: EngineConfig, num_cores: int) -> int:
    """Requests that may be open at the same time: as many as cores queue and run."""
    return num_cores * (config.max_num_waiting + config.max_num_seqs)
