"""Engines that others wrote: they have what a document says, and nothing of ours besides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine_kit.echo_engine import ByteRenderer, EchoEngine

from diptych_protocol import EngineConfig


class DocumentedClient:
    """Exactly the members that the first document makes abstract, with its parameters."""

    def __init__(self) -> None:
        self.vllm_config = EngineConfig("dummy://", served_name="echo")
        self.model_config = SimpleNamespace(vocab_size=257, max_position_embeddings=2048)
        self.renderer = ByteRenderer()
        self.input_processor = SimpleNamespace(max_model_len=2048)
        self._echo = EchoEngine()

    is_running = property(lambda self: not self.errored)
    is_stopped = property(lambda self: self.errored)
    errored = property(lambda _self: False)
    dead_error = property(lambda _self: RuntimeError("alive"))

    def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._echo.generate(prompt, sampling_params, request_id, priority=priority)

    def encode(
        self,
        prompt: Any,
        pooling_params: Any,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> Any:
        return self._echo.encode(prompt, pooling_params, request_id)

    async def abort(self, request_id: Any) -> None: ...

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        self._echo.rejected.append((request_id, kv_transfer_params))

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None: ...

    async def check_health(self) -> None: ...

    async def start_profile(self) -> None: ...

    async def stop_profile(self) -> None: ...

    async def reset_mm_cache(self) -> None: ...

    async def reset_encoder_cache(self) -> None: ...

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return True

    async def sleep(self, level: int = 1, mode: str = "abort") -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> None: ...

    async def is_sleeping(self) -> bool:
        return False

    async def add_lora(self, lora_request: Any) -> bool:
        return False

    async def pause_generation(
        self,
        *,
        mode: str = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> None: ...

    async def resume_generation(self) -> None: ...

    async def is_paused(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None: ...


class NewerClient(DocumentedClient):
    """With what vLLM 0.33 asks of a client before it begins an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, str | None]] = []

    def check_admission(self, num_requests: int = 1, request_id: str | None = None) -> None:
        self.asked.append((num_requests, request_id))
