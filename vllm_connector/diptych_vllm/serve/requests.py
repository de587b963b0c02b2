"""Translates a request of the wire into vLLM's parameters. It performs no I/O."""

from __future__ import annotations

from typing import Any, Final

from diptych_protocol import EngineCoreRequest, InvalidRequestError, SamplingParams
from diptych_protocol.wire import Abilities

OURS: Final = "DiptychConnector"
"""The name of our connector in vLLM."""


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
    """Raise `InvalidRequestError`, which names the field, for a request that this vLLM does not
    support."""
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
