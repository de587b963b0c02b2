"""The second turn of a conversation, for which D has the answer's KV and P does not."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack

import httpx
from benchmarks.figures import Record
from benchmarks.load import TIMEOUT_S, Load, drive, stream_completion
from benchmarks.machine import HERE
from benchmarks.peers import servers as peers
from benchmarks.scenario import Column, Options, Reporter, Scenario, rotated, seed_of
from benchmarks.servers import Running, System, diptych, diptych_service, running

FETCHES, COMPUTES, ONE = "1P1D that fetches", "1P1D that computes", "one engine"
WORDS = (HERE / "data" / "alice.txt").read_text().split()
TOKENS_A_WORD = 1.35
CONVERSATIONS = (1024, 2048, 4096, 7680)
"""About so many tokens before the second question; a quarter of them are the first answer."""
ANSWER_PART = 0.25
SECOND_QUESTION = "\n\nWhat did she say then?"
SECOND_ANSWER_TOKENS = 8
MAX_TOKENS = 8192
KV_GIB = 1
WARM_UP = Load(2, 128, 8, requests=4)


def systems(options: Options) -> list[System]:
    """Both pairs have no choice of engines, and only one policy knows of fetching."""

    def pair(name: str, policy: str) -> System:
        router = {"policy": policy, "disaggregate": "always"}
        return diptych_service(name, 1, 1, KV_GIB, router)

    found = [
        pair(FETCHES, "prefixAware"),
        pair(COMPUTES, "leastLoaded"),
        diptych(ONE, max_model_len=MAX_TOKENS, kv_cache_bytes=KV_GIB << 30),
    ]
    if python := options.peers.get("vllm"):
        found.append(peers.vllm(python, MAX_TOKENS))
    return found


async def second_turn(server: Running, tokens: int, seed: int) -> dict[str, float]:
    """Ask a long question, then a short one behind it and its answer; return the second's figures.

    tokens: of the conversation before the second question.
    """
    model, answer_tokens = server.system.model, int(tokens * ANSWER_PART)
    words = random.Random(seed).choices(WORDS, k=int((tokens - answer_tokens) / TOKENS_A_WORD))
    question = " ".join(words)
    body = {
        "model": model, "prompt": question, "max_tokens": answer_tokens,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        response = await client.post("/v1/completions", json=body)
        answer = response.raise_for_status().json()["choices"][0]["text"]
        conversation = question + answer + SECOND_QUESTION
        second = await stream_completion(client, model, conversation, SECOND_ANSWER_TOKENS)
    prompt_tokens = second.prompt_tokens or 0
    return {
        "ttft_ms": second.ttft_s * 1e3,
        "prompt_tokens": prompt_tokens,
        "computed_tokens": prompt_tokens - (second.cached_tokens or 0),
    }


def run(options: Options, reporter: Reporter) -> list[Record]:
    lengths = CONVERSATIONS[:1] if options.quick else CONVERSATIONS
    cases = {str(tokens): tokens for tokens in lengths if options.wants(str(tokens))}
    records: list[Record] = []
    with ExitStack() as stack:
        servers = [stack.enter_context(running(system)) for system in systems(options)]
        for server in servers:
            asyncio.run(drive(server.url, server.system.model, WARM_UP, seed=1))
        with reporter.counting("measuring", len(cases) * options.times * len(servers)):
            for case, tokens in cases.items():
                for repetition in range(options.times):
                    for server in rotated(servers, repetition):
                        seed = seed_of(case, repetition)
                        server.rest()
                        figures = asyncio.run(second_turn(server, tokens, seed))
                        records.append(Record(case, server.system.name, repetition, figures))
                        reporter.done(records[-1], [column.figure for column in COLUMNS])
    return records


COLUMNS = (
    Column("ttft_ms", "TTFT ms of the second turn", 0),
    Column("prompt_tokens", "tokens of its prompt", 0),
    Column("computed_tokens", "of them computed", 0),
)
SCENARIO = Scenario(
    "turns",
    "Turns: the second question of a conversation",
    "About so many tokens of conversation, a quarter of them the first answer, then a question of "
    f"one line. D has computed the answer. `{FETCHES}` lets P fetch its KV (the default), "
    f"`{COMPUTES}` has a policy that does not know of fetching; `{ONE}` remembers all, and so does "
    "vLLM, one server with its prefix cache. All have the same two processors.",
    COLUMNS,
    run,
    versus=("ttft_ms",),
    first_is_baseline=True,
)
