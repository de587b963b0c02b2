"""A prompt that its user sends in pieces, while the answers to the earlier pieces come back.

The core drops the last token that it sampled for a piece, the only one without KV, keeps the others
as a part of the prompt, and appends the next piece. `StreamedPrompt` does the same on this side. So
every piece is checked against the remaining room, and each answer knows its prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from diptych_frontend.text.collector import Collector
from diptych_frontend.text.renderer import TextRenderer, tokenization
from diptych_protocol import (
    EngineCoreRequest,
    InvalidRequestError,
    PoolingParams,
    RequestOptions,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StreamingInput,
)
from diptych_protocol.as_sent import params_as_sent
from diptych_protocol.wire import steady_time

CANCEL_TIMEOUT_S = 5.0
"""How long a user's generator may take to end when nobody waits for its next piece any more."""


class StreamedPrompt:
    """The tokens of a session so far, and the requests that send them to the core."""

    def __init__(
        self,
        request_id: str,
        params: SamplingParams | PoolingParams,
        renderer: TextRenderer,
        options: RequestOptions,
    ) -> None:
        """`params` are those of pieces without their own; the other arguments are for all pieces.
        Special tokens begin the first piece only.

        Raises `InvalidRequestError` for parameters that do not allow a prompt in pieces.
        """
        self._params = _checked(params)
        self.text = options.get("prompt_text")
        """What every answer tells as its prompt."""
        self._tokenization = tokenization(options.get("tokenization_kwargs"))
        here = ("prompt_text", "tokenization_kwargs")
        self._template = msgspec.structs.replace(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=None,
                mm_features=None,
                sampling_params=self._params,
                pooling_params=None,
                eos_token_id=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            ),
            **{name: value for name, value in options.items() if name not in here},
        )
        self._renderer = renderer
        self._kind = self._params.output_kind
        self._token_ids: list[int] = []
        self._generated: list[int] = []
        self._num_new = 0

    def extend(self, piece: StreamingInput) -> EngineCoreRequest:
        """Return the request with the whole prompt, of which `newest` is new to the core.

        Raises `InvalidRequestError` for a piece that cannot be appended.
        """
        if not isinstance(piece, StreamingInput):
            raise InvalidRequestError(
                f"a piece of a prompt must be a StreamingInput, not {type(piece).__name__}",
                param="prompt",
            )
        params = self._params
        if piece.sampling_params is not None:
            params = _checked(piece.sampling_params)
            if params.output_kind is not self._kind:
                raise InvalidRequestError(
                    "output_kind must be the same for every piece", param="output_kind"
                )
        wanted = self._tokenization
        if self._token_ids:
            wanted = msgspec.structs.replace(wanted, add_special_tokens=False)
        rendered = self._renderer.render_prompt(piece.prompt, tokenization=wanted)
        for field in ("prompt_embeds", "mm_features"):
            if rendered.get(field) is not None:
                raise InvalidRequestError(f"a prompt in pieces cannot have {field}", param=field)
        if not self._token_ids:
            self._template.cache_salt = rendered.get("cache_salt")
        new = rendered["prompt_token_ids"]
        self._token_ids += self._generated[:-1] + new
        self._generated, self._num_new = [], len(new)
        return msgspec.structs.replace(
            self._template,
            prompt_token_ids=list(self._token_ids),
            sampling_params=params,
            arrival_time=steady_time(),
            resumable=True,
        )

    def newest(self, whole: EngineCoreRequest) -> EngineCoreRequest:
        """Return the core's request for a later piece, with its own tokens only."""
        return msgspec.structs.replace(whole, prompt_token_ids=self._token_ids[-self._num_new :])

    def closing(self, request_id: str) -> EngineCoreRequest:
        """Return the request that tells the core that there are no more pieces."""
        return msgspec.structs.replace(
            self._template, request_id=request_id, arrival_time=steady_time()
        )

    def saw(self, output: RequestOutput) -> bool:
        """Record the tokens of an answer; True if they complete the answer to this piece."""
        (completion,) = output.outputs
        if self._kind is RequestOutputKind.DELTA:
            self._generated += completion.token_ids
        else:
            self._generated = completion.token_ids
        return completion.finish_reason is not None


async def next_piece(
    pieces: AsyncGenerator[StreamingInput, None], timeout_s: float, collector: Collector[Any] | None
) -> StreamingInput | None:
    """Return the next piece of a prompt; None if there are no more, or if the request has ended.

    Raises `InvalidRequestError` if none comes in time, and what the generator raises.
    """
    coming = asyncio.ensure_future(anext(pieces, None))
    waiting: set[asyncio.Future[Any]] = {coming}
    if collector is not None:
        waiting.add(collector.ready())
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if coming.done():
            return coming.result()
        if collector is not None and collector.is_ready:
            return None
        raise InvalidRequestError(
            f"no piece of the prompt came for {timeout_s:g} s", param="prompt", status=408
        )
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.wait(waiting, timeout=CANCEL_TIMEOUT_S)


def _checked(params: SamplingParams | PoolingParams) -> SamplingParams:
    if isinstance(params, PoolingParams):
        raise InvalidRequestError("a prompt in pieces cannot be pooled", param="prompt")
    params = params_as_sent(params, SamplingParams)
    for field, wrong in (
        ("n", params.n > 1),
        ("output_kind", params.output_kind is RequestOutputKind.FINAL_ONLY),
        ("stop", bool(params.stop)),
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("structured_outputs", params.structured_outputs is not None),
        ("kv_transfer_params", "kv_transfer_params" in (params.extra_args or {})),
    ):
        if wrong:
            raise InvalidRequestError(
                f"a prompt in pieces goes with no {field} of {getattr(params, field, 'any kind')}",
                param=field,
            )
    return params
