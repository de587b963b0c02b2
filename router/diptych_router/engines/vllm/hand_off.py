"""A prompt that one vLLM server computes for another: what is said to the first, and what its
answer means. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    KVTransferParams,
)
from diptych_protocol.config import Connector
from diptych_router.engines.vllm.messages import Answer, broken, output_of

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


class _Told(msgspec.Struct):
    proof: Annotated[str, msgspec.Meta(max_length=256)]
    min_tokens: Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Announcing:
    """How requests for the KV of an engine are announced to other engines."""

    engine: KVTransferParams
    """What all its references say of it, with the proof that announcements have."""
    min_tokens: int
    """Shorter prompts are computed in one step, so it would bring nothing."""


def announcing_of(reference: dict[str, Any]) -> Announcing | None:
    """What a prefill engine has said with a reference; None: nothing, or nothing that can be
    read."""
    try:
        told = msgspec.convert(reference.get("announcing"), _Told)
        params = KVTransferParams.parse(reference)
    except (msgspec.ValidationError, InvalidRequestError):
        return None
    engine = msgspec.structs.replace(
        params,
        proof=told.proof,
        lease_id=None,
        expires_at=None,
        tokens_digest=None,
        first_token_ids=None,
        remote_request_id=None,
        remote_block_ids=None,
        remote_num_tokens=None,
    )
    return Announcing(engine, told.min_tokens)


def early_leg(asked: dict[str, Any]) -> Leg:
    """A decode engine's part before prefill has answered. asked: see `ticket_of`."""
    return Leg({name: value for name, value in asked.items() if value not in (None, False)})


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
    request: EngineCoreRequest, answer: PrefillAnswer, vocab_size: int, *, passes_on: bool
) -> EngineCoreOutput:
    """What the answer of a prefill engine means, apart from what it lends. passes_on: the decode
    engine goes on after its token."""
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
        if not passes_on:
            output.new_token_ids, output.new_logprobs = [], None
    return output
