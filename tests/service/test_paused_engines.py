"""A router and engines that somebody pauses or puts to sleep: nobody's answer suffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_kit.executor import PACED
from service_kit import Streaming, cores, engine_config, generate, healthy, routing

MODEL = "dummy://"
PROMPT = [number % 97 for number in range(60)]
LONG = 150
"""Tokens of a stream that is under way until somebody has looked."""


async def test_a_router_avoids_paused_engines_and_takes_their_streams_elsewhere(
    keys_dir: Path, eventually: Any
) -> None:
    names = ("prefill-0", "decode-0", "decode-1")
    configs = [engine_config(name, MODEL, executor_class=PACED) for name in names]
    with cores(keys_dir, *configs) as started:
        [prefill, *decode] = [core.address for core in started]
        async with routing(MODEL, keys_dir, [prefill], decode, verify="Warn") as client:
            await healthy(client)
            await eventually(lambda: len(client.pools.of("decode")) == 2)
            alone = (await generate(client, PROMPT, max_tokens=LONG, ignore_eos=True)).outputs[0]
            stream = Streaming(client, PROMPT, max_tokens=LONG)
            await eventually(lambda: len(stream.token_ids) > 20)
            links = client.pools.of("decode")
            [busy] = [link for link in links if link.open_tokens]
            [other] = [link for link in links if link is not busy]
            await busy.client.call("sleep", 1, "abort")
            assert busy.stats.paused
            assert not client.pools.usable(busy)
            assert await stream.done() == list(alone.token_ids), "it went on at the other one"
            for _ in range(4):
                answer = await generate(client, PROMPT, max_tokens=40, ignore_eos=True)
                assert answer.outputs[0].token_ids == alone.token_ids[:40]
                assert not busy.open_tokens
            await client.check_health()
            await other.client.call("pause_generation", "wait", False)
            assert client.why_not_ready() == "no decode engine is usable"
            held = Streaming(client, PROMPT, max_tokens=10)
            await busy.client.call("wake_up")
            assert await held.done() == list(alone.token_ids)[:10]
            await other.client.call("resume_generation")
            await eventually(lambda: client.pools.usable(other))
