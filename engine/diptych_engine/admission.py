"""From a message that came over the wire to a Request that the scheduler can trust."""

from __future__ import annotations

import secrets
from typing import Any

from diptych_engine.lora.adapter import cache_identity
from diptych_engine.lora.table import AdapterTable
from diptych_engine.request import Request
from diptych_protocol import (
    EngineCoreRequest,
    EngineDescription,
    InvalidRequestError,
    KVTransferParams,
)


def admit(
    message: EngineCoreRequest,
    client: bytes,
    limits: EngineDescription,
    adapters: AdapterTable,
    *,
    hinged: bool,
) -> tuple[Request, list[int]]:
    """Validate a message and make it a Request.

    hinged: this engine takes part in hand-offs.
    Returns the request and the tokens that its client is to be told at once. Raises
    `InvalidRequestError` for a message that cannot be served.
    """
    params = message.sampling_params
    prompt = message.prompt_token_ids
    if params is None or not prompt:
        raise InvalidRequestError("a request needs sampling_params and prompt_token_ids")
    params.check()
    params.check_vocabulary(limits.vocab_size)
    generated = message.generated_token_ids or []
    token_ids = prompt + generated
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        raise InvalidRequestError(f"token ids must be in 0..{limits.vocab_size - 1}")
    if len(token_ids) >= limits.max_model_len:
        raise InvalidRequestError(
            f"{len(token_ids)} tokens leave no room to generate in {limits.max_model_len}"
        )
    adapter = adapters.resolve(message.lora_request)
    room = limits.max_model_len if params.max_tokens is None else params.max_tokens
    request = Request(
        request_id=message.request_id,
        client=client,
        params=params,
        token_ids=token_ids,
        num_prompt_tokens=len(prompt),
        eos_token_id=message.eos_token_id,
        max_total_tokens=min(limits.max_model_len, len(prompt) + room),
        seed=params.seed if params.seed is not None else secrets.randbits(63),
        arrival_time=message.arrival_time,
        priority=message.priority,
        cache_salt=cache_identity(message.cache_salt, adapter),
        adapter=adapter,
        kv_transfer=_transfer_params(params.extra_args, hinged=hinged),
    )
    return request, _first_tokens(request, limits)


def _transfer_params(extra_args: dict[str, Any] | None, *, hinged: bool) -> KVTransferParams | None:
    raw = (extra_args or {}).get("kv_transfer_params")
    if raw is None:
        return None
    params = KVTransferParams.parse(raw)
    if not (params.do_remote_decode or params.do_remote_prefill):
        return None
    if not hinged:
        raise InvalidRequestError("this engine takes no part in hand-offs")
    return params


def _first_tokens(request: Request, limits: EngineDescription) -> list[int]:
    """A hand-off driven by somebody else's router: what P sampled is ours to report first."""
    params = request.kv_transfer
    if params is None or not params.do_remote_prefill:
        return []
    first: list[int] = []
    if params.first_token_ids and request.num_output_tokens == 0:
        first = params.first_token_ids
        if not all(0 <= token < limits.vocab_size for token in first):
            raise InvalidRequestError("kv_transfer_params: first_token_ids are out of range")
        request.token_ids = request.token_ids + first
    remote, known = params.remote_num_tokens or 0, request.num_tokens
    blocks = (params.remote_block_ids or [[]])[0]
    wanted = -(-remote // limits.block_size)
    if not 0 < remote < known or len(blocks) != wanted:
        raise InvalidRequestError(
            f"kv_transfer_params: {len(blocks)} blocks for {remote} tokens do not fit a "
            f"request of {known} tokens and blocks of {limits.block_size}"
        )
    return first
