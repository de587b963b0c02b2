"""Translates between the wire's service and vLLM's `AsyncLLM`. It decides nothing.

Only this module of the folder imports vLLM. Names that vLLM does not declare public are in
`versions`.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from vllm import PoolingParams as VllmPoolingParams
from vllm import SamplingParams as VllmSamplingParams
from vllm import __version__ as vllm_version
from vllm.engine.protocol import EngineClient
from vllm.envs import enable_envs_cache
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.lora.request import LoRARequest as VllmLoRARequest
from vllm.sampling_params import RequestOutputKind as VllmOutputKind
from vllm.sampling_params import StructuredOutputsParams as VllmForm
from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from diptych_frontend.text.prompt_embeds import check_embeds
from diptych_protocol import (
    EngineCoreRequest,
    EngineDescription,
    InvalidRequestError,
    KVTransferParams,
    LoRARequest,
    PoolingParams,
)
from diptych_protocol.arrays import Array
from diptych_protocol.sampling import POOLING_TASKS
from diptych_protocol.wire import Abilities, ErrorKind
from diptych_vllm.serve.event_socket import EventSource, source_of
from diptych_vllm.serve.load import VllmLoad
from diptych_vllm.serve.translation import OURS, CoreOutput, form_of, sampling_of, token_ids_of
from diptych_vllm.settings import ServedPort
from diptych_vllm.versions import (
    RawOutputs,
    add_raw,
    add_stat_logger,
    handshakes,
    num_cores,
    offer_raw_outputs,
    series_of,
)

NO_ROOM: Final = (429, 503)


class LoadLogger(AggregateStatLoggerBase):
    """Passes the reports of vLLM's core to a `VllmLoad`."""

    def __init__(self, load: VllmLoad) -> None:
        self._load = load

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self._load.take(scheduler_stats, iteration_stats, time.monotonic(), engine_idx)

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        # Its name says the opposite of what vLLM passes: 1 when it falls asleep.
        self._load.stats.sleep_level = level if is_awake else 0

    def log_engine_initialized(self) -> None:
        """Log nothing."""

    def record_admission_rejection(self, reason: str) -> None:
        """Log nothing, because the client is told."""


