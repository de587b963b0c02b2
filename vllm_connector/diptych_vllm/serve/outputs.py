"""Translates the outputs of vLLM into those of the wire. It performs no I/O.

The protocols here describe the parts of vLLM's classes that are read.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from diptych_protocol import EngineCoreOutput, FinishReason, LogprobsLists, LogprobsTensors
from diptych_protocol.arrays import Array
from diptych_protocol.wire import ErrorKind

WORST_RANK: Final = 1 << 30
LOWEST: Final = -9999.0
"""The log-probability of a token whose probability is 0, as in OpenAI's API."""
_FINISHES: Final = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


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
    """Return one output of a request. logprobs, prompt_logprobs: the number of alternatives that
    the client asked for."""
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
    """Return the last output of a request that failed or was refused. param: the field that was
    refused."""
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
    """Return the log-probabilities of a prompt's tokens. The first token has no row, because
    nothing precedes it."""
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
    return names, [max(row[name].logprob, LOWEST) for name in names]
