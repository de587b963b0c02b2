"""What is said to a vLLM server, and what it answers: `/inference/v1/generate`. Pure.

The endpoint takes token ids with vLLM's own sampling parameters, and answers token ids. Facts from
running vLLM 0.32: an error that is found after parsing comes as an event of a stream with status
200; `max_tokens` beyond the context is cut silently.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    LogprobsLists,
    SamplingParams,
    StructuredOutputsParams,
)
from diptych_protocol.sampling import MAX_LOGPROBS
from diptych_protocol.wire import ErrorKind

GENERATE: Final = "/inference/v1/generate"
WORST_RANK: Final = 1 << 30
_FINISHES: Final = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
_NO_ROOM: Final = (429, 503)


class _Sampling(msgspec.Struct, omit_defaults=True):
    """vLLM's sampling parameters. Numbers are always sent, so that no default of the model's
    repository takes their places. Stop strings are not: the router finds them."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] = []
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True


class _Generate(msgspec.Struct, omit_defaults=True):
    request_id: str
    token_ids: list[int]
    sampling_params: _Sampling
    stream: bool
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


class _Candidate(msgspec.Struct, gc=False):
    token_id: int
    logprob: float
    rank: int | None = None


class _Sampled(_Candidate):
    top_logprobs: list[_Candidate] = []
    """The sampled token, then the others by rank."""


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Sampled] | None = None


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class ErrorBody(msgspec.Struct):
    """What vLLM says of a failure."""

    message: str
    param: str | None = None
    code: int | str | None = None


class Answer(msgspec.Struct):
    """One event of a stream, or the body of an answer that is an error."""

    choices: list[_Choice] = []
    error: ErrorBody | None = None


answer_decoder: Final = msgspec.json.Decoder(Answer)
"""Raises one of `UNREADABLE` for what is no answer."""
_encoder: Final = msgspec.json.Encoder()


def generate_body(
    request: EngineCoreRequest,
    max_model_len: int,
    *,
    kv_transfer_params: dict[str, Any] | None = None,
    stream: bool = True,
) -> bytes:
    """The body that asks a vLLM server to go on after all tokens so far.

    request: its `generated_token_ids` count as answered: towards `max_tokens` and `min_tokens`, and
        in the seed, so that no random number is drawn twice.
    """
    done = request.generated_token_ids or []
    params = request.sampling
    body = _Generate(
        request.request_id,
        [*(request.prompt_token_ids or ()), *done],
        _sampling(params, len(done), max_tokens_of(request, max_model_len)),
        stream=stream,
        cache_salt=request.cache_salt,
        priority=request.priority,
        kv_transfer_params=kv_transfer_params,
    )
    if params.structured_outputs is not None:
        body.reasoning_ended = request.reasoning_ended
        body.reasoning_parser_kwargs = request.reasoning_parser_kwargs
    return _encoder.encode(body)


def max_tokens_of(request: EngineCoreRequest, max_model_len: int) -> int:
    """How many tokens an engine is still to generate, at most."""
    num_done = len(request.generated_token_ids or ())
    room = max_model_len - len(request.prompt_token_ids or ()) - num_done
    wanted = request.sampling.max_tokens
    return max(1, room if wanted is None else min(room, wanted - num_done))


def cannot_go_on(request: EngineCoreRequest) -> bool:
    """Another engine has begun an answer that must have a form, and vLLM begins each form anew."""
    return bool(request.generated_token_ids) and request.sampling.structured_outputs is not None


def _sampling(params: SamplingParams, num_done: int, max_tokens: int) -> _Sampling:
    return _Sampling(
        max_tokens=max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=None if params.seed is None else (params.seed + num_done) % (1 << 63),
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=max(0, params.min_tokens - num_done),
        logprobs=_asked(params.logprobs),
        logit_bias=params.logit_bias,
        bad_words=params.bad_words,
        structured_outputs=_form_of(params),
        detokenize=False,
    )


def _asked(logprobs: int | None) -> int | None:
    """How many alternatives to ask for. vLLM counts the sampled token among them, also if it is not
    one of the likeliest."""
    return min(logprobs + 1, MAX_LOGPROBS) if logprobs else logprobs


