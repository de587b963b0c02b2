"""vLLM's `AsyncLLM`, as the wire's service needs it. It translates, and decides nothing.

Of this folder only this module imports vLLM.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

from vllm import SamplingParams as VllmSamplingParams
from vllm import __version__ as vllm_version
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.sampling_params import RequestOutputKind as VllmOutputKind
from vllm.sampling_params import StructuredOutputsParams as VllmForm
from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from diptych_protocol import EngineCoreRequest, EngineDescription, InvalidRequestError
from diptych_protocol.wire import ErrorKind
from diptych_vllm.serve.load import VllmLoad
from diptych_vllm.serve.outputs import VllmOutput
from diptych_vllm.serve.requests import form_of, sampling_of, token_ids_of
from diptych_vllm.serve.settings import ServedPort
from diptych_vllm.versions import series_of

NO_ROOM = (429, 503)


class LoadLogger(AggregateStatLoggerBase):
    """Hands what vLLM's core reports to a `VllmLoad`."""

    def __init__(self, load: VllmLoad) -> None:
        self._load = load

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self._load.take(scheduler_stats, iteration_stats, time.monotonic())

    def log_engine_initialized(self) -> None:
        """Nothing is logged."""

    def record_admission_rejection(self, reason: str) -> None:
        """The client is told."""


class ServedVllm:
    """One `AsyncLLM`."""

    def __init__(self, llm: EngineClient, settings: ServedPort) -> None:
        """Raises `InvalidRequestError` for a vLLM or a configuration that cannot be served."""
        self._llm = llm
        self._config = config = llm.vllm_config
        series_of(vllm_version)
        transfer = config.kv_transfer_config
        self.connector: str = "" if transfer is None else transfer.kv_connector or ""
        self.load = VllmLoad(config.cache_config.num_gpu_blocks or 0, self.connector)
        loggers: Any = getattr(llm, "logger_manager", None)
        if loggers is None:
            raise InvalidRequestError(
                "vLLM reports no load: leave --disable-log-stats out", param="disable_log_stats"
            )
        loggers.stat_loggers.append(LoadLogger(self.load))
        self.description = self._describe(settings)

    @property
    def max_model_len(self) -> int:
        return int(self._config.model_config.max_model_len)

    @property
    def is_dead(self) -> bool:
        return bool(self._llm.errored)

    def _describe(self, settings: ServedPort) -> EngineDescription:
        model, cache = self._config.model_config, self._config.cache_config
        parallel = self._config.parallel_config
        return EngineDescription(
            engine_id=settings.engine_id or f"{socket.gethostname()}:{settings.port}",
            epoch=f"{os.getpid():x}-{secrets.token_hex(8)}",
            model=model.model,
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            block_size=cache.block_size,
            num_blocks=cache.num_gpu_blocks or 0,
            dtype=str(model.dtype).removeprefix("torch."),
            compat={
                "runtime": "vllm",
                "version": vllm_version,
                "model": model.model,
                "revision": settings.revision,
                "tensor_parallel_size": parallel.tensor_parallel_size,
            },
            max_num_seqs=self._config.scheduler_config.max_num_seqs,
            pid=os.getpid(),
            kv_transfer=bool(self.connector),
            revision=settings.revision,
            hidden_size=model.get_hidden_size(),
            scheduling_policy=self._config.scheduler_config.policy,
            node=settings.node,
            zone=settings.zone,
        )

    def generate(self, request: EngineCoreRequest) -> AsyncIterator[VllmOutput]:
        """Raises `InvalidRequestError`, and what `error_of` knows."""
        prompt: Any = {"type": "token", "prompt_token_ids": token_ids_of(request)}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        fields = sampling_of(request, self.max_model_len)
        form = form_of(request.sampling)
        if form is not None:
            fields["structured_outputs"] = VllmForm(**form)
        params = VllmSamplingParams(**fields, output_kind=VllmOutputKind.DELTA, skip_clone=True)
        answer: AsyncIterator[VllmOutput] = self._llm.generate(
            prompt,
            params,
            request.request_id,
            trace_headers=request.trace_headers,
            priority=request.priority,
            reasoning_ended=request.reasoning_ended if form else None,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs if form else None,
        )
        return answer

    @staticmethod
    def error_of(error: Exception) -> tuple[ErrorKind, str | None]:
        """What an exception of vLLM means, and the field that it names."""
        if isinstance(error, GracefulHTTPError):
            has_room = error.http_status not in NO_ROOM
            return (ErrorKind.FAULT if has_room else ErrorKind.OVERLOADED), None
        if isinstance(error, InvalidRequestError):
            return ErrorKind.REFUSED, error.param
        if isinstance(error, VLLMClientError | ValueError | TypeError):
            return ErrorKind.REFUSED, getattr(error, "parameter", None)
        return ErrorKind.FAULT, None

    @staticmethod
    def has_died(error: Exception) -> bool:
        return isinstance(error, VllmDeadError)
