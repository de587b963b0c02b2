"""The one seam above the engine: everything that serves users talks to an `EngineClient`.

Signatures follow vLLM's `vllm.engine.protocol.EngineClient`. Its members that are not abstract here
answer with `UnsupportedFeatureError` until a client offers them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Literal, Protocol, TypedDict

from diptych_protocol.errors import UnsupportedFeatureError
from diptych_protocol.outputs import RequestOutput
from diptych_protocol.sampling import SamplingParams
from diptych_protocol.wire import EngineCoreRequest

PauseMode = Literal["abort", "wait", "keep"]


class TextPrompt(TypedDict, total=False):
    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


PromptType = str | list[int] | TextPrompt | TokensPrompt


class Renderer(Protocol):
    """Turns what users write into tokens."""

    def render_prompt(self, prompt: PromptType) -> TokensPrompt:
        """Tokenise a completion prompt; token ids pass through, range-checked.

        Raises `InvalidRequestError` for an empty prompt or an id outside the vocabulary.
        """

    def render_chat(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> TokensPrompt:
        """Apply the model's chat template. Raises `InvalidRequestError` if it refuses."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a sequence of tokens."""


class EngineClient(ABC):
    """A running engine, or several behind one face."""

    renderer: Renderer

    @property
    @abstractmethod
    def model_name(self) -> str:
        """The name under which clients ask for the model."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """The output handler has not started yet, or is alive."""

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    @abstractmethod
    def errored(self) -> bool:
        """The engine is dead; no request can succeed."""

    @property
    @abstractmethod
    def dead_error(self) -> BaseException:
        """An `EngineDeadError` that names the first known cause."""

    @abstractmethod
    def generate(
        self,
        prompt: EngineCoreRequest | PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for a prompt; the last output has `finished=True`.

        Leaving the generator early aborts the request in the core.

        Raises:
            InvalidRequestError: the prompt or a parameter can never succeed.
            EngineOverloadedError: too many requests wait already.
            EngineGenerateError: this request failed in the engine.
            EngineDeadError: the engine died.
        """

    @abstractmethod
    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End every request with these (external) ids; unknown ids are ignored."""

    @abstractmethod
    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        """Free what a prefill engine holds for a request that was refused before admission.

        Idempotent, creates no request, and never fails the caller's own error response.
        """

    @abstractmethod
    async def check_health(self) -> None:
        """Raise if the engine cannot serve, or should get no new requests."""

    async def check_live(self) -> None:
        """Raise if only a restart can help: busy and draining engines are alive."""
        if self.errored:
            raise self.dead_error

    @abstractmethod
    async def is_tracing_enabled(self) -> bool: ...

    @abstractmethod
    async def do_log_stats(self) -> None:
        """Write the current statistics to the log."""

    @abstractmethod
    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget every cached prefix; False if a block is in use."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """Stop everything this client started. Safe to call twice and at interpreter exit."""

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        raise UnsupportedFeatureError("encode: the model supports only the task 'generate'")

    async def start_profile(self) -> None:
        raise UnsupportedFeatureError("start_profile is not offered by this engine")

    async def stop_profile(self) -> None:
        raise UnsupportedFeatureError("stop_profile is not offered by this engine")

    async def reset_mm_cache(self) -> None:
        raise UnsupportedFeatureError("reset_mm_cache: no multimodal model is loaded")

    async def reset_encoder_cache(self) -> None:
        raise UnsupportedFeatureError("reset_encoder_cache: no multimodal model is loaded")

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        raise UnsupportedFeatureError("sleep is not offered by this engine")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        raise UnsupportedFeatureError("wake_up is not offered by this engine")

    async def is_sleeping(self) -> bool:
        return False

    async def add_lora(self, lora_request: Any) -> bool:
        raise UnsupportedFeatureError("add_lora is not offered by this engine")

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> None:
        raise UnsupportedFeatureError("pause_generation is not offered by this engine")

    async def resume_generation(self) -> None:
        raise UnsupportedFeatureError("resume_generation is not offered by this engine")

    async def is_paused(self) -> bool:
        return False
