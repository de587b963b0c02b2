"""A request of the wire in vLLM's terms. Pure."""

from __future__ import annotations

from typing import Any, Final

from diptych_protocol import EngineCoreRequest, InvalidRequestError, SamplingParams
from diptych_protocol.kv_transfer_params import PARAM

LENDS: Final = "do_remote_decode"
FETCHES: Final = "do_remote_prefill"


def token_ids_of(request: EngineCoreRequest) -> list[int]:
    """The prompt, and what other engines have generated."""
    return [*(request.prompt_token_ids or ()), *(request.generated_token_ids or ())]


def max_tokens_of(request: EngineCoreRequest, max_model_len: int) -> int:
    """How many tokens an engine is still to generate, at most."""
    num_done = len(request.generated_token_ids or ())
    room = max_model_len - len(request.prompt_token_ids or ()) - num_done
    wanted = request.sampling.max_tokens
    return max(1, room if wanted is None else min(room, wanted - num_done))


def sampling_of(request: EngineCoreRequest, max_model_len: int) -> dict[str, Any]:
    """The arguments of vLLM's `SamplingParams`, but for the form of the answer.

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
        "prompt_logprobs": params.prompt_logprobs,
        "logit_bias": params.logit_bias,
        "bad_words": params.bad_words,
        "detokenize": False,
    }
    extra = dict(params.extra_args or {})
    asked = transfer_of(request)
    if asked is not None:
        extra[PARAM] = asked
    fields["extra_args"] = extra or None
    return fields


def form_of(params: SamplingParams) -> dict[str, Any] | None:
    """The arguments of vLLM's `StructuredOutputsParams`; None: the answer is free. vLLM has its own
    rules for what it cannot enforce."""
    form = params.structured_outputs
    if form is None:
        return None
    wanted = form.kind
    return {wanted: getattr(form, wanted)}


def transfer_of(request: EngineCoreRequest) -> dict[str, Any] | None:
    """The `kv_transfer_params` for vLLM's connector, which knows nothing of null."""
    params = request.sampling_params
    asked = None if params is None else (params.extra_args or {}).get(PARAM)
    if not isinstance(asked, dict):
        return None
    if asked.get(LENDS):
        lent: dict[str, Any] = {LENDS: True, FETCHES: False}
        if isinstance(asked.get("lease_id"), str):
            lent["lease_id"] = asked["lease_id"]
        return lent
    return {
        name: value for name, value in asked.items() if value is not None and value is not False
    }


def passes_token_on(params: SamplingParams, connector: str) -> bool:
    """Whether a decode engine goes on after the token of the prefill engine.

    It gets that token as a part of its prompt. Our connector can do that. With another one it must
    be sent just what the prefill engine has computed, and generates the token itself. So it does
    where an answer depends on which tokens are generated and which are of the prompt.
    """
    return connector == "DiptychConnector" and not (
        params.structured_outputs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
    )


def check_request(request: EngineCoreRequest) -> None:
    """Raise `InvalidRequestError`, which names the field, for what vLLM cannot be asked over the
    wire."""
    params = request.sampling_params
    if request.mm_features:
        refuse("image_url", "vLLM prepares images itself; send text only")
    if request.resumable:
        refuse("resumable", "send the whole prompt")
    if params is None:
        return
    if params.logits_processors:
        refuse("logits_processors", "leave it out")
    if params.n != 1:
        refuse("n", "a front-end asks for each answer by itself")
    if params.structured_outputs is not None and request.generated_token_ids:
        refuse("structured_outputs", "vLLM begins each form anew: send the request again")


def refuse(field: str, remedy: str) -> None:
    """Raise the error that names the field."""
    raise InvalidRequestError(
        f"{field}: this engine, which is vLLM, does not take it here; {remedy}", param=field
    )
