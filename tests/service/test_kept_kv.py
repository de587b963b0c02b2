"""Engines are killed in the middle of many streams, and the next ones go on with their KV."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_kit.core import BATCHED
from service_kit import Streaming, all_usable, cores, engine_config, link_of, routing
from waits import PATIENCE_S

pytestmark = pytest.mark.asyncio

STREAMS, LENGTH, TOLD = 16, 200, 40
IN_BLOCKS = 96
"""Tokens of each prompt that fill blocks."""
MODEL = "dummy://?vocab_size=49152&num_hidden_layers=1&hidden_size=64"
PROMPTS = [
    f"Chapter {n}. The lighthouse keeper climbed the stairs, and " * 8 for n in range(STREAMS)
]


async def test_streams_of_killed_engines_go_on_with_what_was_computed(
    smollm2: str, keys_dir: Path, tmp_path: Path
) -> None:
    configs = [
        engine_config(
            name,
            MODEL,
            weight_packing=BATCHED,
            num_blocks=1024,
            kv_keep=str(tmp_path / name),
        )
        for name in ("prefill-0", "decode-0")
    ]
    with cores(keys_dir, *configs) as engines:
        places = [[core.address] for core in engines]
        async with routing(smollm2, keys_dir, *places) as client:
            await all_usable(client, 2)
            first = [Streaming(client, prompt, LENGTH) for prompt in PROMPTS]
            expected = [await stream.done() for stream in first]
            assert await client.reset_prefix_cache()  # nothing is left of that
            streams = [Streaming(client, prompt, LENGTH) for prompt in PROMPTS]
            async with asyncio.timeout(PATIENCE_S):
                while min(len(stream.token_ids) for stream in streams) < TOLD:
                    await asyncio.sleep(0.01)
            for core in engines:
                core.kill()
            for core in engines:
                core.start()
            assert [await stream.done() for stream in streams] == expected
            of_p, of_d = [await link_of(client, core).refresh_stats() for core in engines]
            assert of_p.prefix_cache_hits >= STREAMS * IN_BLOCKS
            assert of_d.prefix_cache_hits >= STREAMS * (IN_BLOCKS + TOLD // 16 * 16)
