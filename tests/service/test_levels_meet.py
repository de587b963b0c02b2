"""Engines on processors of different levels hand over to each other, and answer as either does."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from model_kit.questions import DEMO
from waits import FOR_EVER_S

from diptych_engine import AsyncLLM, EngineArgs
from diptych_frontend.text.input_processor import InputProcessor
from diptych_kernels.cpu_level import CpuLevel, machine_level
from diptych_protocol import EngineConfig, KVTransferConfig, RequestOutput, SamplingParams

LEVELS = [level for level in CpuLevel if level <= machine_level()]
MEETINGS = [
    pytest.param(*levels, marks=pytest.mark.slow if number else [])
    for number, levels in enumerate(zip(LEVELS, [*LEVELS[1:], LEVELS[0]], strict=True))
]
"""Each level prefills once and decodes once; the quick one is of the lowest and the next."""


async def answer(
    engine: AsyncLLM, name: str, prompt: list[int], tokens: int, remote: object
) -> RequestOutput:
    extra = {"kv_transfer_params": remote} if remote else None
    params = SamplingParams(temperature=0.0, max_tokens=tokens, extra_args=extra)
    outputs = [o async for o in engine.generate({"prompt_token_ids": prompt}, params, name)]
    return outputs[-1]


@pytest.mark.skipif(len(LEVELS) < 2, reason="this machine has one level")
@pytest.mark.parametrize(("prefill_level", "decode_level"), MEETINGS, ids=lambda level: level.word)
async def test_decode_goes_on_with_what_another_level_prefilled(
    prefill_level: CpuLevel, decode_level: CpuLevel, smollm2: str
) -> None:
    renderer = InputProcessor.of(EngineConfig(smollm2)).renderer
    chat = renderer.render_chat([{"role": "user", "content": DEMO.words}])
    prompt = chat["prompt_token_ids"]
    async with AsyncExitStack() as stack:
        engines = []
        for level in (prefill_level, decode_level):
            engine = AsyncLLM.from_engine_args(
                EngineArgs(
                    smollm2, max_model_len=128, num_blocks=64, num_threads=1,
                    cpu_level=level.word,  # type: ignore[arg-type]
                    kv_transfer=KVTransferConfig(lease_seconds=FOR_EVER_S),
                )
            )  # fmt: skip
            stack.callback(engine.shutdown)
            engines.append(engine)
        for engine in engines:  # a lease does not wait for kernels that are compiled
            await engine.ready()
        prefill, decode = engines
        first = await answer(prefill, "p", prompt, 1, {"do_remote_decode": True})
        rest = await answer(decode, "d", prompt, 8, first.kv_transfer_params)
        alone = await answer(prefill, "alone", prompt, 8, None)
        received = (await decode.refresh_stats()).remote_kv_tokens
    text = renderer.decode(rest.outputs[0].token_ids)
    assert text.startswith(DEMO.answer)
    assert rest.outputs[0].token_ids == alone.outputs[0].token_ids
    assert received == len(prompt)
