"""What one tenant with 1,000 requests does to the first tokens of another.

Two engines and a router's client of them, in this process, because a client can say whose request
it is; behind HTTP the name of the API key does.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Record
from benchmarks.load import WORD_IDS
from benchmarks.scenario import Column, Options, Reporter, Scenario
from benchmarks.servers import MODEL, NotStartedError, free_port

from diptych.bench.figures import percentile
from diptych_frontend.core_client.curve import new_keys
from diptych_frontend.core_client.launcher import CoreProcess
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import (
    EngineConfig,
    EngineDeadError,
    KVTransferConfig,
    RouterConfig,
    SamplingParams,
)
from diptych_router.engines.discovery import parse_targets
from diptych_router.requests.pool_client import PoolClient


@dataclass(frozen=True)
class Crowd:
    """Requests that are there all at once."""

    tenant: str
    requests: int
    prompt_tokens: int
    output_tokens: int


PROMPTS = {"128 tokens": 128, "512 tokens": 512, "1024 tokens": 1024}
ASKED, QUICK_ASKED = 10, 4
"""Requests whose first token is timed, one after the other."""
OUTPUT = 4
PAUSE_S = 0.01
"""From an answer to the next question, on average, for each token of a prompt: so that the tenant
wants a quarter of the engine. Who wants more than half has half, and waits accordingly."""
CROWDS = {
    "alone": None,
    "beside 4 of another key that only generate": Crowd("greedy", 4, 16, 6000),
    "beside 1,000 of another key": Crowd("greedy", 1000, 200, 64),
    "behind 1,000 of its own key": Crowd("light", 1000, 200, 64),
}
"""The second shows what the engines' sharing of processors costs: its prompts are computed already,
and it generates about as much at a time as the third."""
START_TIMEOUT_S, PATIENCE_S = 120.0, 30.0
"""Behind others of its own, a request is not waited for any longer."""


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[PoolClient]:
    """A router's client of a prefill and a decode engine, each with a thread of its own."""
    source = resolve_model(MODEL)
    renderer, model = TextRenderer(source), source.config
    inputs = InputProcessor(
        renderer,
        max_model_len=model.max_position_embeddings,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )
    keys = new_keys()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diptych-bench-")))
        (folder / "curve-public").write_text(keys.public)
        (folder / "curve-secret").write_text(keys.secret)
        addresses = {role: f"127.0.0.1:{free_port()}" for role in ("prefill", "decode")}
        for role, address in addresses.items():
            config = EngineConfig(
                MODEL, "smollm2", role, num_threads=1, kv_transfer=KVTransferConfig()
            )
            core = CoreProcess(config, f"tcp://{address}", folder)
            stack.callback(core.stop)
        client = PoolClient(
            RouterConfig(MODEL, "smollm2"),
            inputs,
            OutputProcessor(renderer.tokenizer),
            targets={
                "prefill": parse_targets(addresses["prefill"]),
                "decode": parse_targets(addresses["decode"]),
            },
            read_keys=lambda: [keys],
        )
        client.start()
        stack.callback(client.shutdown)
        await _until_healthy(client)
        yield client


async def _until_healthy(client: PoolClient) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return await client.check_health()
        except EngineDeadError as exc:
            if time.monotonic() > deadline:
                raise NotStartedError(str(exc)) from exc
            await asyncio.sleep(0.05)


async def ask(
    client: PoolClient,
    name: str,
    tenant: str,
    prompt: list[int],
    output: int,
    begun: list[str] | None = None,
) -> float:
    """Seconds to the first token of an answer that is read to its end. `begun` gets its name when
    that token is there."""
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    started, first = time.perf_counter(), 0.0
    async for _ in client.generate(prompt, params, name, tenant=tenant):
        if not first:
            first = time.perf_counter() - started
            if begun is not None:
                begun.append(name)
    return first


async def measure(
    client: PoolClient, length: int, crowd: Crowd | None, asked: int, seed: int
) -> dict[str, float]:
    """TTFT of requests that come one after the other while a crowd is there."""
    rng = random.Random(seed)

    def prompt(tokens: int) -> list[int]:
        return rng.choices(WORD_IDS, k=tokens)

    async with contextlib.AsyncExitStack() as stack:
        others: list[asyncio.Task[float]] = []
        if crowd is not None:
            begun: list[str] = []
            others = [
                asyncio.create_task(
                    ask(
                        client,
                        f"o{number}",
                        crowd.tenant,
                        prompt(crowd.prompt_tokens),
                        crowd.output_tokens,
                        begun,
                    )
                )
                for number in range(crowd.requests)
            ]
            stack.push_async_callback(_cancel, others)
            while len(begun) < min(20, crowd.requests):
                await asyncio.sleep(0.05)  # by then they run in both engines
        seconds: list[float] = []
        for number in range(asked):
            await asyncio.sleep(2 * PAUSE_S * length * rng.random())
            try:
                async with asyncio.timeout(PATIENCE_S):
                    seconds.append(await ask(client, f"r{number}", "light", prompt(length), OUTPUT))
            except TimeoutError:
                seconds.append(PATIENCE_S)
                break
        if sum(not task.done() for task in others) < min(64, len(others)):
            raise RuntimeError("the other requests came to their end")
    figures = {f"ttft_p{p}_ms": 1e3 * percentile(seconds, p) for p in (50, 90)}
    return {"ttft_ms": figures.pop("ttft_p50_ms"), **figures}


async def _cancel(tasks: list[asyncio.Task[float]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def measure_all(options: Options, reporter: Reporter) -> list[Record]:
    asked = QUICK_ASKED if options.quick else ASKED
    cases = {case: length for case, length in PROMPTS.items() if options.wants(case)}
    records: list[Record] = []
    async with pair() as client:
        await measure(client, 64, None, 2, seed=0)
        with reporter.counting("measuring", len(cases) * len(CROWDS) * options.times):
            for repetition in range(options.times):
                for number, (case, length) in enumerate(cases.items()):
                    for place, (system, crowd) in enumerate(CROWDS.items()):
                        seed = 100 * repetition + 10 * number + place  # nothing is remembered
                        figures = await measure(client, length, crowd, asked, seed)
                        records.append(Record(case, system, repetition, figures))
                        reporter.done(records[-1], ("ttft_ms", "ttft_p90_ms"))
    return records


def run(options: Options, reporter: Reporter) -> list[Record]:
    return asyncio.run(measure_all(options, reporter))


SCENARIO = Scenario(
    "fair",
    "Fair: one tenant's first tokens beside another's 1,000 requests",
    "A tenant asks for a quarter of what the engine can compute, alone and beside 1,000 requests "
    "of 200 tokens for 64, which keep a pair of engines busy: those of another tenant, and its "
    "own. Beside four that only generate, the engines do not share their steps, but the machine's "
    "processors. "
    f"Who waits for {PATIENCE_S:g} s is waited for no longer.",
    (Column("ttft_ms", "TTFT p50 ms", 0), Column("ttft_p90_ms", "TTFT p90 ms", 0)),
    run,
    versus=("ttft_ms",),
    first_is_baseline=True,
)
