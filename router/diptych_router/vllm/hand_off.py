"""A prompt that one vLLM server computes for another: what is said to the first, and what its
answer means. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from diptych_protocol import EngineCoreOutput, EngineCoreRequest, FinishReason
from diptych_protocol.config import Connector
from diptych_router.vllm.messages import Answer, broken, output_of

LENDS: Final = "do_remote_decode"


@dataclass(frozen=True, slots=True)
class Leg:
    """What one server does for a request."""

    params: dict[str, Any] | None = None
    """The `kv_transfer_params` that it is sent."""
    lends: bool = False
    """It computes the prompt and keeps its KV for another server."""
    ticket: dict[str, Any] | None = None
    """It reads the KV that this stands for."""


WHOLE: Final = Leg()
"""Prompt and answer."""


def ticket_of(request: EngineCoreRequest) -> dict[str, Any] | None:
    """What the router has added to a request about KV: `kv_transfer_params`, which clients cannot
    set."""
    extra = request.sampling.extra_args or {}
    params = extra.get("kv_transfer_params")
    return params if isinstance(params, dict) else None


def lending_leg(asked: dict[str, Any]) -> Leg:
    """A prefill engine's part. asked: see `ticket_of`."""
    params = {LENDS: True, "do_remote_prefill": False}
    if isinstance(asked.get("lease_id"), str):
        params["lease_id"] = asked["lease_id"]
    return Leg(params, lends=True)


def passes_token_on(connector: Connector, request: EngineCoreRequest) -> bool:
    """Whether the decode engine goes on after the prefill engine's token.

    It gets that token as a part of its prompt. Our connector can do that. With NIXL, the decode
    engine must be sent just what the prefill engine has computed, and generates the token itself.
    So it does where an answer depends on which tokens are generated and which are of the prompt.
    """
    params = request.sampling
    return connector == "diptych" and not (
        params.structured_outputs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
    )


class PrefillAnswer(Answer):
    """The answer of a prefill engine, which comes as a whole."""

    kv_transfer_params: dict[str, Any] | None = None


_decoder: Final = msgspec.json.Decoder(PrefillAnswer)


def prefill_answer(body: bytes) -> PrefillAnswer:
    """Raises one of `UNREADABLE` for what is no answer."""
    return _decoder.decode(body)


def prefill_output(
    request: EngineCoreRequest, answer: PrefillAnswer, vocab_size: int, connector: Connector
) -> EngineCoreOutput:
    """What the answer of a prefill engine means, apart from what it lends."""
    core_id = request.request_id
    output = output_of(core_id, answer, request.sampling.logprobs)
    if output is None or output.finish_reason is None:
        return broken(core_id, "prefill has not finished")
    if output.finish_reason is FinishReason.ERROR:
        return output
    tokens = output.new_token_ids
    if len(tokens) != 1 or not 0 <= tokens[0] < vocab_size:
        return broken(core_id, f"prefill is to generate one token, and has {tokens[:8]}")
    if output.finish_reason is FinishReason.LENGTH:
        if answer.kv_transfer_params is None:
            return broken(core_id, "prefill keeps no KV: has it a KV connector?")
        if not passes_token_on(connector, request):
            output.new_token_ids, output.new_logprobs = [], None
    return output
