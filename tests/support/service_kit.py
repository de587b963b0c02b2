"""Real engines, as AsyncLLM clients of real EngineCore processes, and the pools around them.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from free_ports import free_port
from waits import PATIENCE_S

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.curve import read_keys
from diptych_frontend.core_client.launcher import CoreProcess
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import (
    CurveKeys,
    EngineConfig,
    EngineDeadError,
    KVTransferConfig,
    OurOptions,
    PromptType,
    RequestOutput,
    RequestOutputKind,
    RouterConfig,
    SamplingParams,
)
from diptych_router.engines.discovery import parse_targets
from diptych_router.engines.engine_link import EngineLink, ReadKeys
from diptych_router.requests.pool_client import PoolClient

NUM_BLOCKS = 256
LIGHT = "dummy://?vocab_size=49152&num_hidden_layers=1&hidden_size=64"
"""Quick to start and to compute, and says anything that the real tokenizer can write, characters in
pieces too: the engines of tests that expect no words."""
SUPPORT = Path(__file__).parent


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


@contextlib.contextmanager
def importing_support() -> Iterator[None]:
    """Engines that are started in the block can import what is in this folder."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
        yield


@dataclass
class Pair:
    """One prefill engine, one decode engine, and a router's client of both."""

    prefill: AsyncLLM
    decode: AsyncLLM
    pools: PoolClient

    async def all_blocks_free(self) -> bool:
        stats = [await engine.refresh_stats() for engine in (self.prefill, self.decode)]
        return all(s.blocks_free == s.blocks_total for s in stats)


@dataclass
class Core:
    """An engine without a front-end: what a router talks to."""

    config: EngineConfig
    address: str
    """host:port for routers."""
    keys_dir: Path
    process: CoreProcess = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin to start it, again too; a router finds it when it is ready. It can import what is
        in this folder."""
        with importing_support():
            self.process = CoreProcess(self.config, f"tcp://{self.address}", self.keys_dir)

    def signal(self, number: signal.Signals) -> None:
        self.process.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.stop()


@contextlib.contextmanager
def cores(keys_dir: Path, *configs: EngineConfig) -> Iterator[list[Core]]:
    """Engines at free ports, which end with the block."""
    started: list[Core] = []
    try:
        for config in configs:
            started.append(Core(config, f"127.0.0.1:{free_port()}", keys_dir))
        yield started
    finally:
        for core in started:
            core.kill()


async def start_engine(config: EngineConfig, keys_dir: Path) -> tuple[AsyncLLM, str]:
    endpoint = f"127.0.0.1:{free_port()}"
    engine = await AsyncLLM.start(config, public_endpoint=f"tcp://{endpoint}", keys_dir=keys_dir)
    return engine, endpoint


def make_pools(model: str, prefill: str, decode: str, keys: CurveKeys) -> PoolClient:
    """A router's client of two pools, each a comma-separated list of host:port."""
    return make_router(model, prefill, decode, lambda: [keys])


def make_router(
    model: str,
    prefill: str,
    decode: str,
    read_keys: ReadKeys | None,
    *,
    serving: Path | None = None,
    **settings: object,
) -> PoolClient:
    """As `make_pools`, with the settings of a RouterConfig."""
    source = resolve_model(model)
    renderer = TextRenderer(source)
    # By `open_tokens`, which tests may change.
    usual = {"served_name": "smollm2", "policy": "least_loaded"}
    config = RouterConfig(model=model, **{**usual, **settings})  # type: ignore[arg-type]
    inputs = InputProcessor(
        renderer,
        max_model_len=source.config.max_position_embeddings,
        vocab_size=source.config.vocab_size,
        eos_token_ids=source.config.eos_token_ids,
        reasoning_parser=config.reasoning_parser,
    )
    tracer = None
    if config.otlp_traces_endpoint:
        # It imports the API, which a machine that is lent for its GPU does not have.
        from diptych_router.program.program import start_router_tracer

        tracer = start_router_tracer(config)
    return PoolClient(
        config,
        inputs,
        OutputProcessor(renderer.tokenizer, reasoning_parser=config.reasoning_parser),
        targets={"prefill": parse_targets(prefill), "decode": parse_targets(decode)},
        read_keys=read_keys,
        serving=serving,
        tracer=tracer,
    )


def router_command(folder: Path, config: RouterConfig, *arguments: object) -> list[str]:
    """The command of a router process whose configuration is written to the folder."""
    path = folder / "router.json"
    path.write_bytes(msgspec.json.encode(config))
    return [sys.executable, "-m", "diptych_router", "--config", str(path), *map(str, arguments)]


@contextlib.asynccontextmanager
async def routing(
    model: str, keys_dir: Path, prefill: list[str], decode: list[str], **settings: Any
) -> AsyncIterator[PoolClient]:
    """A router's client that has begun to look for engines at these addresses."""
    client = make_router(
        model,
        ",".join(prefill),
        ",".join(decode),
        settings.pop("read_keys", lambda: [read_keys(keys_dir)]),
        **settings,
    )
    client.start()
    try:
        yield client
    finally:
        client.shutdown()
        if client.router_tracer is not None:
            await asyncio.to_thread(client.router_tracer.close)


async def healthy(pools: PoolClient, timeout_s: float = PATIENCE_S) -> None:
    """Wait until both pools are up."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                await pools.check_health()
                return
            except EngineDeadError:
                await asyncio.sleep(0.05)


async def all_usable(client: PoolClient, count: int) -> None:
    """Wait until the router may use so many engines."""
    async with asyncio.timeout(PATIENCE_S):
        pools = client.pools
        while sum(link.up and pools.usable(link) for link in pools.links.values()) < count:
            await asyncio.sleep(0.05)


def link_of(client: PoolClient, core: Core) -> EngineLink:
    """The router's line to an engine."""
    return next(x for x in client.pools.links.values() if x.endpoint.endswith(core.address))


async def generate(
    client: AsyncLLM | PoolClient,
    prompt: PromptType,
    *,
    pin_s: int = 0,
    prefetches: bool = False,
    **params: object,
) -> RequestOutput:
    """The final output of one request."""
    wanted = SamplingParams(
        output_kind=RequestOutputKind.FINAL_ONLY,
        **{"temperature": 0.0, "max_tokens": 16, **params},  # type: ignore[arg-type]
    )
    final = None
    told: OurOptions = {"pin_s": pin_s, "prefetches": prefetches}
    async for output in client.generate(prompt, wanted, "test", **told):
        final = output
    assert final is not None
    return final


class Streaming:
    """A greedy answer that is read as it comes."""

    def __init__(self, client: PoolClient, prompt: PromptType, max_tokens: int = 120) -> None:
        self.token_ids: list[int] = []
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        self._task = asyncio.create_task(self._read(client.generate(prompt, params, "stream")))

    async def _read(self, outputs: Any) -> None:
        async for output in outputs:
            self.token_ids += output.outputs[0].token_ids

    async def done(self, timeout_s: float = PATIENCE_S) -> list[int]:
        await asyncio.wait_for(self._task, timeout_s)
        return self.token_ids

    async def leave(self) -> None:
        """Read no further."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