class ServedVllm:
    """One `AsyncLLM`."""

    def __init__(self, llm: EngineClient, settings: ServedPort) -> None:
        """Raises `InvalidRequestError` for a vLLM or a configuration that cannot be served."""
        series_of(vllm_version)
        self.llm: Any = llm
        self._config = config = llm.vllm_config
        self._settings = settings
        transfer = config.kv_transfer_config
        self.connector: str = "" if transfer is None else transfer.kv_connector or ""
        self.connector_config: dict[str, Any] = (
            {} if transfer is None else dict(transfer.kv_connector_extra_config)
        )
        self.engine_id: str = "" if transfer is None else transfer.engine_id or ""
        cache = config.cache_config
        self._num_cores = num_cores(llm)
        self.load = VllmLoad(
            cache.num_gpu_blocks or 0, self.connector, cache.block_size, self._num_cores
        )
        self.announced_from: int | None = None
        add_stat_logger(llm, LoadLogger(self.load))
        offer_raw_outputs(llm)
        enable_envs_cache()  # as vLLM's core does: its statistics read a variable for each token

    async def describe(self) -> EngineDescription:
        """Describe the engine. With our connector, its identity is that of its hinge."""
        model, cache = self._config.model_config, self._config.cache_config
        settings = self._settings
        tasks = set(await self.llm.get_supported_tasks())
        about = EngineDescription(
            engine_id=settings.engine_id or f"{socket.gethostname()}:{settings.port}",
            epoch=f"{os.getpid():x}-{secrets.token_hex(8)}",
            model=model.model,
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            block_size=cache.block_size,
            num_blocks=cache.num_gpu_blocks or 0,
            dtype=str(model.dtype).removeprefix("torch."),
            compat={
                "runtime": f"vllm {vllm_version}",
                "model": model.model,
                "connector": self.connector,
                "revision": settings.revision,
            },
            max_num_seqs=self._config.scheduler_config.max_num_seqs * self._num_cores,
            pid=os.getpid(),
            kv_transfer=bool(self.connector),
            revision=settings.revision,
            hidden_size=model.get_hidden_size(),
            tasks=tuple(task for task in ("generate", *POOLING_TASKS) if task in tasks),
            scheduling_policy=self._config.scheduler_config.policy,
            tracing_enabled=await self.llm.is_tracing_enabled(),
            node=settings.node,
            zone=settings.zone,
            name=settings.engine_id,
            runtime="vllm",
            # Of several cores each has a budget of its own: none is that of all.
            max_num_batched_tokens=(
                self._config.scheduler_config.max_num_batched_tokens if self._num_cores == 1 else 0
            ),
            abilities=self.abilities,
        )
        if self.connector == OURS:
            self._add_hinge(about, await handshakes(self.llm))
        elif self.connector:
            about.engine_id = self.engine_id
        return about

    def _add_hinge(self, about: EngineDescription, hinges: list[dict[str, Any]]) -> None:
        first, *others = sorted(hinges, key=lambda hinge: hinge["engine"]["remote_port"])
        engine = KVTransferParams.parse({**first["engine"], "do_remote_prefill": False})
        about.engine_id, about.epoch = engine.remote_engine_id or "", engine.epoch or ""
        about.compat = first["compat"]
        self.announced_from = None if others else first["announced_from"]
        if self.announced_from is not None:
            about.kv_transfer_host = engine.remote_host or ""
            about.kv_transfer_port = engine.remote_port or 0
            about.kv_transfer_proof = first["proof"]

    @property
    def max_model_len(self) -> int:
        return int(self._config.model_config.max_model_len)

    @property
    def abilities(self) -> Abilities:
        """What the engine can do. With NIXL, canaries judge hand-offs by their answers, because
        nothing checks the KV that was read."""
        embeds = self._config.model_config.enable_prompt_embeds
        return Abilities(
            checks_kv=self.connector in ("", OURS),
            frees_leases=self.connector in ("", OURS),
            lends_prefixes=False,
            prompt_embeds=bool(embeds) and not self.connector,
            images=False,
            adapters=self._config.lora_config is not None,
            logits_processors=False,
        )

    @property
    def event_source(self) -> EventSource | None:
        """Return where it publishes its KV events; see `source_of`. Raises `EventsError`."""
        return source_of(list(self.llm.get_kv_event_sources().values()))

    @property
    def adapter_places(self) -> tuple[int, int]:
        """How many adapters a step may use, and how many are kept; 0 if it takes none."""
        lora = self._config.lora_config
        return (0, 0) if lora is None else (lora.max_loras, lora.max_cpu_loras or lora.max_loras)

    @property
    def can_sleep(self) -> bool:
        return bool(self._config.model_config.enable_sleep_mode)

    @property
    def remembers(self) -> bool:
        """Whether its prefix cache is on."""
        return bool(self._config.cache_config.enable_prefix_caching)

    @property
    def shutdown_timeout_s(self) -> float:
        return float(self._config.shutdown_timeout)

    # --- requests -----------------------------------------------------------------------------

    async def generate(
        self, request: EngineCoreRequest, take: Callable[[CoreOutput], None]
    ) -> None:
        """Run a request to its end, and pass each of its outputs to `take`. Cancelling aborts it.

        Raises `InvalidRequestError`, and what `error_of` translates.
        """
        fields = sampling_of(request, self.max_model_len)
        form = form_of(request.sampling)
        if form is not None:
            fields["structured_outputs"] = VllmForm(**form)
        params = VllmSamplingParams(**fields, output_kind=VllmOutputKind.DELTA, skip_clone=True)
        raw = RawOutputs(take)
        try:
            await add_raw(
                self.llm,
                raw,
                request.request_id,
                self._prompt_of(request),
                params,
                lora_request=_adapter_of(request.lora_request),
                trace_headers=request.trace_headers,
                priority=request.priority,
                data_parallel_rank=request.data_parallel_rank,
                reasoning_ended=request.reasoning_ended if form else None,
                reasoning_parser_kwargs=request.reasoning_parser_kwargs if form else None,
            )
            await raw.ended
        except BaseException as exc:
            raw.ended.cancel()
            if raw.request_id is not None and not isinstance(exc, VllmDeadError):
                await self.llm.abort(raw.request_id, internal=True)
            raise

    async def pool(self, request: EngineCoreRequest, params: PoolingParams) -> Array:
        """Return a prompt's vectors, as in `PoolingOutput.data`. Raises as `generate`."""
        wanted = VllmPoolingParams(
            task=params.task, dimensions=params.dimensions, use_activation=params.normalize
        )
        vectors: Any = None
        async for output in self.llm.encode(
            self._prompt_of(request),
            wanted,
            request.request_id,
            lora_request=_adapter_of(request.lora_request),
            trace_headers=request.trace_headers,
            priority=request.priority,
        ):
            vectors = output.outputs.data
        plain = vectors.detach().to("cpu", torch.float32).contiguous()
        return Array("float32", tuple(plain.shape), plain.numpy().tobytes())

    def _prompt_of(self, request: EngineCoreRequest) -> Any:
        """Return a prompt that vLLM need not render. Raises `InvalidRequestError` for embeddings
        that do not fit the model, because vLLM's core would die of them."""
        prompt: dict[str, Any]
        if request.prompt_embeds is None:
            prompt = {"type": "token", "prompt_token_ids": token_ids_of(request)}
        else:
            size = self._config.model_config.get_inputs_embeds_size()
            embeds = check_embeds(request.prompt_embeds, size)
            raw = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
            prompt = {"type": "embeds", "prompt_embeds": raw.reshape(embeds.shape)}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        return prompt

    async def reject(self, params: dict[str, Any]) -> None:
        """Tell the connector that nobody will read the blocks that these parameters name."""
        # vLLM's core dies of an id that it knows already.
        name = f"rejection-{secrets.token_hex(16)}"
        await self.llm.notify_kv_transfer_request_rejected(name, params)

    @staticmethod
    def error_of(error: Exception) -> tuple[ErrorKind, str | None]:
        """Return the meaning of an exception of vLLM, and the field that it names."""
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

    async def add_lora(self, adapter: LoRARequest) -> bool:
        return bool(await self.llm.add_lora(_adapter_of(adapter)))


def _adapter_of(adapter: LoRARequest | None) -> VllmLoRARequest | None:
    if adapter is None:
        return None
    return VllmLoRARequest(adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
