"""Applies a step's results to its requests."""

from __future__ import annotations

from diptych_engine.scheduling.prefix_cache import PrefixCache
from diptych_engine.scheduling.request import (
    Request,
    RequestStatus,
    StepPlan,
    StepResult,
    TokenOutput,
)
from diptych_frontend.fair_share import OUTPUT_WEIGHT
from diptych_protocol import EngineCoreOutput, FinishReason, LogprobsLists, SchedulerStats


def apply_results(
    plan: StepPlan, result: StepResult, prefixes: PrefixCache, stats: SchedulerStats
) -> list[TokenOutput]:
    """Count what was computed, and append what was sampled.

    Requests that ended or lost their blocks while the model ran get nothing. A request that has
    enough tokens now gets a `finish_reason`; the caller has to end it.
    """
    outputs: list[TokenOutput] = []
    sampled = generated = 0
    size = prefixes.block_size
    running = RequestStatus.RUNNING  # to reach a member of an enum takes as long as a call
    for share in plan.scheduled:
        request, start = share.request, share.start
        position = sampled
        sampled += share.samples
        if request.status is not running:
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
            output = _accept_token(request, result, position)
            generated += output.error is None
        elif result.pooled is not None and request.request_id in result.pooled:
            request.finish_reason = FinishReason.STOP
            output = EngineCoreOutput(
                request.request_id,
                [],
                pooling_output=result.pooled[request.request_id],
                num_cached_tokens=request.num_cached_tokens or 0,
            )
        else:
            continue
        outputs.append(TokenOutput(request, output))
    stats.steps += 1
    stats.tokens_generated += generated
    return outputs


def _charge(request: Request, start: int, end: int) -> None:
    """Prompt tokens were computed; what is computed again is nobody's fault, and charged once."""
    start = max(start, request.num_charged)
    if end > start:
        request.account.served += end - start
        request.num_charged = end


def _accept_token(request: Request, result: StepResult, position: int) -> EngineCoreOutput:
    request_id, cached = request.request_id, request.num_cached_tokens or 0
    if request_id in result.failed:
        request.finish_reason = FinishReason.ERROR
        error = result.failed[request_id]
        return EngineCoreOutput(request_id, [], num_cached_tokens=cached, error=error)
    token = result.token_ids[position]
    request.token_ids.append(token)
    request.account.served += OUTPUT_WEIGHT
    ended = stop_condition(request, token)
    if ended is not None:
        request.finish_reason, request.stop_reason = ended
    output = EngineCoreOutput(request_id, [token], num_cached_tokens=cached)
    if request.num_received_tokens:
        output.num_received_tokens, request.num_received_tokens = request.num_received_tokens, 0
    if request.first_tokens:
        output.new_token_ids, request.first_tokens = [*request.first_tokens, token], []
    if result.logprobs is not None:
        output.new_logprobs = _of_one_token(result.logprobs[position])
    if result.prompt_logprobs is not None:
        output.new_prompt_logprobs_tensors = result.prompt_logprobs.get(request_id)
    if result.routed is not None:
        output.routed_experts = result.routed.get(request_id)
        request.num_routed = request.num_tokens - 1
    if result.num_nans is not None:
        output.num_nans_in_logits = result.num_nans[position]
    return output


def _of_one_token(row: tuple[list[int], list[float], int] | None) -> LogprobsLists | None:
    return None if row is None else LogprobsLists([row[0]], [row[1]], [row[2]])


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
