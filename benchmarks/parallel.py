"""What parallelism costs: a step of two ranks beside one of one, and a core that comes and goes.

`python -m benchmarks.parallel` prints milliseconds a decode step at batch 8 with tensor parallelism
1 and 2, and seconds that `scale_elastic_ep` takes from one core to two and back under traffic.
"""

from __future__ import annotations

import asyncio
import json
import time

from benchmarks.overhead import measure

from diptych_engine.build_core import build_core
from diptych_frontend.async_llm import AsyncLLM
from diptych_protocol import EngineConfig, SamplingParams

BATCH = 8
MODELS = {
    "too small to gain": "dummy://?num_hidden_layers=2&hidden_size=64",
    "135M": "dummy://?num_hidden_layers=30&hidden_size=576&intermediate_size=1536"
    "&num_attention_heads=8&num_key_value_heads=2&head_dim=64&vocab_size=49152",
}
CALLERS = 4


def steps(model: str, ranks: int) -> dict[str, object]:
    config = EngineConfig(
        model=model,
        num_blocks=512,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        num_threads=1,
        tensor_parallel_size=ranks,
    )
    core = build_core(config)
    try:
        return {"ranks": ranks, **measure(core, BATCH)}
    finally:
        core.close()


async def scaling() -> dict[str, float]:
    config = EngineConfig(model=MODELS["too small to gain"], num_blocks=512, num_threads=1)
    engine = await AsyncLLM.start(config)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    lengths: list[int] = []

    async def caller(name: str) -> None:
        while True:
            async for output in engine.generate([1, 2, 3], params, name):
                if output.finished:
                    lengths.append(len(output.outputs[0].token_ids))

    callers = [asyncio.create_task(caller(f"caller-{index}")) for index in range(CALLERS)]
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
    short = sum(length != 200 for length in lengths)
    return {
        "grow_s": grown - started, "shrink_s": shrunk - grown, "answers": len(lengths),
        "cut_short": short,
    }  # fmt: skip


def main() -> None:
    for name, model in MODELS.items():
        for ranks in (1, 2):
            print(json.dumps({"model": name, **steps(model, ranks)}), flush=True)
    print(json.dumps(asyncio.run(scaling())))


if __name__ == "__main__":
    main()
