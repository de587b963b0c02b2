"""MQLLMEngineClient: a client of a core that somebody else has started, as in vLLM's V0.

Its names and its behaviour in failures are those of V0's client. Its wire is that of `AsyncLLM`,
without pickle. See docs/decisions/0053-v0-names-in-one-room.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.client import MalformedAnswerError
from diptych_frontend.core_client.launcher import AdoptedCore
from diptych_frontend.model_files.model_config import ModelConfig
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import Collector
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.v0.params import (
    PROMPT_ADAPTER,
    DecodingConfig,
    Device,
    PromptAdapterRequest,
    params_of_today,
)
from diptych_frontend.v0.sockets import (
    HOW_ARE_YOU,
    MQEngineDeadError,
    RequestSocket,
    check_heartbeat,
    open_question_socket,
)
from diptych_frontend.v0.tokenizer_group import AdapterInputs, AdapterOutputs, TokenizerGroup
from diptych_protocol import (
    ClientClosedError,
    ControlCall,
    EngineConfig,
    EngineDeadError,
    InvalidRequestError,
    LoRARequest,
    RequestOutput,
    SamplingParams,
)
from diptych_protocol.as_sent import check_id
from diptych_protocol.control_calls import (
    ResetMmCache,
    ResetPrefixCache,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
)
from diptych_protocol.engine_client import ADD_ORDER, by_name

VLLM_RPC_TIMEOUT: Final = 10_000
"""Milliseconds that an engine may take to answer a greeting, and between two heartbeats."""
MQClientClosedError = ClientClosedError
"""The error of every call after `close`, under V0's name."""

logger = logging.getLogger(__name__)


def ENGINE_DEAD_ERROR(error: BaseException | None = None) -> MQEngineDeadError:
    """Return the error for callers of a dead engine; `error` is what went wrong first."""
    if error is None:
        return MQEngineDeadError("the engine is not running any more")
    dead = MQEngineDeadError(f"the engine is not running any more; the first error: {error!r}")
    dead.__cause__ = error
    return dead


