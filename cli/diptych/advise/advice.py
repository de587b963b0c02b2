"""Simulates what a service was asked of late, to find how many pods of which kind it should have.

Each shape of the service gets the same requests at the same times. Steps take what engines
reported. Prompts begin alike as they did, so that each policy finds the prefixes that it would have
found; as far as routers do not tell that, prefixes are found as often as they were.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from diptych.simulator.cluster import Simulation
from diptych.simulator.costs import StepCost
from diptych.simulator.engine import EngineLimits
from diptych.simulator.metrics import Objectives, summarise
from diptych.simulator.plan import Overheads, SimulatedPool, SimulatedService
from diptych.simulator.prefixes import Chain, PromptPart
from diptych.simulator.workload import Request
from diptych_protocol.admin import LoadReport, PastRequest, PoolLoad
from diptych_protocol.router_settings import Disaggregate
from diptych_router.choosing.policies import POLICIES

ENOUGH: Final = 0.95
"""A shape is good if so much of the requests keeps all that is promised."""
LEAST_REQUESTS: Final = 20
MOST_REQUESTS: Final = 1000
"""The newest count; more would take longer, and say little more."""
MOST_EARLIER: Final = 250
"""So many before them have left something in engines' memory."""
MOST_SPLITS: Final = 8
"""How many divisions of one number of pods are tried, at most."""
CHUNKS: Final = (0.25, 0.5, 2, 4)
"""Token budgets of a step that are tried beside the present one, as parts of it."""
TRUSTED: Final = 0.1
"""Predictions that are further than this from what happened are not advice."""
ENOUGH_TOLD: Final = 0.9
"""Policies are compared if of so much of the requests is known how they begin."""


