"""Sessions: prompts that come in pieces, as one request that waits between them with its KV.

After piece k was answered, all tokens but the last sampled one have KV. That one is dropped (its
consumer has got it all the same), the others become a part of the prompt, and piece k + 1 follows
them. So with `max_tokens=1` a session's prompt is exactly its pieces. This is what vLLM does.

On the wire every piece is an `EngineCoreRequest` with the id of the first, its own tokens only and
`resumable` set. One without `resumable` says that there are no more. A piece may come only when the
one before it was answered.
"""

from __future__ import annotations

import logging
import math

from diptych_engine.scheduling.request import Request, RequestStatus
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_protocol import (
    DiptychError,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDescription,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
)

log = logging.getLogger(__name__)


def check_piece(message: EngineCoreRequest, limits: EngineDescription) -> SamplingParams:
    """Validate a piece. The first piece of a session is also checked as any request is.

    Raises `InvalidRequestError` for what no session can do.
    """
    params = message.sampling_params
    if params is None or message.pooling_params is not None:
        raise InvalidRequestError("a prompt in pieces is for generation only")
    params.check()
    params.check_vocabulary(limits.vocab_size)
    check_arrival(message)
    for name, given in (
        ("prompt_embeds", message.prompt_embeds),
        ("mm_features", message.mm_features),
        ("generated_token_ids", message.generated_token_ids),
        ("prompt_logprobs", params.prompt_logprobs),
        ("structured_outputs", params.structured_outputs),
        ("prefix_source", message.prefix_source),
        ("kv_transfer_params", (params.extra_args or {}).get("kv_transfer_params")),
    ):
        if given is not None:
            raise InvalidRequestError(f"a prompt in pieces cannot have {name}")
    return params


def check_arrival(message: EngineCoreRequest) -> None:
    """Raise `InvalidRequestError` for a time that cannot be ordered."""
    if not math.isfinite(message.arrival_time):
        raise InvalidRequestError("arrival_time must be finite: requests are ordered by it")


def go_on(
    scheduler: Scheduler,
    session: Request,
    message: EngineCoreRequest,
    client: bytes,
    limits: EngineDescription,
) -> EngineCoreOutput | None:
    """Process a second message about a request: the next piece of its prompt, or the end of it.

    Returns the request's last output, if it ends with this.
    """
    request_id = session.request_id
    if not session.resumable or session.client != client:
        log.warning("request %s is already here; the second is dropped", request_id)
        return None
    if not message.resumable:
        session.resumable = False  # if a piece is being answered, that is the last
        if session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            return None
        scheduler.finish(session, FinishReason.STOP)
        return EngineCoreOutput(request_id, [], finish_reason=FinishReason.STOP)
    try:
        if session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            raise InvalidRequestError("a piece came before the one ahead of it was answered")
        _extend(session, message, limits)
    except DiptychError as exc:
        log.info("request %s: its next piece is refused: %s", request_id, exc)
        scheduler.finish(session, FinishReason.ERROR)
        return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=str(exc))
    scheduler.resume(session)
    return None


def _extend(session: Request, message: EngineCoreRequest, limits: EngineDescription) -> None:
    """Append a piece to the tokens of an idle session. Changes nothing if it raises."""
    params = check_piece(message, limits)
    piece = message.prompt_token_ids or []
    if not piece or min(piece) < 0 or max(piece) >= limits.vocab_size:
        raise InvalidRequestError(f"a piece needs token ids in 0..{limits.vocab_size - 1}")
    prompt = session.token_ids[:-1] + piece
    if len(prompt) >= limits.max_model_len:
        raise InvalidRequestError(
            f"{len(prompt)} tokens leave no room to generate in {limits.max_model_len}"
        )
    room = limits.max_model_len if params.max_tokens is None else params.max_tokens
    del session.block_hashes[(session.num_tokens - 1) // limits.block_size :]
    session.token_ids, session.guesser = prompt, None
    session.num_prompt_tokens = len(prompt)
    session.max_total_tokens = min(limits.max_model_len, len(prompt) + room)
    session.params = params
    session.seed = session.seed if params.seed is None else params.seed
    session.arrival_time = message.arrival_time
