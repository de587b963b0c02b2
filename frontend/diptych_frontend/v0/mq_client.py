"""MQLLMEngineClient: a client of a core that somebody else has started, as vLLM's V0 had it.

Its names, and its behaviour in failure, are that client's; its wire is that of `AsyncLLM`, without
pickle. See docs/decisions/0053-v0-names-in-one-room.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import zmq.asyncio

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.client import MalformedAnswerError
from diptych_frontend.core_client.launcher import AdoptedCore
from diptych_frontend.model_files.model_config import ModelConfig
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import Collector
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.v0.engine_process import EngineProcess
from diptych_frontend.v0.errors import ENGINE_DEAD_ERROR, MQClientClosedError, MQEngineDeadError
from diptych_frontend.v0.one_way_calls import OneWayCalls
from diptych_frontend.v0.output_queues import OutputQueues
from diptych_frontend.v0.params import (
    DecodingConfig,
    PromptAdapterRequest,
    no_prompt_adapter,
    params_of_today,
)
from diptych_frontend.v0.rpc import (
    IPC_DATA_EXT,
    IPC_HEALTH_EXT,
    VLLM_RPC_TIMEOUT,
    RPCHeartbeatRequest,
    frames_of,
)
from diptych_frontend.v0.rpc_calls import CLOSED
from diptych_frontend.v0.sockets import (
    QuestionSocket,
    RequestSocket,
    close_all,
    open_question_socket,
)
from diptych_frontend.v0.tokenizer_group import AdapterInputs, AdapterOutputs, TokenizerGroup
from diptych_protocol import (
    EngineConfig,
    EngineDeadError,
    LoRARequest,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    SamplingParams,
)
from diptych_protocol.as_sent import check_id

logger = logging.getLogger(__name__)


class MQLLMEngineClient(OneWayCalls, AsyncLLM):
    """Connects to the core at `ipc_path`, a ZMQ endpoint; `close` leaves it running.

    An id may be used by one running request at a time. The first thing that went wrong with the
    engine is kept: `check_health` raises it, and everybody else gets a `dead_error` that names it.
    Once `setup` has returned, two tasks hold the client until `close`.
    """

    def __init__(
        self,
        ipc_path: str,
        engine_config: EngineConfig,
        engine_pid: int,
        *,
        rpc_timeout_ms: int = VLLM_RPC_TIMEOUT,
        heartbeat_ms: int = VLLM_RPC_TIMEOUT,
    ) -> None:
        """Needs no event loop and no engine yet; `setup` waits for it.

        rpc_timeout_ms: how long the core may take to answer a greeting.
        heartbeat_ms: between two questions how the core is.

        Raises `InvalidRequestError` for a configuration or a model that cannot work.
        """
        self._errored_with: BaseException | None = None
        self._engine_process = EngineProcess(engine_pid)
        core = AdoptedCore(ipc_path, engine_pid)
        super().__init__(engine_config, start_engine_loop=False, core=core)
        self.decoding_config = DecodingConfig.of(engine_config)
        self._tokenizers = TokenizerGroup(self.renderer)
        self.input_processor = AdapterInputs(self.input_processor, self._tokenizers)
        self.input_preprocessor = self.input_processor
        self.output_processor = AdapterOutputs(self._tokenizers, engine_config)
        self.output_queues = OutputQueues(self.output_processor)
        self._rpc_timeout_ms = rpc_timeout_ms
        self._heartbeat_ms = heartbeat_ms
        self._arriving: set[str] = set()
        """Ids of requests that are being prepared."""
        self._ended = asyncio.Event()
        """Something went wrong for good."""
        self.context = zmq.asyncio.Context()
        self.input_socket = self.output_socket = RequestSocket(self._cores)
        self.heartbeat_socket = open_question_socket(self.context, heartbeat_ms)
        self.heartbeat_socket.connect(f"{ipc_path}{IPC_HEALTH_EXT}")
        self._own_sockets = {self.heartbeat_socket}
        # A context waits for its sockets, so those of a client that nobody closed go first.
        self._sockets_finalizer = weakref.finalize(self, close_all, self._own_sockets)
        self.data_ipc_path = f"{ipc_path}{IPC_DATA_EXT}"
        self.output_loop: asyncio.Task[None] | None = None
        self.health_loop: asyncio.Task[None] | None = None
        self.tracing_flag = False
        """Whether the engine traces; `setup` learns it."""

    @staticmethod
    def is_unsupported_config(vllm_config: EngineConfig) -> bool:
        """The layers of a model are not split over processes."""
        return vllm_config.parallel_config.pipeline_parallel_size > 1

    # --- setup --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def get_data_socket(self) -> Iterator[QuestionSocket]:
        """Another connection to the core, for one conversation; closed with the block."""
        if self._closed:
            raise MQClientClosedError(CLOSED)
        socket = open_question_socket(self.context, self._rpc_timeout_ms)
        self._own_sockets.add(socket)
        try:
            socket.connect(self.data_ipc_path)
            yield socket
        finally:
            self._own_sockets.discard(socket)
            socket.close(linger=0)

    async def setup(self) -> None:
        """Wait until the core can serve, and begin to watch its health; harmless when repeated.

        Raises:
            TimeoutError: it does not answer in time.
            ValueError: what answers is no engine core.
            UtilityError: the core refused.
            EngineDeadError: the process ended.
        """
        self._check_usable()
        if self.output_loop is None:
            self.output_loop = asyncio.create_task(
                self.run_output_handler_loop(), name="engine outputs"
            )
        try:
            with self.get_data_socket() as socket:
                response = await self._wait_for_server_rpc(socket)
            await self.ready(self._rpc_timeout_ms / 1000)
        except TimeoutError as exc:
            self._check_usable()  # it may be silent because it has ended
            timeout_ms = self._rpc_timeout_ms
            raise TimeoutError(f"RPCServer didn't reply within {timeout_ms} ms") from exc
        except MQClientClosedError:
            self._check_usable()  # its end closes the sockets too
            raise
        except MalformedAnswerError as exc:
            raise ValueError("Unable to start RPC Server") from exc
        self.tracing_flag = response.tracing_enabled
        if self.health_loop is None and not self._closed:
            beating = self.run_heartbeat_loop(timeout=self._heartbeat_ms)
            self.health_loop = asyncio.create_task(beating, name="engine health")

    async def run_output_handler_loop(self) -> None:
        """Take outputs from the engine, until something goes wrong for good: those who wait for an
        output then get the `dead_error`."""
        try:
            self._run_output_handler()
            await self._ended.wait()
        except asyncio.CancelledError:
            logger.debug("outputs of the engine are not taken any more")

    async def run_heartbeat_loop(self, timeout: int) -> None:
        """Look again and again whether the engine's process lives, and ask it how it is.

        timeout: milliseconds until the next question. That a question is not answered proves
            nothing: a step may take long. A process that stands still loses its connections.
        """
        try:
            while not self._engine_process.died:
                await self.heartbeat_socket.send_multipart(
                    frames_of(RPCHeartbeatRequest.HOW_ARE_YOU)
                )
                while await self.heartbeat_socket.poll(timeout=timeout):
                    await self._check_success("Heartbeat failed.", self.heartbeat_socket)
            pid = self._engine_process.pid
            self._set_errored(MQEngineDeadError(f"Engine process (pid {pid}) died."))
        except asyncio.CancelledError:
            logger.debug("the health of the engine is not watched any more")
        except Exception as exc:
            self._set_errored(exc)

    # --- requests -----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As any client, in V0's order; `options` are what other clients take besides."""
        return self._process_request(
            prompt, sampling_params, request_id, lora_request, trace_headers,
            prompt_adapter_request, priority, **options,
        )  # fmt: skip

    def encode(  # type: ignore[override]
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """As any client."""
        return self._process_request(
            prompt, pooling_params, request_id, lora_request, trace_headers,
            priority=priority, **options,
        )  # fmt: skip

    async def _process_request(
        self,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        """Send a request, and yield its outputs; whoever leaves early aborts it."""
        no_prompt_adapter(prompt_adapter_request)
        options |= {
            "lora_request": lora_request, "trace_headers": trace_headers, "priority": priority,
        }  # fmt: skip
        outputs: AsyncGenerator[Any, None]
        if isinstance(params, PoolingParams):
            outputs = super().encode(prompt, params, request_id, **options)
        else:
            outputs = super().generate(prompt, params, request_id, **options)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Collector[Any]:
        """As any client, but raises `ValueError` for an id that is in use."""
        self._check_usable()
        await self._connect()
        check_id(request_id)
        if request_id in self.output_queues or request_id in self._arriving:
            raise ValueError(f"Request {request_id} already exists")
        self._arriving.add(request_id)
        try:
            if lora_request is not None:  # its tokenizer is read where that holds nobody up
                await asyncio.to_thread(self._tokenizers.renderer_for, lora_request)
            return await super().add_request(
                request_id, prompt, params_of_today(params), arrival_time, lora_request,
                *args, **kwargs,
            )  # fmt: skip
        finally:
            self._arriving.discard(request_id)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Quiet after `close`: whoever closes aborts what he leaves behind."""
        with contextlib.suppress(MQClientClosedError):
            await super().abort(request_id, internal)

    def _add_output(self, request_output: RequestOutput | PoolingRequestOutput) -> None:
        """Hand an output to its request; one for an unknown id is dropped."""
        queue = self.output_queues.get(request_output.request_id)
        if queue is not None:
            queue.put_nowait(request_output)

    # --- health -------------------------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """Something went wrong for good; `close` alone is no error."""
        _ = super().errored  # looks whether the engine has ended unseen
        return self._errored_with is not None

    @property
    def dead_error(self) -> BaseException:
        return self._dead or ENGINE_DEAD_ERROR(self._errored_with)

    async def check_health(self) -> None:
        """Raise the first thing that went wrong, as it was; or say that the core is stalled."""
        if self._errored_with is not None:
            raise self._errored_with
        if not self._closed:
            await self.check_live()

    def _set_errored(self, e: BaseException) -> None:
        """Keep the first thing that went wrong, and end every open request. Each is in the log."""
        logger.error("%r", e, exc_info=e)
        if self._errored_with is not None:
            return
        self._errored_with = e
        super()._die(ENGINE_DEAD_ERROR(e))
        self._ended.set()
        close_all(self._own_sockets)  # a core that ends waits until its clients have left

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._errored_with is not None:
            raise self.dead_error

    def _die(self, cause: EngineDeadError) -> None:
        error = MQEngineDeadError(str(cause))
        error.__cause__ = cause
        self._set_errored(error)

    async def do_log_stats(
        self, scheduler_outputs: Any = None, model_output: Sequence[Any] | None = None
    ) -> None:
        """Nothing: the server logs its own."""

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        self.shutdown()

    def shutdown(self, timeout: float | None = None) -> None:
        for loop in (self.health_loop, self.output_loop):
            if loop is not None and not loop.get_loop().is_closed():
                loop.cancel()
        super().shutdown(timeout)
        self._sockets_finalizer()
        self.context.destroy(linger=0)

    # --- what it was made of ------------------------------------------------------------------

    @property
    def tokenizer(self) -> TokenizerGroup:  # type: ignore[override]  # V0's has one per adapter
        return self._tokenizers

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Tokenizer:
        """The adapter's, if it brings one, or else the model's."""
        return await self._tokenizers.get_lora_tokenizer_async(lora_request)

    async def get_input_preprocessor(self) -> InputProcessor:
        return self.input_preprocessor

    async def get_vllm_config(self) -> EngineConfig:
        return self.vllm_config

    async def get_model_config(self) -> ModelConfig:
        return self.model_config

    async def get_decoding_config(self) -> DecodingConfig:
        return self.decoding_config

    async def is_tracing_enabled(self) -> bool:
        return self.tracing_flag
