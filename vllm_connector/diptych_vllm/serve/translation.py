"""Translates requests of the wire into vLLM's parameters, and vLLM's outputs into the wire's.

It performs no I/O. The protocols here describe the parts of vLLM's classes that are read.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

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
WORST_RANK: Final = 1 << 30
"""Stands for a rank that vLLM does not tell."""
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


class RankedLogprob(Protocol):
    """vLLM's `Logprob`."""

    logprob: float
    rank: int | None


Candidates = Mapping[int, RankedLogprob]
"""Token -> how likely it is, for the token that was chosen and for the likeliest ones."""


class GeneratedTokens(Protocol):
    """vLLM's `CompletionOutput`."""

    finish_reason: str | None
    stop_reason: int | str | None

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[Candidates] | None: ...


class VllmOutput(Protocol):
    """vLLM's `RequestOutput`, with what is new since the one before."""

    num_cached_tokens: int | None
    kv_transfer_params: dict[str, Any] | None

    @property
    def outputs(self) -> Sequence[GeneratedTokens]: ...
    @property
    def prompt_logprobs(self) -> Sequence[Candidates | None] | None: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...


def output_of(
    request_id: str,
    news: VllmOutput,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> EngineCoreOutput:
    """Return an output. logprobs, prompt_logprobs: the alternatives that were asked for."""
    generated = news.outputs[0]
    tokens = list(generated.token_ids)
    output = EngineCoreOutput(
        request_id,
        tokens,
        stop_reason=generated.stop_reason,
        kv_transfer_params=news.kv_transfer_params,
        num_cached_tokens=news.num_cached_tokens or 0,
    )
    if logprobs is not None and tokens:
        output.new_logprobs = _sampled(tokens, generated.logprobs or (), logprobs)
    if prompt_logprobs is not None and news.prompt_logprobs and news.prompt_token_ids:
        output.new_prompt_logprobs_tensors = _of_prompt(
            news.prompt_token_ids, news.prompt_logprobs, prompt_logprobs
        )
    if generated.finish_reason is not None:
        output.finish_reason = _FINISHES.get(generated.finish_reason)
        if output.finish_reason is None:
            return failure(request_id, f"vLLM ended the answer for {generated.finish_reason!r}")
    return output


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


def _sampled(tokens: list[int], rows: Sequence[Candidates], wanted: int) -> LogprobsLists:
    lists = LogprobsLists([], [], [])
    for token, row in zip(tokens, rows, strict=True):
        names, values = _row(token, row, wanted)
        lists.logprob_token_ids.append(names)
        lists.logprobs.append(values)
        lists.sampled_token_ranks.append(row[token].rank or WORST_RANK)
    return lists


def _of_prompt(
    tokens: Sequence[int], rows: Sequence[Candidates | None], wanted: int
) -> LogprobsTensors:
    """Return the log-probabilities of a prompt's tokens, except of the first one."""
    width = wanted + 1
    names, values, ranks = array("i"), array("f"), array("i")
    for token, row in zip(tokens[1:], rows[1:], strict=True):
        found, likely = _row(token, row or {}, wanted)
        names.extend(found)
        values.extend(likely)
        ranks.append((row or {})[token].rank or WORST_RANK)
    length = len(ranks)
    return LogprobsTensors(
        Array("int32", (length, width), names.tobytes()),
        Array("float32", (length, width), values.tobytes()),
        Array("int32", (length,), ranks.tobytes()),
    )


def _row(token: int, row: Candidates, wanted: int) -> tuple[list[int], list[float]]:
    """Return a row: the token that was chosen, then this many of the likeliest ones, which may
    include it again."""
    ranked = sorted(row, key=lambda other: row[other].rank or WORST_RANK)[:wanted]
    names = [token, *ranked]
    return names, [max(row[name].logprob, LEAST_LOGPROB) for name in names]
