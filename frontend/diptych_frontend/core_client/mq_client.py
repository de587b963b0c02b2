"""MQLLMEngineClient: a client of a core that somebody else has started, as vLLM's V0 had it.

Its behaviour in failure is that client's; its wire is that of `AsyncLLM`, without pickle and with
one socket. See docs/decisions/0018-v0-client-on-the-v1-wire.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import zmq

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.client import MalformedAnswerError, open_dealer
from diptych_frontend.core_client.launcher import AdoptedCore
from diptych_frontend.model_files.model_config import ModelConfig
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import Collector
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import ClientClosedError, EngineConfig, EngineDeadError, LoRARequest
from diptych_protocol.as_sent import check_id

MQClientClosedError = ClientClosedError
"""The error of every call after `close`, under V0's name."""

RPC_TIMEOUT_S = 10.0
HEARTBEAT_S = 10.0


class MQLLMEngineClient(AsyncLLM):
    """Connects to the core at `ipc_path`, a ZMQ endpoint; `close` leaves it running.

    An id may be used by one running request at a time. The first thing that went wrong with the
    engine is kept: `check_health` raises it, and everybody else gets a `dead_error` that names it.
    """

    def __init__(
        self,
        ipc_path: str,
        engine_config: EngineConfig,
        engine_pid: int,
        *,
        rpc_timeout_s: float = RPC_TIMEOUT_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """Needs no event loop and no engine yet; `setup` waits for it.

        rpc_timeout_s: how long the core may take to answer a greeting.
        heartbeat_s: between two questions how the core is.

        Raises `InvalidRequestError` for a configuration or a model that cannot work.
        """
        self._errored_with: BaseException | None = None
        core = AdoptedCore(ipc_path, engine_pid)
        super().__init__(engine_config, start_engine_loop=False, core=core)
        self.decoding_config = None
        """Structured output has nothing to configure."""
        self._ipc_path = ipc_path
        self._rpc_timeout_s = rpc_timeout_s
        self._heartbeat_s = heartbeat_s
        self._arriving: set[str] = set()
        """Ids of requests that are being prepared."""
        self._health_loop: asyncio.Task[None] | None = None

    @staticmethod
    def is_unsupported_config(vllm_config: EngineConfig) -> bool:
        """The layers of a model are not split over processes."""
        return vllm_config.pipeline_parallel_size > 1

    async def setup(self) -> None:
        """Wait until the core can serve, and begin to watch its health; harmless when repeated.

        Raises:
            TimeoutError: it does not answer in time.
            ValueError: what answers is no engine core.
            UtilityError: the core refused.
            EngineDeadError: the process ended.
        """
        try:
            await self.ready(self._rpc_timeout_s)
        except TimeoutError as exc:
            waited_ms = self._rpc_timeout_s * 1000
            raise TimeoutError(f"RPCServer didn't reply within {waited_ms:.0f} ms") from exc
        except MalformedAnswerError as exc:
            raise ValueError("Unable to start RPC Server") from exc
        if self._health_loop is None and not self._closed:
            beat = _beat(weakref.ref(self), self._heartbeat_s)
            self._health_loop = asyncio.create_task(beat, name="engine health")

    @contextlib.contextmanager
    def get_data_socket(self) -> Iterator[zmq.Socket[bytes]]:
        """Another connection to the core, for one conversation; closed with the block."""
        if self._closed:
            raise MQClientClosedError("this engine client was closed")
        socket = open_dealer(None)
        try:
            socket.connect(self._ipc_path)
            yield socket
        finally:
            socket.close(linger=0)

    # --- requests -----------------------------------------------------------------------------

    @property
    def output_queues(self) -> Collection[str]:
        """The ids of the requests that have not ended."""
        return self.output_processor.open_ids

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Collector[Any]:
        """As any client, but raises `ValueError` for an id that is in use."""
        self._check_usable()
        await self._connect()
        check_id(request_id)
        if request_id in self.output_queues or request_id in self._arriving:
            raise ValueError(f"Request {request_id} already exists")
        self._arriving.add(request_id)
        try:
            return await super().add_request(request_id, prompt, params, *args, **kwargs)
        finally:
            self._arriving.discard(request_id)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Quiet after `close`: whoever closes aborts what he leaves behind."""
        with contextlib.suppress(MQClientClosedError):
            await super().abort(request_id, internal)

    # --- health -------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise the first thing that went wrong, as it was."""
        if self._errored_with is not None:
            raise self._errored_with
        await super().check_health()

    async def take_pulse(self) -> None:
        """Ask the core how it is. Silence is no proof of anything: a step may take long."""
        try:
            await self.refresh_stats()
        except (TimeoutError, ClientClosedError):
            return
        except Exception as exc:
            self._die(exc)

    def _die(self, cause: BaseException) -> None:
        if self._errored_with is not None:
            return
        self._errored_with = cause
        error = EngineDeadError(f"the engine is not running any more; the first error: {cause!r}")
        error.__cause__ = cause
        super()._die(error)

    async def do_log_stats(self) -> None:
        """Nothing: the server logs its own."""

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        self.shutdown()

    def shutdown(self, timeout: float | None = None) -> None:
        if self._health_loop is not None and not self._health_loop.get_loop().is_closed():
            self._health_loop.cancel()
        super().shutdown(timeout)

    # --- what it was made of ------------------------------------------------------------------

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Tokenizer:
        """The model's; adapters bring none of their own."""
        return await super().get_tokenizer()

    async def get_vllm_config(self) -> EngineConfig:
        return self.vllm_config

    async def get_model_config(self) -> ModelConfig:
        return self.model_config

    async def get_decoding_config(self) -> None:
        return self.decoding_config

    async def get_input_preprocessor(self) -> InputProcessor:
        return self.input_processor


async def _beat(client: weakref.ref[MQLLMEngineClient], period_s: float) -> None:
    """Take a client's pulse now and then, as long as somebody else needs the client."""
    while True:
        await asyncio.sleep(period_s)
        alive = client()
        if alive is None or alive.errored:
            return
        await alive.take_pulse()
        del alive
