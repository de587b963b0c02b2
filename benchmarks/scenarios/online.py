"""Completions over HTTP, streamed, at rising concurrency."""

from __future__ import annotations

import itertools

from benchmarks.figures import Record
from benchmarks.load import Load
from benchmarks.peers import servers as peers
from benchmarks.scenario import (
    LIMIT_S,
    PATIENCE_S,
    Column,
    Options,
    Panel,
    Reporter,
    Scenario,
    compare,
)
from benchmarks.servers import diptych

PROMPTS = (128, 512, 1024)
CONCURRENCY = (1, 4, 16, 64)
SHARED_PROMPT, SHARED_TOKENS = 512, 448
LEAST_REQUESTS = 3
EIGHT_BITS = "diptych, activations q8"


def loads(*, quick: bool) -> dict[str, Load]:
    """`prompt tokens / users`."""
    sizes = itertools.product(PROMPTS[:2] if quick else PROMPTS, CONCURRENCY[: 3 if quick else 4])
    cases = {
        f"{prompt}/{users}": Load(users, prompt, requests=max(LEAST_REQUESTS, users))
        for prompt, users in sizes
    }
    for users in CONCURRENCY[1:3]:
        cases[f"{SHARED_PROMPT} shared/{users}"] = Load(
            users, SHARED_PROMPT, shared_tokens=SHARED_TOKENS, requests=2 * users
        )
    return cases


def run(options: Options, reporter: Reporter) -> list[Record]:
    ours = diptych(), diptych(EIGHT_BITS, activations="q8")
    systems = [*ours, *peers.servers(options.peers)]
    return compare(systems, loads(quick=options.quick), options, reporter)


SCENARIO = Scenario(
    "online",
    "Online: tokens for users who wait",
    "`prompt tokens / users`; each user streams 64 greedy tokens and asks again, at least "
    f"{LEAST_REQUESTS} requests together. Prompts are random token ids, the same for every "
    f"system; in `{SHARED_PROMPT} shared` the first {SHARED_TOKENS} are common to all. Every "
    f"system has all cores. What took a system over {PATIENCE_S} s is not repeated for it, and "
    f"what would take over {LIMIT_S} s is left out.",
    (
        Column("tokens_per_s", "output tokens/s"),
        Column("ttft_ms", "TTFT p50 ms", 0),
        Column("tpot_ms", "time a token p50 ms"),
        Column("itl_p99_ms", "ITL p99 ms", 0),
    ),
    run,
    versus=("tokens_per_s", "ttft_ms"),
    panels=tuple(
        Panel(f"{prompt}-token prompts", "concurrency", figure, f"{prompt}/")
        for figure in ("tokens_per_s", "ttft_ms")
        for prompt in PROMPTS
    ),
)
