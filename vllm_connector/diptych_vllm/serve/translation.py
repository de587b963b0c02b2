"""Translates requests of the wire into vLLM's parameters, and vLLM's outputs into the wire's.

It performs no I/O. The protocols here describe the parts of vLLM's classes that are read.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    LogprobsLists,
    LogprobsTensors,
    SamplingParams,
)
from diptych_protocol.arrays import Array
from diptych_protocol.outputs import LEAST_LOGPROB
from diptych_protocol.wire import Abilities, ErrorKind

OURS: Final = "DiptychConnector"
"""The name of our connector in vLLM."""
_FINISHES: Final = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def token_ids_of(request: EngineCoreRequest) -> list[int]:
    """Return the tokens of the prompt and those that other engines have generated."""
    return [*(request.prompt_token_ids or ()), *(request.generated_token_ids or ())]


def max_tokens_of(request: EngineCoreRequest, max_model_len: int) -> int:
    """Return the most tokens that an engine may still generate."""
    num_done = len(request.generated_token_ids or ())
    room = max_model_len - len(request.prompt_token_ids or ()) - num_done
    wanted = request.sampling.max_tokens
    return max(1, room if wanted is None else min(room, wanted - num_done))


def sampling_of(request: EngineCoreRequest, max_model_len: int) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams`, without the form of the answer.

    Tokens that were generated elsewhere count: towards `max_tokens` and `min_tokens`, and in the
    seed, so that no random number is drawn twice. Stop strings are left out: front-ends find them.
    """
    params = request.sampling
    num_done = len(request.generated_token_ids or ())
    max_tokens = max_tokens_of(request, max_model_len)
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min(max(0, params.min_tokens - num_done), max_tokens),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "seed": None if params.seed is None else (params.seed + num_done) % (1 << 63),
        "stop_token_ids": params.stop_token_ids,
        "ignore_eos": params.ignore_eos,
        "logprobs": params.logprobs,
        # Who has generated tokens has told them; KV from elsewhere has none.
        "prompt_logprobs": None if num_done else params.prompt_logprobs,
        "logit_bias": params.logit_bias,
        "bad_words": params.bad_words,
        "detokenize": False,
    }
    if params.extra_args is not None:
        fields["extra_args"] = params.extra_args
    return fields


def form_of(params: SamplingParams) -> dict[str, Any] | None:
    """Return the arguments of vLLM's `StructuredOutputsParams`; None if the answer needs no form.
    vLLM has rules of its own for schemas that it cannot enforce."""
    form = params.structured_outputs
    if form is None:
        return None
    wanted = form.kind
    return {wanted: getattr(form, wanted)}


def check_request(request: EngineCoreRequest, abilities: Abilities) -> None:
    """Raise `InvalidRequestError`, naming the field, for what this vLLM does not support."""
    params = request.sampling_params
    if request.mm_features:
        refuse("image_url", "it prepares images itself; send text only")
    if request.resumable:
        refuse("resumable", "send the whole prompt")
    if request.prompt_embeds is not None and not (
        abilities.prompt_embeds and not request.generated_token_ids
    ):
        refuse("prompt_embeds", "send the prompt as text or token ids")
    if request.lora_request is not None and not abilities.adapters:
        refuse("model", "name the base model, or start vLLM with --enable-lora")
    if params is None:
        return
    if params.logits_processors:
        refuse("logits_processors", "leave it out")
    if params.n != 1:
        refuse("n", "a front-end asks for each answer by itself")
    if params.structured_outputs is not None and request.generated_token_ids:
        refuse("structured_outputs", "vLLM begins each form anew: send the request again")


def refuse(field: str, remedy: str) -> None:
    """Raise an `InvalidRequestError` that names the field."""
    raise InvalidRequestError(f"{field}: this engine is vLLM and takes none; {remedy}", param=field)


class CorePrompt(Protocol):
    """vLLM's `PrefillStats`, of one request."""

    num_cached_tokens: int
    """With those of `num_external_cached_tokens`."""
    num_external_cached_tokens: int


class CoreOutput(Protocol):
    """vLLM's `EngineCoreOutput`."""

    new_token_ids: list[int]
    finish_reason: Any
    """An enumeration whose `str` is the reason, or None."""
    stop_reason: int | str | None
    kv_transfer_params: dict[str, Any] | None
    new_logprobs: Any
    """vLLM's `LogprobsLists`: a token's row has the token itself and then the likeliest ones, at
    least as many as were asked for."""
    new_prompt_logprobs_tensors: Any
    """vLLM's `LogprobsTensors`, with such rows of the whole prompt without its first token."""

    @property
    def prefill_stats(self) -> CorePrompt | None: ...


def output_of(request: EngineCoreRequest, made: CoreOutput) -> EngineCoreOutput:
    """Return an output of vLLM's core in the wire's terms."""
    output = EngineCoreOutput(
        request.request_id,
        made.new_token_ids,
        stop_reason=made.stop_reason,
        kv_transfer_params=made.kv_transfer_params,
    )
    if made.prefill_stats is not None:
        output.num_cached_tokens = made.prefill_stats.num_cached_tokens
    params = request.sampling
    if made.new_logprobs is not None and params.logprobs is not None and made.new_token_ids:
        output.new_logprobs = _sampled(made.new_logprobs, params.logprobs)
    if made.new_prompt_logprobs_tensors is not None:
        output.new_prompt_logprobs_tensors = _of_prompt(made.new_prompt_logprobs_tensors)
    if made.finish_reason is not None:
        output.finish_reason = _FINISHES.get(str(made.finish_reason))
        if output.finish_reason is None:
            return failure(request.request_id, f"vLLM ended the answer for '{made.finish_reason}'")
    return output


def num_received(made: CoreOutput) -> int:
    """Return how many tokens of the prompt have KV that came from another engine. Only the first
    output of a request says it."""
    return 0 if made.prefill_stats is None else made.prefill_stats.num_external_cached_tokens


def failure(
    request_id: str, why: str, kind: ErrorKind = ErrorKind.FAULT, param: str | None = None
) -> EngineCoreOutput:
    """Return the last output of a failed or refused request. param: the refused field."""
    return EngineCoreOutput(
        request_id,
        [],
        finish_reason=FinishReason.ERROR,
        error=why,
        error_kind=kind,
        error_param=param,
    )


def _sampled(rows: Any, wanted: int) -> LogprobsLists:
    # Another request of the same step may have asked for more.
    width = wanted + 1
    return LogprobsLists(
        rows.logprob_token_ids[:, :width].tolist(),
        np.maximum(rows.logprobs[:, :width], LEAST_LOGPROB).tolist(),
        rows.sampled_token_ranks.tolist(),
    )


def _of_prompt(rows: Any) -> LogprobsTensors:
    likely = np.maximum(np.asarray(rows.logprobs, np.float32), LEAST_LOGPROB)
    return LogprobsTensors(
        _array(rows.logprob_token_ids), _array(likely), _array(rows.selected_token_ranks)
    )


def _array(numbers: Any) -> Array:
    """Return floats as they are, and integers with 32 bits."""
    plain = np.asarray(numbers)
    kind = "float32" if plain.dtype.kind == "f" else "int32"
    return Array(kind, plain.shape, plain.astype(kind).tobytes())