class MQLLMEngineClient(AsyncLLM):
    """Connects to the core at `ipc_path`, a ZMQ endpoint; `close` leaves the core running.

    Only one running request at a time may use an id. The first error of the engine is kept:
    `check_health` raises it, and all other calls raise a `dead_error` that names it. After `setup`
    has returned, two tasks keep the client alive until `close`.
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
        """Needs no event loop and no engine yet; `setup` waits for the engine.

        rpc_timeout_ms: how long the core may take to answer a greeting.

        heartbeat_ms: the time between two questions about the core's health.

        Raises `InvalidRequestError` for a configuration or a model that cannot work.
        """
        self._first_error: BaseException | None = None
        self._core = AdoptedCore(ipc_path, engine_pid)
        super().__init__(engine_config, start_engine_loop=False, core=self._core)
        self.decoding_config = DecodingConfig.of(engine_config, self.renderer.chat_template)
        self._tokenizers = TokenizerGroup(self.renderer)
        self.input_processor = AdapterInputs(self.input_processor, self._tokenizers)
        self.input_preprocessor = self.input_processor
        self.output_processor = AdapterOutputs(self._tokenizers, engine_config)
        self._rpc_timeout_ms = rpc_timeout_ms
        self._heartbeat_ms = heartbeat_ms
        self._arriving: set[str] = set()
        """Ids of requests that are being prepared."""
        self._ended = asyncio.Event()
        """Something went wrong for good."""
        self.data_ipc_path = ipc_path
        self.context = zmq.asyncio.Context()
        self.input_socket = self.output_socket = RequestSocket(self._cores)
        self.heartbeat_socket = open_question_socket(self.context, ipc_path)
        # A context waits for its sockets, so that of a client that nobody closed goes first.
        self._socket_finalizer = weakref.finalize(self, self.heartbeat_socket.close, linger=0)
        self.output_loop: asyncio.Task[None] | None = None
        self.health_loop: asyncio.Task[None] | None = None
        self.tracing_flag = False
        """Whether the engine traces; `setup` learns it."""

    @staticmethod
    def is_unsupported_config(vllm_config: EngineConfig) -> bool:
        """Whether the configuration is unsupported: the layers of a model cannot be split over
        processes."""
        return vllm_config.parallel_config.pipeline_parallel_size > 1

    # --- setup --------------------------------------------------------------------------------

    @property
    def output_queues(self) -> Mapping[str, Collector[Any]]:
        """The present open requests by the caller's id, each with its unread outputs."""
        outputs = self.output_processor
        found = ((name, outputs.collector_of(name)) for name in outputs.open_ids)
        return {name: collector for name, collector in found if collector is not None}

    @contextlib.contextmanager
    def get_data_socket(self) -> Iterator[zmq.asyncio.Socket]:
        """Open another connection to the core, which is closed at the end of the block."""
        if self._closed:
            raise MQClientClosedError("this engine client was closed")
        socket = open_question_socket(self.context, self.data_ipc_path)
        try:
            yield socket
        finally:
            socket.close(linger=0)

    async def setup(self) -> None:
        """Wait until the core can serve, and begin to watch its health. Safe to call again.

        Raises:
            TimeoutError: it does not answer in time.
            ValueError: the other side is no engine core.
            UtilityError: the core refused.
            EngineDeadError: the process ended.
        """
        self._check_usable()
        if self.output_loop is None:
            self.output_loop = asyncio.create_task(
                self.run_output_handler_loop(), name="engine outputs"
            )
        try:
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
        self.tracing_flag = self.description.tracing_enabled
        if self.health_loop is None and not self._closed:
            beating = self.run_heartbeat_loop(timeout=self._heartbeat_ms)
            self.health_loop = asyncio.create_task(beating, name="engine health")

    async def run_output_handler_loop(self) -> None:
        """Take outputs from the engine until a permanent error, which every waiting caller then
        gets as the `dead_error`."""
        try:
            self._run_output_handler()
            await self._ended.wait()
        except asyncio.CancelledError:
            logger.debug("outputs of the engine are not taken any more")

    async def run_heartbeat_loop(self, timeout: int) -> None:
        """Check regularly that the engine's process is alive, and ask about its health.

        timeout: milliseconds until the next question. An unanswered question proves nothing,
        because a step may take long. A process that stands still loses its connections.
        """
        try:
            while (end := self._core.ended()) is None:
                await self.heartbeat_socket.send_multipart(HOW_ARE_YOU)
                while await self.heartbeat_socket.poll(timeout=timeout):
                    check_heartbeat(await self.heartbeat_socket.recv_multipart())
            self._die(end)
        except asyncio.CancelledError:
            logger.debug("the health of the engine is not watched any more")
        except Exception as exc:
            self._set_errored(exc)

    # --- requests -----------------------------------------------------------------------------

    async def generate(
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
        """Do the same as any client, with V0's order of arguments; `options` are other clients'
        further arguments."""
        PROMPT_ADAPTER.judge("prompt_adapter_request", prompt_adapter_request)
        outputs = super().generate(
            prompt, sampling_params, request_id, lora_request=lora_request,
            trace_headers=trace_headers, priority=priority, **options,
        )  # fmt: skip
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        arrival_time: float | None = None,
        *documented: Any,
        **options: Any,
    ) -> Collector[Any]:
        """Do the same as any client, but raise `ValueError` for an id that is in use."""
        self._check_usable()
        await self._connect()
        check_id(request_id)
        if request_id in self.output_queues or request_id in self._arriving:
            raise ValueError(f"Request {request_id} already exists")
        self._arriving.add(request_id)
        try:
            options = by_name(ADD_ORDER, documented, options)
            adapter = options.get("lora_request")
            if adapter is not None:  # its tokenizer is read where that holds nobody up
                await asyncio.to_thread(self._tokenizers.renderer_for, adapter)
            params = params_of_today(params)
            return await super().add_request(request_id, prompt, params, arrival_time, **options)
        finally:
            self._arriving.discard(request_id)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Do the same as any client. After `close` nothing is open, and it does nothing."""
        with contextlib.suppress(MQClientClosedError):
            await super().abort(request_id, internal)

    # --- calls that do not wait for the engine -------------------------------------------------

    async def start_profile(self) -> None:  # type: ignore[override]  # the files' names are given
        await self._one_way(StartProfile())

    async def stop_profile(self) -> None:
        await self._one_way(StopProfile())

    async def reset_mm_cache(self) -> None:
        await self._one_way(ResetMmCache())

    async def reset_prefix_cache(  # type: ignore[override]  # other arguments, and no answer
        self, device: Device | None = None
    ) -> None:
        """Forget cached prefixes, unless blocks are in use. Blocks are never swapped out, so there
        are none on `Device.CPU`."""
        if not isinstance(device, Device | None):
            raise InvalidRequestError(
                f"device must be a Device or None, not {device!r}", param="device"
            )
        if device is not Device.CPU:
            await self._one_way(ResetPrefixCache())

    async def sleep(self, level: int = 1) -> None:  # type: ignore[override]
        """Abort running requests, and sleep; see `EngineClient.sleep`."""
        await self._one_way(Sleep(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._one_way(WakeUp(tags))

    async def _one_way(self, call: ControlCall[Any]) -> None:
        """Send a call, in the order of the calls. What fails in the engine is in its log; whoever
        wants the answer, or an option that V0 had not, has `control`.

        Raises `MQClientClosedError` after `close`, `EngineDeadError` when the engine is gone, and
        `InvalidRequestError` for values that mean nothing.
        """
        self._check_usable()
        await self._connect()
        # Nobody waits for the answer, so a refusal of the core would not be heard.
        for field in msgspec.structs.fields(type(call)):
            try:
                msgspec.convert(getattr(call, field.name), field.type)
            except msgspec.ValidationError as exc:
                raise InvalidRequestError(f"{field.name}: {exc}", param=field.name) from None
        for member in self._cores.members:
            member.client.tell(call.METHOD, *call.arguments)
        if call.forgets_images:
            self.renderer.clear_mm_cache()
        self._cores.excuse_silence()  # it may be busy with that for a while

    # --- health -------------------------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """Whether there was a permanent error; `close` is none."""
        _ = super().errored  # looks whether the engine has ended unseen
        return self._first_error is not None

    @property
    def dead_error(self) -> BaseException:
        return self._dead or ENGINE_DEAD_ERROR(self._first_error)

    async def check_health(self) -> None:
        """Raise the first error unchanged, or raise because the core is stalled."""
        if self._first_error is not None:
            raise self._first_error
        if not self._closed:
            await self.check_live()

    def _set_errored(self, e: BaseException) -> None:
        """Keep the first thing that went wrong, and end every open request. Each is in the log."""
        logger.error("%r", e, exc_info=e)
        if self._first_error is not None:
            return
        self._first_error = e
        super()._die(ENGINE_DEAD_ERROR(e))
        self._ended.set()
        self._socket_finalizer()  # a core that ends waits until its clients have left

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._first_error is not None:
            raise self.dead_error

    def _die(self, cause: EngineDeadError) -> None:
        error = MQEngineDeadError(str(cause))
        error.__cause__ = cause
        self._set_errored(error)

    async def do_log_stats(
        self, scheduler_outputs: Any = None, model_output: Sequence[Any] | None = None
    ) -> None:
        """Do nothing: the server logs its own statistics."""

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        self.shutdown()

    def shutdown(self, timeout: float | None = None) -> None:
        for loop in (self.health_loop, self.output_loop):
            if loop is not None and not loop.get_loop().is_closed():
                loop.cancel()
        super().shutdown(timeout)
        self._socket_finalizer()
        self.context.destroy(linger=0)

    # --- what it was made of ------------------------------------------------------------------

    @property
    def tokenizer(self) -> TokenizerGroup:  # type: ignore[override]  # V0's has one per adapter
        return self._tokenizers

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Tokenizer:
        """Return the adapter's tokenizer, if it has one, or else the model's."""
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
