"""Tokenizers by adapter: an adapter with a tokenizer of its own uses it for prompts and answers."""

from __future__ import annotations

import asyncio
import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

from diptych_frontend.model_files.model_source import readable
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import Collector, OutputProcessor, ParentRequest
from diptych_frontend.text.renderer import TextRenderer
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.text.tokenizer_files import tokenizer_from_hf
from diptych_protocol import (
    EngineConfig,
    EngineCoreRequest,
    InvalidRequestError,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    SamplingParams,
)

REMEMBERED = 32
"""The number of adapters whose tokenizers are cached."""


class TokenizerGroup:
    """The model's tokenizer, and those of adapters, which are read at their first use.

    An adapter's folder has its own tokenizer if there is a `tokenizer.json`. For others, and for
    folders that are not on this machine, the model's is used.
    """

    def __init__(self, renderer: TextRenderer) -> None:
        self._renderer = renderer
        self._of_folder = lru_cache(REMEMBERED)(self._load)

    def renderer_for(self, lora_request: LoRARequest | None) -> TextRenderer:
        """Return the renderer of prompts for an adapter. Raises `InvalidRequestError` for a
        tokenizer that cannot be read."""
        if lora_request is None or not lora_request.lora_path:
            return self._renderer
        return self._of_folder(lora_request.lora_path)

    def get_lora_tokenizer(self, lora_request: LoRARequest | None = None) -> Tokenizer:
        """Return the tokenizer of an adapter; None stands for the model. Raises
        `InvalidRequestError` if there is none, or it cannot be read."""
        return self.renderer_for(lora_request).get_tokenizer()

    async def get_lora_tokenizer_async(self, lora_request: LoRARequest | None = None) -> Tokenizer:
        """Do the same without blocking the event loop."""
        return await asyncio.to_thread(self.get_lora_tokenizer, lora_request)

    def _load(self, folder: str) -> TextRenderer:
        with readable(Path(folder)):
            own = tokenizer_from_hf(Path(folder), self._renderer.model_config.eos_token_ids)
        if own is None or self._renderer.tokenizer is None:
            return self._renderer
        renderer = copy.copy(self._renderer)
        renderer.tokenizer = own
        return renderer


class AdapterInputs(InputProcessor):
    """Prepares each request's prompt and bad words with the tokenizer of its adapter."""

    def __init__(self, inputs: InputProcessor, tokenizers: TokenizerGroup) -> None:
        super().__init__(
            inputs.renderer,
            max_model_len=inputs.max_model_len,
            vocab_size=inputs.vocab_size,
            eos_token_ids=inputs.eos_token_ids,
            scheduling_policy=inputs.scheduling_policy,
            logits_processors=inputs.logits_processors,
            reasoning_parser=inputs.reasoning_parser,
        )
        self._tokenizers = tokenizers

    def process_inputs(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        *args: Any,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> EngineCoreRequest:
        """Do the same as any client. Also raises `InvalidRequestError` for a form if the adapter
        has a tokenizer of its own, because the engine compiles forms for the model's."""
        inputs: InputProcessor = self
        renderer = self._tokenizers.renderer_for(lora_request)
        if renderer is not self.renderer:
            if isinstance(params, SamplingParams) and params.structured_outputs is not None:
                raise InvalidRequestError(
                    "structured_outputs are made of the model's own tokens, and this adapter has a "
                    "tokenizer of its own: leave one of the two out",
                    param="structured_outputs",
                )
            inputs = copy.copy(self)
            inputs.renderer = renderer
        return InputProcessor.process_inputs(
            inputs, request_id, prompt, params, *args, lora_request=lora_request, **options
        )  # fmt: skip


class AdapterOutputs(OutputProcessor):
    """Makes the text of each answer with the tokenizer of its request's adapter."""

    def __init__(self, tokenizers: TokenizerGroup, config: EngineConfig) -> None:
        super().__init__(
            tokenizers.renderer_for(None).tokenizer,
            stream_interval=config.stream_interval,
            reasoning_parser=config.reasoning_parser,
        )
        self._tokenizers = tokenizers

    def _answer(
        self,
        request: EngineCoreRequest,
        prompt_text: str | None,
        collector: Collector[RequestOutput],
        parent: ParentRequest | None,
        index: int,
        tokenizer: Tokenizer | None,
    ) -> Any:
        tokenizer = self._tokenizers.renderer_for(request.lora_request).tokenizer
        return super()._answer(request, prompt_text, collector, parent, index, tokenizer)