class ServiceShape(NamedTuple):
    """Pods of each kind, whether a prompt is computed where it is decoded, in which pieces, and by
    which policy routers choose."""

    prefill: int
    """0: one pool, whose engines do everything."""
    decode: int
    disaggregate: Disaggregate
    max_num_batched_tokens: int
    """0: engines did not say."""
    policy: str

    @property
    def pods(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        pods = f"{self.decode} in one pool"
        if self.prefill:
            pods = f"{self.prefill} prefill, {self.decode} decode, disaggregate {self.disaggregate}"
        tokens = self.max_num_batched_tokens
        pods = f"{pods}, {self.policy}"
        return f"{pods}, at most {tokens} tokens a step" if tokens else pods


class Prediction(msgspec.Struct, frozen=True):
    """What a shape would have done."""

    prefill: int
    decode: int
    disaggregate: Disaggregate
    max_num_batched_tokens: int
    policy: str
    kept: float
    """Part of the requests, 0 to 1, that would have got all that is promised."""
    ttft_ms: dict[str, float]
    inter_token_ms: dict[str, float]

    @property
    def shape(self) -> ServiceShape:
        return ServiceShape(
            self.prefill, self.decode, self.disaggregate, self.max_num_batched_tokens, self.policy
        )


class Advice(msgspec.Struct, frozen=True):
    """The shapes that were tried, and which to take."""

    requests: int
    seconds: float
    """From the first arrival to the last."""
    ttft_ms: float | None
    inter_token_ms: float | None
    now: Prediction
    measured_kept: float
    """The part of the same requests that the service really gave all that is promised."""
    is_trusted: bool
    """Whether the prediction for the present shape is near to what happened."""
    compares_policies: bool
    """Whether other policies were tried: only where it is known which prompts begin alike."""
    best: Prediction
    tried: list[Prediction]


class ObservedService(NamedTuple):
    """What the reports of all routers say together."""

    shape: ServiceShape
    pools: dict[str, PoolLoad]
    routers: int
    earlier: list[PastRequest]
    """Those before `requests` of which is known how they begin. Engines remember them."""
    requests: list[PastRequest]
    """In the order of their arrivals."""
    ttft_ms: float | None
    inter_token_ms: float | None

    @classmethod
    def of(
        cls,
        reports: Sequence[LoadReport],
        ttft_ms: float | None = None,
        inter_token_ms: float | None = None,
    ) -> ObservedService:
        """ttft_ms, inter_token_ms: instead of what the service promises. Raises `ValueError`, with
        a remedy, where too little is known."""
        first = reports[0]
        pools = {pool.role: pool for report in reports for pool in report.pools}
        past = sorted((r for each in reports for r in each.requests), key=lambda r: r.unix_time)
        answered = sum(each.first_token_s is not None for each in past)
        ttft_ms = first.ttft_ms if ttft_ms is None else ttft_ms
        gap_ms = first.inter_token_ms if inter_token_ms is None else inter_token_ms
        if ttft_ms is None and gap_ms is None:
            raise ValueError("spec.slo promises nothing: give --ttft-ms, --inter-token-ms or both")
        if answered < LEAST_REQUESTS or "decode" not in pools:
            raise ValueError(
                f"the routers remember {answered} answered requests and engines' steps of "
                f"{len(pools)} pools; try again after at least {LEAST_REQUESTS} requests"
            )
        if first.policy not in POLICIES:
            raise ValueError(f"this version does not know the policy {first.policy}")
        prefill = pools["prefill"].engines if "prefill" in pools else 0
        how: Disaggregate = msgspec.convert(
            first.disaggregate if prefill else "never", Disaggregate
        )
        decode = pools["decode"]
        shape = ServiceShape(
            prefill, decode.engines, how, decode.max_num_batched_tokens, first.policy
        )
        before = past[-MOST_REQUESTS - MOST_EARLIER : -MOST_REQUESTS]
        earlier = [each for each in before if each.prefixes]
        return cls(shape, pools, len(reports), earlier, past[-MOST_REQUESTS:], ttft_ms, gap_ms)

    @property
    def objectives(self) -> Objectives:
        ttft_ms, gap_ms = (math.inf if each is None else each for each in self[-2:])
        return Objectives(ttft_ms / 1e3, gap_ms / 1e3)

    @property
    def compares_policies(self) -> bool:
        answered = [each for each in self.requests if each.first_token_s is not None]
        told = sum(each.prefixes is not None for each in answered)
        return told >= ENOUGH_TOLD * len(answered)

    @property
    def begins_s(self) -> float:
        """When the first of `requests` arrives, if the first of `earlier` does so at 0."""
        return self.requests[0].unix_time - [*self.earlier, *self.requests][0].unix_time

    @property
    def seconds(self) -> float:
        return self.requests[-1].unix_time - self.requests[0].unix_time

    def kept(self) -> float:
        """What happened: the part of the requests that got all that is promised."""
        promised, good = self.objectives, 0
        for each in self.requests:
            if each.first_token_s is None:
                continue
            gap_s = (each.seconds - each.first_token_s) / max(each.output_tokens - 1, 1)
            good += each.first_token_s <= promised.ttft_s and gap_s <= promised.tpot_s
        return good / len(self.requests)

    def arrivals(self) -> Iterator[Request]:
        """Who was not answered wanted as long an answer as others."""
        known = [*self.earlier, *self.requests]
        outputs = [each.output_tokens for each in self.requests if each.first_token_s is not None]
        usual = round(statistics.mean(outputs))
        # Engines that never found a prefix do not look for any.
        finds = any(each.cached_tokens for each in known)
        chains = _chains(known) if finds else itertools.repeat(None)
        for each, chain in zip(known, chains, strict=False):
            output = usual if each.first_token_s is None else each.output_tokens
            cached = max(0, min(each.cached_tokens, each.prompt_tokens - 1))
            cached = 0 if chain is not None else cached
            at = each.unix_time - known[0].unix_time
            prompt = max(each.prompt_tokens, 1)
            yield Request(at, prompt, max(output, 1), chain or (), cached=cached)

    def plan(self, shape: ServiceShape) -> SimulatedService:
        """A pool of which nothing is known is taken to be like the other one."""
        decode = self.pools["decode"]
        prefill = self.pools.get("prefill", decode)
        return SimulatedService(
            _pool(shape.prefill, prefill, shape),
            _pool(shape.decode, decode, shape),
            Overheads(0.0, decode.move_s, decode.move_token_s),
            one_machine=decode.processors_part > 0,
            routers=self.routers,
            policy=POLICIES[shape.policy],
            disaggregate=shape.disaggregate,
        )


def _pool(pods: int, of: PoolLoad, shape: ServiceShape) -> SimulatedPool:
    """Who has processors in common with others waits for a part of their steps, as routers take
    it, too."""
    limits = EngineLimits(of.num_blocks, of.block_size, of.max_num_seqs)
    # As engines ask for it; a foreign one of several cores may tell other numbers.
    tokens = max(shape.max_num_batched_tokens or limits.max_num_batched_tokens, of.max_num_seqs)
    limits = replace(limits, max_num_batched_tokens=tokens)
    if 0 < of.enough_prompt_tokens < of.max_num_batched_tokens:
        limits = replace(limits, enough_prompt_tokens=of.enough_prompt_tokens)
    return SimulatedPool(pods, _cost(of), limits, slowdown=1.0 + of.processors_part)


def _cost(pool: PoolLoad) -> StepCost:
    """A router knows of a step that it takes some time beside its tokens, and how long each token
    of a prompt and each row of a stream takes."""
    each = pool.prompt_token_s
    knots = ((0, pool.step_s), (1, pool.step_s + each), (2, pool.step_s + 2 * each))
    return StepCost(knots, pool.row_s - each, 0.0, 0.0)


def advise(
    service: ObservedService, tried: Callable[[Prediction], None] = lambda _: None
) -> Advice:
    """Return the fewest pods that keep what is promised, taking it that more pods keep more; where
    no number up to twice the present one does, the shape that keeps most. The size of steps and the
    policy are chosen for the present pods, and again for those that were found.

    tried: hears of each shape that was simulated.
    """
    found: dict[ServiceShape, Prediction] = {}
    present = service.shape

    def outcome(shape: ServiceShape) -> Prediction:
        if shape not in found:
            found[shape] = simulate(service, shape)
            tried(found[shape])
        return found[shape]

    def rank(each: Prediction) -> tuple[float, bool, int, float]:
        # What is as good as the present shape is no reason to change it.
        same_steps = each.max_num_batched_tokens == present.max_num_batched_tokens
        same = same_steps + (each.policy == present.policy)
        p90 = each.ttft_ms.get("p90", math.inf)
        return round(each.kept, 2), each.shape == present, same, -p90

    def better(shape: ServiceShape) -> ServiceShape:
        for vary in (_policies, _step_sizes):
            shape = max(map(outcome, vary(service, shape)), key=rank).shape
        return shape

    now, counts = outcome(present), range(1, 2 * present.pods + 1)
    like = better(present)

    def best_of(pods: int) -> Prediction:
        shapes = [present] if pods == present.pods else []
        return max(map(outcome, [*shapes, *_shapes(service, pods, like)]), key=rank)

    at = bisect_left(counts, True, key=lambda pods: best_of(pods).kept >= ENOUGH)
    best = best_of(counts[at]) if at < len(counts) else max(found.values(), key=rank)
    kept = service.kept()
    return Advice(
        requests=len(service.requests),
        seconds=service.seconds,
        ttft_ms=service.ttft_ms,
        inter_token_ms=service.inter_token_ms,
        now=now,
        measured_kept=kept,
        is_trusted=abs(now.kept - kept) <= TRUSTED,
        compares_policies=service.compares_policies,
        best=outcome(better(best.shape)),
        tried=sorted(found.values(), key=lambda each: each.shape),
    )


def _shapes(service: ObservedService, pods: int, like: ServiceShape) -> Iterator[ServiceShape]:
    """A service of one pool stays so. like: of the same steps and policy."""
    yield like._replace(prefill=0, decode=pods, disaggregate="never")
    if not service.shape.prefill:
        return
    apart = max(1, math.ceil((pods - 1) / MOST_SPLITS))
    ways: tuple[Disaggregate, ...] = ("always",)
    if POLICIES[like.policy].compares_duties:
        ways = ("always", "auto")
    for prefill in range(1, pods, apart):
        for way in ways:
            yield like._replace(prefill=prefill, decode=pods - prefill, disaggregate=way)


def _policies(service: ObservedService, shape: ServiceShape) -> Iterator[ServiceShape]:
    """The shape, and it with other policies."""
    yield shape
    for policy in POLICIES if service.compares_policies else ():
        yield shape._replace(policy=policy)


def _step_sizes(service: ObservedService, shape: ServiceShape) -> Iterator[ServiceShape]:
    """The shape, and it with other token budgets: with room for a token of each stream, as engines
    ask for it."""
    yield shape
    least = max(pool.max_num_seqs for pool in service.pools.values())
    for part in CHUNKS:
        tokens = round(service.shape.max_num_batched_tokens * part)
        if tokens >= least:
            yield shape._replace(max_num_batched_tokens=tokens)


def simulate(service: ObservedService, shape: ServiceShape) -> Prediction:
    log = Simulation(service.plan(shape)).run(service.arrivals())
    if not any(job.arrival >= service.begins_s for job in log.jobs):  # no engine has room for them
        return Prediction(*shape, 0.0, {}, {})
    summary = summarise(log, service.objectives, service.begins_s)
    return Prediction(*shape, summary.attained, summary.ttft_ms, summary.itl_ms)


def _chains(requests: Sequence[PastRequest]) -> Iterator[Chain | None]:
    """What each prompt begins with that others begin with as well, in as few parts as can tell them
    apart; None: that is not known."""
    told = Counter(name for each in requests for _, name in each.prefixes or ())
    keys = {name: key for key, name in enumerate(told)}
    for each in requests:
        if each.prefixes is None:
            yield None
            continue
        shared = [part for part in each.prefixes if told[part[1]] > 1]
        ends = [
            part
            for part, following in itertools.zip_longest(shared, shared[1:])
            # Where as many prompts go on alike, they are those.
            if following is None or told[following[1]] < told[part[1]]
        ]
        yield tuple(PromptPart(keys[name], end) for end, name in ends)
