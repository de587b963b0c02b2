"""Sends one canary: a real request of random tokens through a prefill and a decode engine.

An engine that has failed too often, and for which there is no partner, gets a smaller canary alone.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from diptych_protocol import (
    DiptychError,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineGenerateError,
    KVTransferStats,
    SamplingParams,
)
from diptych_protocol.admin import CanaryReport
from diptych_protocol.wire import steady_time
from diptych_router.engines.engine_link import EngineLink
from diptych_router.engines.known_prefixes import BlockNamer
from diptych_router.requests.pools.trials import (
    OUTPUT_TOKENS,
    complaint,
    prompt_length,
    received_tokens,
    unlike,
)
from diptych_router.requests.records import record_of
from diptych_router.requests.routed_request import RoutedRequest, Stage

CANARY_TIMEOUT_S = 120.0
"""Time limit, in seconds, of a canary. It is long, because a canary queues behind users' requests,
and engines that were added because there are too many of those must be verified too. A hand-off
that does not work ends sooner, by the hinge's own deadlines."""

PROBE_TIMEOUT_S = 30.0
"""Time limit of the canary that closes a breaker. It can be short, because another one follows."""
PROBE_TOKENS = 4
ALTERNATIVES = 4
"""How many other tokens an engine reports for each that it generates alone."""

Release = Callable[[str, dict[str, Any]], None]
"""Gives back a lease that nobody will read: (request id, `kv_transfer_params`). Does not block."""


async def run_canary(prefill: EngineLink, decode: EngineLink, release: Release) -> CanaryReport:
    """Send a canary and return its outcome. Never raises because of an engine."""
    report = CanaryReport(
        prefill=prefill.name,
        decode=decode.name,
        revision=decode.revision,
        ok=False,
        error="an engine of the pair went away",
        unix_time=time.time(),
    )
    source, target = prefill.description, decode.description
    if source is None or target is None:
        return report
    num_tokens = prompt_length(target.block_size, min(source.max_model_len, target.max_model_len))
    vocabulary = min(source.vocab_size, target.vocab_size)
    request = _random_request(num_tokens, vocabulary, OUTPUT_TOKENS)
    report = msgspec.structs.replace(
        report, prompt_tokens=num_tokens, computed_by_decode=num_tokens
    )
    num_blocks = -(-num_tokens // target.block_size)
    try:
        async with asyncio.timeout(CANARY_TIMEOUT_S):
            return await _cross(report, request, num_blocks, prefill, decode, release)
    except TimeoutError:
        error = f"no answer within {CANARY_TIMEOUT_S:g} s"
    except (DiptychError, msgspec.ValidationError) as exc:
        error = str(exc)
    return msgspec.structs.replace(report, error=error)


async def probe(
    engine: EngineLink, others: Sequence[EngineLink], release: Release, *, pairs: bool
) -> str:
    """Return what is wrong with an engine; empty if nothing is. Never raises because of an engine.

    others: engines that work. pairs: one of them becomes its partner in a hand-off, as in a canary.
    Otherwise, or if none of them fits, the engine is asked for one token.
    """
    fit = [x for x in others if x.role != engine.role and x.fingerprint == engine.fingerprint]
    about = engine.description
    if about is None:
        return "it is gone"
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            if pairs and fit and about.kv_transfer:
                partner = min(fit, key=lambda link: link.open_tokens)
                one, other = (engine, partner) if engine.role == "prefill" else (partner, engine)
                return (await run_canary(one, other, release)).error
            length = min(PROBE_TOKENS, about.max_model_len - 1)
            await engine.complete(_random_request(length, about.vocab_size, 1))
    except TimeoutError:
        return f"no answer within {PROBE_TIMEOUT_S:g} s"
    except DiptychError as exc:
        return str(exc) or type(exc).__name__
    return ""


def _random_request(length: int, vocabulary: int, max_tokens: int) -> EngineCoreRequest:
    """Random tokens under a salt of their own: no prefix cache knows them."""
    return EngineCoreRequest(
        request_id=f"canary-{secrets.token_hex(8)}",
        prompt_token_ids=[secrets.randbelow(vocabulary) for _ in range(length)],
        mm_features=None,
        sampling_params=SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        ),
        pooling_params=None,
        eos_token_id=None,
        arrival_time=steady_time(),
        lora_request=None,
        cache_salt=secrets.token_hex(8),
        data_parallel_rank=None,
    )


async def _cross(
    report: CanaryReport,
    request: EngineCoreRequest,
    num_blocks: int,
    prefill: EngineLink,
    decode: EngineLink,
    release: Release,
) -> CanaryReport:
    begin, num_tokens = time.monotonic(), report.prompt_tokens
    before = await _totals(decode)
    record = record_of(request, time.monotonic())
    canary = RoutedRequest(request, num_tokens + OUTPUT_TOKENS, record, BlockNamer())
    canary.place(prefill.key, Stage.PREFILL)
    for output in await prefill.complete(canary.prefill_request()):
        canary.absorb(output)
    if canary.lease is None:
        raise EngineGenerateError("prefill kept no blocks for decode")
    canary.place(decode.key, Stage.DECODE)
    try:
        outputs = await decode.complete(canary.decode_request())
    except BaseException:
        release(canary.core_id, canary.lease)
        raise
    after = await _totals(decode)
    received = after.blocks_received - before.blocks_received
    error = complaint(outputs, num_tokens, num_blocks, received)
    about = decode.description
    if not error and about is not None and not about.abilities.checks_kv:
        tokens = [*canary.generated, *(token for out in outputs for token in out.new_token_ids)]
        error = unlike(tokens, await _alone(request, decode))
        if error:  # vLLM compiles something when it is first asked for log-probabilities
            error = unlike(tokens, await _alone(request, decode, ALTERNATIVES))
    blocks = min(num_blocks, received)
    return msgspec.structs.replace(
        report,
        ok=not error,
        error=error,
        computed_by_decode=num_tokens - received_tokens(outputs),
        # Users' blocks may have crossed meanwhile; all of them take about as many bytes.
        blocks=blocks,
        bytes=(after.bytes_received - before.bytes_received) * blocks // max(1, received),
        milliseconds=(time.monotonic() - begin) * 1000,
        transport=after.transport,
    )


async def _alone(
    request: EngineCoreRequest, decode: EngineLink, logprobs: int | None = None
) -> list[EngineCoreOutput]:
    """What the decode engine answers to the prompt by itself, remembering nothing of it. logprobs:
    how many alternatives to tell of each token."""
    alone = msgspec.structs.replace(
        request,
        request_id=f"canary-{secrets.token_hex(8)}",
        cache_salt=secrets.token_hex(8),
        sampling_params=msgspec.structs.replace(request.sampling, logprobs=logprobs),
    )
    return await decode.complete(alone)


async def _totals(engine: EngineLink) -> KVTransferStats:
    return (await engine.refresh_stats()).kv_transfer or KVTransferStats()
