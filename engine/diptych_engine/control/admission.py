"""Turns a message from the wire into a Request that the scheduler can trust, and what becomes no
request into its only output."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

import msgspec

from diptych_engine.control.image_intake import ImageIntake, MissingImageError
from diptych_engine.execution.grammar_compiler import HopelessFormError
from diptych_engine.lora.table import AdapterTable
from diptych_engine.scheduling.adapter import Adapter, cache_identity
from diptych_engine.scheduling.images import PlacedImage
from diptych_engine.scheduling.request import Request
from diptych_engine.scheduling.sessions import check_arrival, check_piece
from diptych_frontend.reasoning.request_options import said_ended
from diptych_frontend.text.prompt_embeds import check_embeds
from diptych_protocol import (
    DiptychError,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDescription,
    EngineOverloadedError,
    FinishReason,
    InvalidRequestError,
    KVTransferParams,
    PoolingParams,
    RefusedByEngineError,
    SamplingParams,
)
from diptych_protocol.kv_transfer_params import MAX_PREFIX_BLOCKS
from diptych_protocol.wire import MAX_DEADLINE_MS, MAX_PIN_S, MAX_TENANT_LENGTH, ErrorKind


def admit(
    message: EngineCoreRequest,
    client: bytes,
    limits: EngineDescription,
    adapters: AdapterTable,
    images: ImageIntake,
    *,
    hinged: bool,
    announced: bool = False,
) -> tuple[Request, list[int]]:
    """Validate a message and make it a Request.

    hinged: this engine takes part in hand-offs. announced: the request is still to come; the
    message may lack the data of its images. Returns the request and the tokens that its client gets
    at once. Raises `InvalidRequestError` for a message that cannot be served, and
    `MissingImageError`.
    """
    check_arrival(message)
    for name in ("tenant", "session"):
        if len(getattr(message, name)) > MAX_TENANT_LENGTH:
            raise InvalidRequestError(f"{name} may have at most {MAX_TENANT_LENGTH} characters")
    if not 0 <= (message.deadline_ms or 0) <= MAX_DEADLINE_MS:
        raise InvalidRequestError(f"deadline_ms must be 0 to {MAX_DEADLINE_MS}")
    if not 0 <= message.pin_s <= MAX_PIN_S:
        raise InvalidRequestError(f"pin_s must be 0 to {MAX_PIN_S}")
    if message.resumable:
        check_piece(message, limits)
    if message.pooling_params is not None:
        return _admit_pooling(message, message.pooling_params, client, limits, adapters), []
    params = message.sampling_params
    if params is None:
        raise InvalidRequestError("a request needs sampling_params or pooling_params")
    params.check()
    params.check_vocabulary(limits.vocab_size)
    params.check_processors(limits.logits_processors)
    if params.prompt_logprobs is not None and message.prompt_embeds is not None:
        raise InvalidRequestError("prompt_logprobs are of tokens; prompt_embeds have none")
    prompt = _prompt_of(message, limits)
    token_ids = prompt + _in_vocabulary(message.generated_token_ids or [], limits)
    if len(token_ids) >= limits.max_model_len:
        raise InvalidRequestError(
            f"{len(token_ids)} tokens leave no room to generate in {limits.max_model_len}"
        )
    adapter = adapters.resolve(message.lora_request)
    placed: tuple[PlacedImage, ...] = ()
    if message.mm_features is not None:
        if message.prompt_embeds is not None:
            raise InvalidRequestError(
                "mm_features and prompt_embeds exclude each other", param="mm_features"
            )
        placed = images.place(message.mm_features, prompt, message.cache_salt, announced=announced)
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
        tenant=message.tenant,
        kept_as=message.kept_as,
        deadline_s=(message.deadline_ms or 0) / 1e3,
        pin_s=message.pin_s,
        session=message.session,
        leaves_disk=message.leaves_disk,
        prefetches=message.prefetches and not message.resumable,
        trace_headers=message.trace_headers,
        cache_salt=_cache_salt(message, adapter),
        adapter=adapter,
        prompt_embeds=message.prompt_embeds,
        images=placed,
        resumable=message.resumable,
        # With the tokens that it was given, whoever made them told of all but the last.
        num_routed=len(token_ids) - 1 if message.generated_token_ids else 0,
        said_ended=said_ended(message.reasoning_ended, message.reasoning_parser_kwargs),
        kv_transfer=_transfer_params(params.extra_args, hinged=hinged),
        prefix_source=_prefix_source(message, len(token_ids), limits),
    )
    handed_off = request.kv_transfer is not None and request.kv_transfer.do_remote_prefill
    if request.prefix_source is not None and handed_off:
        raise InvalidRequestError(
            "prefix_source and do_remote_prefill exclude each other: all of the prompt is computed "
            "elsewhere",
            param="prefix_source",
        )
    if request.kv_transfer is not None:
        request.prefetches = False  # somebody waits for more than that
    return request, _first_tokens(request, limits)


def _admit_pooling(
    message: EngineCoreRequest,
    params: PoolingParams,
    client: bytes,
    limits: EngineDescription,
    adapters: AdapterTable,
) -> Request:
    """A prompt whose hidden states are wanted; it may fill the whole context."""
    if message.sampling_params is not None or message.generated_token_ids:
        raise InvalidRequestError(
            "a pooling request generates nothing: it has neither sampling_params (which includes "
            "kv_transfer_params) nor generated_token_ids"
        )
    if message.mm_features is not None:
        raise InvalidRequestError(
            "a pooling request takes no images; leave out mm_features", param="mm_features"
        )
    params.check()
    if (params.dimensions or 0) > limits.hidden_size:
        raise InvalidRequestError(f"dimensions must be at most {limits.hidden_size}")
    prompt = _prompt_of(message, limits)
    if len(prompt) > limits.max_model_len:
        raise InvalidRequestError(f"{len(prompt)} tokens do not fit in {limits.max_model_len}")
    adapter = adapters.resolve(message.lora_request)
    return Request(
        request_id=message.request_id,
        client=client,
        params=SamplingParams(),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        eos_token_id=None,
        max_total_tokens=len(prompt),
        seed=0,
        arrival_time=message.arrival_time,
        priority=message.priority,
        tenant=message.tenant,
        trace_headers=message.trace_headers,
        cache_salt=_cache_salt(message, adapter),
        adapter=adapter,
        pooling=params,
        prompt_embeds=message.prompt_embeds,
        prefix_source=_prefix_source(message, len(prompt), limits),
        # The hidden states of cached tokens are gone: only the last token's needs no others.
        reads_prefix_cache=params.task == "embed" and limits.pooling == "last",
    )


def _prompt_of(message: EngineCoreRequest, limits: EngineDescription) -> list[int]:
    """The prompt's token ids, or zeros for embeddings, which the message must fit."""
    prompt = message.prompt_token_ids
    if message.prompt_embeds is not None:
        num_tokens = check_embeds(message.prompt_embeds, limits.hidden_size).shape[0]
        prompt = prompt or [0] * num_tokens
        if len(prompt) != num_tokens:
            raise InvalidRequestError(
                f"prompt_embeds has {num_tokens} rows for {len(prompt)} prompt_token_ids"
            )
    if not prompt:
        raise InvalidRequestError("a request needs prompt_token_ids or prompt_embeds")
    return _in_vocabulary(prompt, limits)


