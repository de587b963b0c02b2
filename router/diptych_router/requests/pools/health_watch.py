"""Sends canaries through engines: through new ones before users' requests go there, and through
those that fail too often before they get requests again."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
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
from diptych_router.engines.engine_table import ROLES
from diptych_router.engines.health_book import Failure, left_out
from diptych_router.engines.known_prefixes import BlockNamer
from diptych_router.requests.pools.trials import (
    OUTPUT_TOKENS,
    Candidate,
    Trial,
    TrialBook,
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


log = logging.getLogger(__name__)

MAX_REPORTS = 64


@dataclass(eq=False, slots=True)
class HealthWatch:
    """Runs the trials of new engines, and leaves out those at which too many requests fail."""

    _links: Mapping[str, EngineLink]
    """The present engines by their keys."""
    _usable: Callable[[EngineLink], bool]
    """Whether an engine may get requests, apart from its health."""
    _release: Release
    _spawn: Callable[[Coroutine[Any, Any, None]], None]
    """Runs a coroutine in the background."""
    _on_change: Callable[[], None]
    """Called when a trial has ended, and when an engine may be well again."""
    _verifies: bool
    """There are trials of new engines; else those that fail get no partner either: see `probe`."""
    _trials: TrialBook = field(default_factory=TrialBook)
    reports: dict[tuple[str, str], CanaryReport] = field(default_factory=dict)
    """The newest of the trials of each pair (prefill, decode), newest last."""

    def verified(self, link: EngineLink) -> bool:
        """Whether a trial went through this engine since it started."""
        return self._trials.verified(link.epoch)

    def trusted(self, link: EngineLink) -> bool:
        """See `TrialBook.trusted`."""
        return self._trials.trusted(link.epoch)

    def went_badly(self, key: str, failure: Failure) -> None:
        """Record that an engine failed at a request and is at fault."""
        link = self._links.get(key)
        if link is None:
            return
        link.breaker.failures[failure] += 1
        if link.breaker.badly(time.monotonic()):
            log.warning("%s engine %s fails too often (%s)", link.role, link.name, failure)
            self._sort_out()

    def look(self, now: float) -> None:
        """Send the canaries that are due. Call it every second, and when engines come or go."""
        if self._verifies:
            self._begin_trials(now)
        for link in self._links.values():
            if link.open_to_work and not link.silent and link.breaker.canary_due(now):
                link.breaker.begin_canary()
                self._spawn(self._prove(link))
        self._sort_out()

    # --- new engines --------------------------------------------------------------------------

    def _begin_trials(self, now: float) -> None:
        self._trials.keep({link.epoch: link.former for link in self._links.values()}, now)
        by_epoch = {link.epoch: link for link in self._links.values() if link.open_to_work}
        candidates = [
            Candidate(epoch, link.role, link.fingerprint, link.open_tokens)
            for epoch, link in by_epoch.items()
        ]
        for trial in self._trials.due(candidates, now):
            self._spawn(self._try(trial, by_epoch[trial.prefill], by_epoch[trial.decode]))

    async def _try(self, trial: Trial, prefill: EngineLink, decode: EngineLink) -> None:
        ok = False
        try:
            report = await run_canary(prefill, decode, self._release)
            ok = report.ok
        finally:
            self._trials.ended(trial, ok=ok, now=time.monotonic())
        pair = f"canary from {report.prefill} to {report.decode}"
        if ok:
            log.info("%s: %d blocks in %.0f ms", pair, report.blocks, report.milliseconds)
        else:
            log.warning("%s failed: %s", pair, report.error)
        self.reports.pop((report.prefill, report.decode), None)
        self.reports[report.prefill, report.decode] = report
        while len(self.reports) > MAX_REPORTS:
            del self.reports[next(iter(self.reports))]
        self._on_change()

    # --- engines that fail --------------------------------------------------------------------

    def _sort_out(self) -> None:
        """Leave engines out whose breakers are open, or take them in again."""
        usable = [link for link in self._links.values() if link.up and self._usable(link)]
        pools = ({x.key: x.breaker for x in usable if x.role == role} for role in ROLES)
        out = {key for pool in pools for key in left_out(pool)}
        for link in self._links.values():
            link.keep_out(link.key in out)

    async def _prove(self, link: EngineLink) -> None:
        error = "it was not finished"
        others = [x for x in self._links.values() if x.open_to_work and not x.is_bad]
        try:
            error = await probe(link, others, self._release, pairs=self._verifies)
        finally:
            link.breaker.canary_ended(time.monotonic(), ok=not error)
        what = f"fails still: {error}" if error else "is well again"
        log.warning("%s engine %s %s", link.role, link.name, what)
        self._on_change()
