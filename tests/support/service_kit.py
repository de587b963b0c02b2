"""Real engines, as AsyncLLM clients of real EngineCore processes, and the pools around them.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path

from diptych_frontend.async_llm import AsyncLLM
from diptych_frontend.input_processor import InputProcessor
from diptych_frontend.model_source import resolve_model
from diptych_frontend.output_processor import OutputProcessor
from diptych_frontend.renderer import TextRenderer
from diptych_protocol import (
    CurveKeys,
    EngineConfig,
    KVTransferConfig,
    PromptType,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from diptych_router.pool_client import PoolClient

NUM_BLOCKS = 256


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def engine_config(name: str, model: str, **changes: object) -> EngineConfig:
    return EngineConfig(
        model=model,
        served_name="smollm2",
        engine_id=name,
        num_threads=1,
        **{  # type: ignore[arg-type]
            "num_blocks": NUM_BLOCKS,
            "max_num_batched_tokens": 256,
            "kv_transfer": KVTransferConfig(lease_seconds=5.0),
            **changes,
        },
    )


@dataclass
class Pair:
    """One prefill engine, one decode engine, and a router's client of both."""

    prefill: AsyncLLM
    decode: AsyncLLM
    pools: PoolClient

    async def all_blocks_free(self) -> bool:
        stats = [await engine.refresh_stats() for engine in (self.prefill, self.decode)]
        return all(s.blocks_free == s.blocks_total for s in stats)


async def start_engine(config: EngineConfig, keys_dir: Path) -> tuple[AsyncLLM, str]:
    endpoint = f"127.0.0.1:{free_port()}"
    engine = await AsyncLLM.start(config, public_endpoint=f"tcp://{endpoint}", keys_dir=keys_dir)
    return engine, endpoint


def make_pools(model: str, prefill: str, decode: str, keys: CurveKeys) -> PoolClient:
    source = resolve_model(model)
    renderer = TextRenderer(source)
    inputs = InputProcessor(
        renderer,
        max_model_len=source.config.max_position_embeddings,
        vocab_size=source.config.vocab_size,
        eos_token_ids=source.config.eos_token_ids,
    )
    targets = {
        role: [(host, int(port))]
        for role, (host, port) in (
            ("prefill", prefill.split(":")),
            ("decode", decode.split(":")),
        )
    }
    return PoolClient(
        "smollm2", inputs, OutputProcessor(renderer.tokenizer), targets=targets, keys=keys
    )


async def healthy(pools: PoolClient, timeout_s: float = 20.0) -> None:
    """Wait until both pools are up."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                await pools.check_health()
                return
            except Exception:
                await asyncio.sleep(0.05)


async def generate(
    client: AsyncLLM | PoolClient, prompt: PromptType, **params: object
) -> RequestOutput:
    """The final output of one request."""
    wanted = SamplingParams(
        output_kind=RequestOutputKind.FINAL_ONLY,
        **{"temperature": 0.0, "max_tokens": 16, **params},  # type: ignore[arg-type]
    )
    final = None
    async for output in client.generate(prompt, wanted, "test"):
        final = output
    assert final is not None
    return final