def _in_vocabulary(token_ids: list[int], limits: EngineDescription) -> list[int]:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= limits.vocab_size):
        raise InvalidRequestError(f"token ids must be in 0..{limits.vocab_size - 1}")
    return token_ids


def _cache_salt(message: EngineCoreRequest, adapter: Adapter | None) -> str | None:
    """Names what the KV depends on besides token ids: embeddings are as good as tokens."""
    identity = cache_identity(message.cache_salt, adapter)
    embeds = message.prompt_embeds
    if embeds is None:
        return identity
    content = hashlib.blake2b(f"{embeds.dtype} {embeds.shape} ".encode(), digest_size=16)
    content.update(embeds.data)
    return "embeds:" + json.dumps([identity, content.hexdigest()])


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


def _prefix_source(
    message: EngineCoreRequest, num_tokens: int, limits: EngineDescription
) -> KVTransferParams | None:
    """Who may remember the beginning of the prompt; None if that is nobody, or not worth a fetch.

    Whole blocks are fetched, and at least one token of the prompt is always computed.
    """
    source = message.prefix_source
    if source is None:
        return None
    source.require_prefix()
    size = source.remote_block_size or limits.block_size
    count = min(source.remote_num_tokens or 0, num_tokens - 1) // size
    if count == 0 or source.remote_engine_id == limits.engine_id:
        return None
    return msgspec.structs.replace(source, remote_num_tokens=min(count, MAX_PREFIX_BLOCKS) * size)


def _first_tokens(request: Request, limits: EngineDescription) -> list[int]:
    """A hand-off driven by somebody else's router: what P sampled is ours to report first.

    But if the request wants to know how likely it was, the last token of the prompt is computed
    here, and what follows it sampled, again.
    """
    params = request.kv_transfer
    if params is None or not params.do_remote_prefill:
        return []
    first: list[int] = []
    if request.num_output_tokens == 0 and request.params.logprobs is None:
        first = params.first_token_ids or []
        if not all(0 <= token < limits.vocab_size for token in first):
            raise InvalidRequestError("kv_transfer_params: first_token_ids are out of range")
        if request.num_tokens + len(first) > limits.max_model_len:
            raise InvalidRequestError("kv_transfer_params: too many first_token_ids")
        first = first[: request.max_total_tokens - request.num_tokens]
        request.token_ids = request.token_ids + first
    remote, known = params.remote_num_tokens or 0, request.num_tokens
    if not 0 < remote <= known:
        raise InvalidRequestError(
            f"kv_transfer_params: {remote} tokens of KV do not fit a request of {known} tokens"
        )
    return first


def failed(request_id: str, error: DiptychError | str) -> EngineCoreOutput:
    """Return the output for a request that failed or was refused."""
    return EngineCoreOutput(
        request_id,
        [],
        finish_reason=FinishReason.ERROR,
        error=str(error),
        error_kind=_kind_of(error),
        error_param=error.param if isinstance(error, InvalidRequestError) else None,
    )


def aborted(request_id: str) -> EngineCoreOutput:
    """Return the output for a request that was aborted."""
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT)


def brought(request: Request) -> EngineCoreOutput:
    """Return the output for a prefetch that has ended."""
    return EngineCoreOutput(
        request.request_id,
        [],
        finish_reason=request.finish_reason,
        trace_headers=request.trace_headers,
        num_cached_tokens=request.num_cached_tokens or 0,
        num_received_tokens=request.num_received_tokens,
        num_pinned_tokens=request.num_pinned_tokens,
    )


def _kind_of(error: DiptychError | str) -> ErrorKind:
    match error:
        case HopelessFormError() | RefusedByEngineError():
            return ErrorKind.REFUSED
        case EngineOverloadedError():
            return ErrorKind.OVERLOADED
        case MissingImageError():
            return ErrorKind.MISSING_IMAGE
    return ErrorKind.FAULT
