"""What parallelism costs on one machine: ranks of a layer, and cores behind one front-end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

from benchmarks.figures import Record
from benchmarks.scenario import Column, Options, Reporter, Scenario
from benchmarks.scenarios.overhead import DUMMY, measure

from diptych_engine.serving.build_core import build_core
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import EngineConfig, RequestOutputKind, SamplingParams

BATCH = 8
SHAPED = (
    "dummy://?num_hidden_layers=30&hidden_size=576&intermediate_size=1536"
    "&num_attention_heads=8&num_key_value_heads=2&head_dim=64&vocab_size=49152"
)
"""The shape of SmolLM2-135M, but with heads that two ranks can share."""
CALLERS, TOKENS = 16, 64
SIZES = (1, 2)


def tensor_parallel(model: str) -> Callable[[int], dict[str, float]]:
    """A function that measures, for a number of ranks with a thread each, a decode step of 8
    requests."""

    def steps(ranks: int) -> dict[str, float]:
        config = EngineConfig(
            model=model, num_blocks=1024, max_num_seqs=64, max_num_batched_tokens=4096,
            num_threads=1, tensor_parallel_size=ranks,
        )  # fmt: skip
        core = build_core(config)
        try:
            return measure(core, BATCH)
        finally:
            core.close()

    return steps


def data_parallel(model: str, tokens: int) -> Callable[[int], dict[str, float]]:
    """A function that measures, for a number of cores with a thread each, the output tokens per
    second of 16 callers."""

    def throughput(cores: int) -> dict[str, float]:
        config = EngineConfig(model=model, num_blocks=4096, num_threads=1, data_parallel_size=cores)
        return {"tokens_per_s": asyncio.run(tokens_per_s(config, tokens))}

    return throughput


async def tokens_per_s(config: EngineConfig, tokens: int) -> float:
    """Output tokens per second of all callers at once, after a round of them as a warm-up."""
    engine = await AsyncLLM.start(config)
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def call(name: str, index: int) -> None:
        prompt = [index + 2] * BATCH
        async for _ in engine.generate(prompt, params, f"{name}-{index}"):
            pass

    try:
        await asyncio.gather(*(call("warm-up", index) for index in range(CALLERS)))
        started = time.perf_counter()
        await asyncio.gather(*(call("measured", index) for index in range(CALLERS)))
        return CALLERS * tokens / (time.perf_counter() - started)
    finally:
        engine.shutdown()


def elastic(model: str) -> dict[str, float]:
    """Seconds that it takes to add a second core, and to remove it again, while callers go on."""
    config = EngineConfig(model=model, num_blocks=512, num_threads=1)
    return asyncio.run(grow_and_shrink(config))


async def grow_and_shrink(config: EngineConfig) -> dict[str, float]:
    """What `elastic` measures. Raises `RuntimeError` if an answer was cut short."""
    engine = await AsyncLLM.start(config)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    short: list[str] = []

    async def caller(index: int) -> None:
        for turn in itertools.count():
            async for output in engine.generate([index + 2], params, f"{index}-{turn}"):
                if output.finished and len(output.outputs[0].token_ids) != TOKENS:
                    short.append(output.request_id)

    callers = [asyncio.create_task(caller(index)) for index in range(CALLERS)]
    try:
        started = time.perf_counter()
        await engine.scale_elastic_ep(2)
        grown = time.perf_counter()
        await engine.scale_elastic_ep(1, drain_timeout=0)
        shrunk = time.perf_counter()
    finally:
        for task in callers:
            task.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        engine.shutdown()
    if short:
        raise RuntimeError(f"answers were cut short: {short}")
    return {"grow_s": grown - started, "shrink_s": shrunk - grown}


CASES: dict[str, tuple[str, Callable[[int], dict[str, float]]]] = {
    "tensor, 2 layers": ("TP", tensor_parallel(DUMMY)),
    "tensor, 135M": ("TP", tensor_parallel(SHAPED)),
    "data, 2 layers": ("DP", data_parallel(DUMMY, 1000)),
    "data, 135M": ("DP", data_parallel(SHAPED, 64)),
}
ELASTIC = "elastic"


def run(options: Options, reporter: Reporter) -> list[Record]:
    cases = [*CASES, ELASTIC]
    total = sum(1 if case == ELASTIC else len(SIZES) for case in cases if options.wants(case))
    records: list[Record] = []
    with reporter.counting("measuring", total * options.times):
        for case in filter(options.wants, cases):
            for repetition in range(options.times):
                for record in _turns(case, repetition):
                    records.append(record)
                    reporter.done(record, ("step_ms", "tokens_per_s", "grow_s"))
    return records


def _turns(case: str, repetition: int) -> Iterator[Record]:
    if case == ELASTIC:
        yield Record(case, "DP=1 to 2 and back", repetition, elastic(DUMMY))
        return
    kind, measured = CASES[case]
    for size in SIZES:
        yield Record(case, f"{kind}={size}", repetition, measured(size))


SCENARIO = Scenario(
    "parallel",
    "Parallel: two processes as one engine",
    f"`tensor`: a decode step of {BATCH} requests by one rank, and by two that share each "
    f"layer over gloo. `data`: {CALLERS} callers of one core, and of two. One thread for each "
    "process, so two processes may take both processors; `2 layers` is a dummy model that is "
    "nothing but overhead. `elastic`: a second core comes and goes under traffic.",
    (
        Column("step_ms", "step ms", 2),
        Column("tokens_per_s", "output tokens/s"),
        Column("grow_s", "to grow s", 2),
        Column("shrink_s", "to shrink s", 2),
    ),
    run,
    versus=("step_ms", "tokens_per_s"),
    first_is_baseline=True,
)
