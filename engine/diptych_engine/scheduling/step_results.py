"""Applies a step's results to its requests."""

from __future__ import annotations

from typing import Final

import msgspec

from diptych_engine.scheduling.prefix_cache import PrefixCache
from diptych_engine.scheduling.request import (
    NOT_SAMPLED,
    Request,
    RequestStatus,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenOutput,
)
from diptych_frontend.fair_share import OUTPUT_WEIGHT
from diptych_protocol import (
    Array,
    EngineCoreOutput,
    FinishReason,
    InvalidRequestError,
    LogprobsLists,
    SchedulerStats,
)
from diptych_protocol.wire import ErrorKind

NO_NUMBERS: Final = (
    "the model computed NaN: its weights, the adapter's, or the KV of the prompt are damaged"
)


def apply_results(
    plan: StepPlan, result: StepResult, prefixes: PrefixCache, stats: SchedulerStats
) -> list[TokenOutput]:
    """Count what was computed, and append what was sampled.

    Requests that ended or lost their blocks while the model ran get nothing. A request that has
    enough tokens now gets a `finish_reason`; the caller has to end it.
    """
    outputs: list[TokenOutput] = []
    sampled = generated = known = 0
    size = prefixes.block_size
    running = RequestStatus.RUNNING  # to reach a member of an enum takes as long as a call
    for share in plan.scheduled:
        request, start = share.request, share.start
        position = sampled
        sampled += share.samples
        if request.status is not running:
            continue
        if share.guess is None:
            known = start
        elif not _was_right(share, result.token_ids[position], start - known - 1, stats):
            request.account.served += OUTPUT_WEIGHT
            outputs[-1].output.num_wrong_guesses += 1
            continue
        end = start + share.num_tokens
        if start < request.num_prompt_tokens:
            computed = min(request.num_prompt_tokens, end)
            stats.prompt_tokens_computed += computed - start
            _charge(request, start, computed)
        request.num_computed_tokens = end
        if prefixes.enabled and end // size > start // size:
            prefixes.remember(request, start // size)
        if share.samples:
            output = _accept_token(request, result, position, end)
            generated += output.error is None
            if output.error == NO_NUMBERS:
                prefixes.pool.forget(request.block_ids)  # the next request shall not go on with it
            if share.guess is not None:
                _join(outputs[-1].output, output)
                continue
        elif result.pooled is not None and request.request_id in result.pooled:
            vectors = result.pooled[request.request_id]
            request.finish_reason = FinishReason.ERROR if vectors is None else FinishReason.STOP
            if vectors is None:
                prefixes.pool.forget(request.block_ids)
            output = EngineCoreOutput(
                request.request_id,
                [],
                pooling_output=vectors,
                num_cached_tokens=request.num_cached_tokens or 0,
                error=NO_NUMBERS if vectors is None else None,
            )
        else:
            continue
        outputs.append(TokenOutput(request, output))
    stats.steps += 1
    stats.tokens_generated += generated
    return outputs


def _was_right(share: ScheduledRequest, sampled: int, place: int, stats: SchedulerStats) -> bool:
    """Whether a guess, at this place among those of its request, is the token that was sampled
    there. Only then is there a token after it. Learn from it, and count it."""
    request, start = share.request, share.start
    stats.draft_tokens += 1
    stats.drafts += place == 0
    if request.finish_reason is not None or start >= len(request.token_ids):
        return False  # the answer has ended, or an earlier guess was wrong
    right = request.token_ids[start] == share.guess
    if request.guesser is not None:
        request.guesser.learn(start, right=right)
    if right:
        stats.draft_tokens_accepted += 1
        counts = stats.accepted_at
        counts.extend([0] * (place + 1 - len(counts)))
        counts[place] += 1
    return right and sampled != NOT_SAMPLED


def _join(output: EngineCoreOutput, further: EngineCoreOutput) -> None:
    """Add what one more token of a step brings to the output of its request."""
    output.new_token_ids += further.new_token_ids
    if output.new_logprobs is not None and further.new_logprobs is not None:
        for former, new in zip(
            msgspec.structs.astuple(output.new_logprobs),
            msgspec.structs.astuple(further.new_logprobs),
            strict=True,
        ):
            former += new
    former, new = output.routed_experts, further.routed_experts
    if former is not None and new is not None:
        shape = (former.shape[0] + new.shape[0], *former.shape[1:])
        output.routed_experts = Array(former.dtype, shape, bytes(former.data) + bytes(new.data))
    output.num_nans_in_logits = max(output.num_nans_in_logits, further.num_nans_in_logits)
    output.error = output.error or further.error


def _charge(request: Request, start: int, end: int) -> None:
    """Prompt tokens were computed; what is computed again is nobody's fault, and charged once."""
    start = max(start, request.num_charged)
    if end > start:
        request.account.served += end - start
        request.num_charged = end


def _accept_token(
    request: Request, result: StepResult, position: int, end: int
) -> EngineCoreOutput:
    request_id, cached = request.request_id, request.num_cached_tokens or 0
    if request_id in result.failed:
        request.finish_reason = FinishReason.ERROR
        error = result.failed[request_id]
        output = EngineCoreOutput(request_id, [], num_cached_tokens=cached, error=str(error))
        if isinstance(error, InvalidRequestError):  # no engine can do it, and none is to blame
            output.error_kind, output.error_param = ErrorKind.REFUSED, error.param
        return output
    num_nans = 0 if result.num_nans is None else result.num_nans[position]
    if num_nans:  # whatever is sampled of them is no answer
        request.finish_reason = FinishReason.ERROR
        output = EngineCoreOutput(request_id, [], num_cached_tokens=cached, error=NO_NUMBERS)
        output.num_nans_in_logits = num_nans
        return output
    token = result.token_ids[position]
    request.token_ids.append(token)
    request.account.served += OUTPUT_WEIGHT
    ended = stop_condition(request, token)
    if ended is not None:
        request.finish_reason, request.stop_reason = ended
    output = EngineCoreOutput(request_id, [token], num_cached_tokens=cached)
    if request.num_received_tokens:
        output.num_received_tokens, request.num_received_tokens = request.num_received_tokens, 0
    if request.num_pinned_tokens:
        output.num_pinned_tokens, request.num_pinned_tokens = request.num_pinned_tokens, 0
    if request.first_tokens:
        output.new_token_ids, request.first_tokens = [*request.first_tokens, token], []
    if result.logprobs is not None and (row := result.logprobs[position]) is not None:
        output.new_logprobs = LogprobsLists([row[0]], [row[1]], [row[2]])
    if result.prompt_logprobs is not None:
        output.new_prompt_logprobs_tensors = result.prompt_logprobs.get(request_id)
    if result.routed is not None:
        output.routed_experts = result.routed.get((request_id, end))
        request.num_routed = request.num_tokens - 1
    return output


def stop_condition(request: Request, token: int) -> tuple[FinishReason, int | str | None] | None:
    """Return whether the newest token ends the request, and why."""
    params, num_tokens = request.params, len(request.token_ids)
    if num_tokens - request.num_prompt_tokens >= params.min_tokens:
        if token == request.eos_token_id and not params.ignore_eos:
            return FinishReason.STOP, None
        if token in params.stop_token_ids:
            return FinishReason.STOP, token
    if num_tokens >= request.max_total_tokens:
        return FinishReason.LENGTH, None
    return None