def output_of(core_id: str, answer: Answer, logprobs: int | None) -> EngineCoreOutput | None:
    """What an event of a stream means for its request; None: nothing, as for a last one with usage.

    logprobs: how many alternatives the request asked for.
    """
    if answer.error is not None:
        return failure(core_id, answer.error)
    if not answer.choices:
        return None
    choice = answer.choices[0]
    tokens = choice.token_ids or []
    output = EngineCoreOutput(core_id, tokens, stop_reason=choice.stop_reason)
    if logprobs is not None and tokens:
        output.new_logprobs = _logprobs_of(choice, logprobs)
        if output.new_logprobs is None:
            return broken(core_id, "its answer lacks the log-probabilities that were asked for")
    if choice.finish_reason is not None:
        output.finish_reason = _FINISHES.get(choice.finish_reason)
        if output.finish_reason is None:
            return broken(core_id, f"it ended the answer for {choice.finish_reason!r}")
    return output


def _form_of(params: SamplingParams) -> StructuredOutputsParams | None:
    """The form in vLLM's terms, which has rules of its own for what it cannot enforce."""
    form = params.structured_outputs
    return None if form is None else msgspec.structs.replace(form, lenient=False)


def _logprobs_of(choice: _Choice, wanted: int) -> LogprobsLists | None:
    content = choice.logprobs.content if choice.logprobs is not None else None
    if content is None or len(content) != len(choice.token_ids or ()):
        return None
    lists = LogprobsLists([], [], [])
    for sampled in content:
        ranked = sorted(sampled.top_logprobs, key=lambda other: other.rank or WORST_RANK)
        row = [sampled, *ranked[:wanted]]
        lists.logprob_token_ids.append([other.token_id for other in row])
        lists.logprobs.append([other.logprob for other in row])
        lists.sampled_token_ranks.append(sampled.rank or WORST_RANK)
    return lists


def failure(core_id: str, error: ErrorBody) -> EngineCoreOutput:
    """The end of a request that vLLM did not take, or failed at."""
    code = error.code if isinstance(error.code, int) else 500
    kind = ErrorKind.FAULT
    if code in _NO_ROOM:
        kind = ErrorKind.OVERLOADED
    elif 400 <= code < 500:
        kind = ErrorKind.REFUSED
    return EngineCoreOutput(
        core_id,
        [],
        finish_reason=FinishReason.ERROR,
        error=f"vLLM: {error.message}",
        error_kind=kind,
        error_param=error.param,
    )


def not_offered(core_id: str, why: InvalidRequestError) -> EngineCoreOutput:
    """The end of a request for something that vLLM's endpoint has not."""
    return EngineCoreOutput(
        core_id,
        [],
        finish_reason=FinishReason.ERROR,
        error=str(why),
        error_kind=ErrorKind.REFUSED,
        error_param=why.param,
    )


def too_late(core_id: str, why: str) -> EngineCoreOutput:
    """The end of a request whose KV cannot be fetched any more. No engine is to blame."""
    return EngineCoreOutput(
        core_id, [], finish_reason=FinishReason.ERROR, error=why, error_param="kv_transfer_params"
    )


def broken(core_id: str, why: str) -> EngineCoreOutput:
    """The end of a request whose answer cannot be read or used."""
    return EngineCoreOutput(
        core_id, [], finish_reason=FinishReason.ERROR, error=f"vLLM's answer cannot be used: {why}"
    )


def cut_short(core_id: str) -> EngineCoreOutput:
    """The end of a request that `cannot_go_on`. It is not the fault of the engine that says so."""
    return EngineCoreOutput(
        core_id,
        [],
        finish_reason=FinishReason.ERROR,
        error="an engine was lost in the middle of an answer with a form, and vLLM begins each "
        "form anew: send the request again",
        error_param="structured_outputs",
    )


def given_up(core_id: str) -> EngineCoreOutput:
    """The end of a request that an engine dropped, though it lives."""
    return EngineCoreOutput(core_id, [], finish_reason=FinishReason.ABORT)
